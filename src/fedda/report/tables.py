"""The tables under the curves: final values, with the best marked, and costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..runs import formats
from ..runs.final_values import summary
from ..runs.metrics import Better
from ..runs.reading import RecordedRun
from .picture import Picture, Series

COSTS = (
    ("Gradients", "gradients", formats.count),
    ("Up", "bytes_up", formats.size),
    ("Down", "bytes_down", formats.size),
    ("Dropped", "dropped", formats.count),
    ("Time", "seconds", formats.duration),
)


@dataclass(frozen=True)
class Line:
    """One algorithm; `cells` are pairs (text, whether it is the best)."""

    series: Series
    rounds: str
    seeds: str
    note: str
    cells: list[tuple[str, bool]]
    costs: list[str]


@dataclass(frozen=True)
class Table:
    """Lines grouped by row of panels; in a comparison each line shows the name of its run."""

    heads: list[str]
    groups: list[tuple[str, list[Line]]]
    runs: list[str]


def table(shown: Picture, runs: Sequence[RecordedRun], names: Sequence[str] = ("",)) -> Table:
    """The final values of every algorithm of `shown`; the best of each group is marked."""
    finals = [{final["label"]: final for final in summary(run)} for run in runs]
    keys = [*shown.metrics, *(["best_test_accuracy"] if "test_accuracy" in shown.metrics else [])]
    groups = []
    for row, title in enumerate(shown.rows):
        group = [(series, finals[series.run][series.own]) for series in shown.series if series.row == row]
        best = {key: _best(shown.metric(key).better, [final.get(key) for _, final in group]) for key in keys}
        lines = [_line(series, final, runs[series.run].config, best, shown) for series, final in group]
        groups.append((title, lines))
    return Table([shown.metric(key).name for key in keys], groups, list(names))


def _best(better: Better, finals: list[float | None]) -> float | None:
    values = [value for value in finals if value is not None]
    if not better or len(values) < 2:  # a single algorithm is not marked as best
        return None
    return min(values) if better == "lower" else max(values)


def _line(
    series: Series, final: dict[str, Any], config: dict[str, Any], best: dict[str, float | None], shown: Picture
) -> Line:  # fmt: skip
    planned, seeds = config.get("rounds"), config.get("seeds")
    done, n, lost = final["rounds"], final["seeds"], final["diverged"]
    notes = ["failed" if final["failure"] else f"{lost} of {n} seeds diverged" if lost else "", final["privacy"] or ""]
    cells = []
    for key, top in best.items():
        value = final.get(key)
        text = formats.spread(value, final.get(f"{key}_std"), shown.metric(key).percent)
        cells.append((text, top is not None and value == top))
    return Line(
        series=series,
        rounds="–" if done is None else f"{done} of {planned}" if planned not in (None, done) else f"{done}",
        seeds=f"{n} of {len(seeds)}" if isinstance(seeds, list) and len(seeds) != n else f"{n}",
        note="; ".join(filter(None, notes)),
        cells=cells,
        costs=[write(final[key]) for _, key, write in COSTS],
    )
