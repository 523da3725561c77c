"""The tables under the curves: final values with the best marked, and what they cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedda.report import style
from fedda.report.picture import Picture, Series
from fedda.report.summary import summary
from fedda.runs import formats
from fedda.runs.reading import RecordedRun

COSTS = (
    ("Gradients", "gradients", formats.count),
    ("Up", "bytes_up", formats.size),
    ("Down", "bytes_down", formats.size),
    ("Dropped", "dropped", formats.count),
    ("Time", "seconds", formats.duration),
)


@dataclass(frozen=True)
class Line:
    """One algorithm: `cells` are (text, whether it is the best)."""

    series: Series
    rounds: str
    seeds: str
    note: str
    cells: list[tuple[str, bool]]
    costs: list[str]


@dataclass(frozen=True)
class Table:
    """Lines by the row of panels they belong to; a name of the run stands beside each line of a comparison."""

    heads: list[str]
    groups: list[tuple[str, list[Line]]]
    runs: list[str]


def table(shown: Picture, runs: Sequence[RecordedRun], names: Sequence[str] = ("",)) -> Table:
    """Write the final values of every algorithm of `shown`; the best is marked among those of one group.

    >>> from pathlib import Path
    >>> from fedda.report.picture import picture
    >>> run = RecordedRun(Path("a"), {}, {}, {}, [], {}, ["fedavg"], ["train_loss"], {})
    >>> found = table(picture([run]), [run])
    >>> found.heads, found.groups[0][1][0].cells
    (['Train loss'], [('–', False)])
    """
    finals = [{final["label"]: final for final in summary(run)} for run in runs]
    keys = [*shown.metrics, *(["best_test_accuracy"] if "test_accuracy" in shown.metrics else [])]
    groups = []
    for row, title in enumerate(shown.rows):
        own = [(series, finals[series.run][series.own]) for series in shown.series if series.row == row]
        best = {key: _best(key, [final.get(key) for _, final in own]) for key in keys}
        lines = [_line(series, final, runs[series.run].config, best) for series, final in own]
        groups.append((title, lines))
    return Table([style.metric(key).name for key in keys], groups, list(names))


def _best(key: str, found: list[float | None]) -> float | None:
    values = [value for value in found if value is not None]
    better = style.metric(key).better
    if not better or len(values) < 2:  # one algorithm alone is not the best of anything
        return None
    return min(values) if better == "lower" else max(values)


def _line(series: Series, final: dict[str, Any], config: dict[str, Any], best: dict[str, float | None]) -> Line:
    asked, seeds = config.get("rounds"), config.get("seeds")
    done, n, lost = final["rounds"], final["seeds"], final["diverged"]
    notes = ["failed" if final["failure"] else f"{lost} of {n} seeds diverged" if lost else "", final["privacy"] or ""]
    cells = []
    for key, top in best.items():
        value = final.get(key)
        text = formats.spread(value, final.get(f"{key}_std"), style.metric(key).percent)
        cells.append((text, top is not None and value == top))
    return Line(
        series=series,
        rounds="–" if done is None else f"{done} of {asked}" if asked not in (None, done) else f"{done}",
        seeds=f"{n} of {len(seeds)}" if isinstance(seeds, list) and len(seeds) != n else f"{n}",
        note="; ".join(filter(None, notes)),
        cells=cells,
        costs=[write(final[key]) for _, key, write in COSTS],
    )
