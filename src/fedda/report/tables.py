"""The tables under the curves: final values, with the best or a tie marked, and costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..runs import formats
from ..runs.final_values import best_by_seed, summary
from ..runs.reading import RecordedRun
from .picture import Picture, Series
from .ranking import final_by_seed, marks, problem_groups

COSTS = (
    ("Gradients", "gradients", formats.count),
    ("Up", "bytes_up", formats.size),
    ("Down", "bytes_down", formats.size),
    ("Dropped", "dropped", formats.count),
    ("Time", "seconds", formats.duration),
)
BEST = "best_test_accuracy"


@dataclass(frozen=True)
class Cell:
    """A text, the number by which a column is sorted, and a mark: "best", "tie" or ""."""

    text: str
    value: float | None
    mark: str = ""


@dataclass(frozen=True)
class Line:
    """One algorithm."""

    series: Series
    rounds: str
    seeds: str
    note: str
    cells: list[Cell]
    costs: list[Cell]


@dataclass(frozen=True)
class Table:
    """Lines grouped by row of panels and problem: values are compared, and marked, only within a group."""

    heads: list[str]
    groups: list[tuple[str, list[Line]]]
    seeds: int  # the largest number of seeds


def table(shown: Picture, runs: Sequence[RecordedRun]) -> Table:
    """The final values of every algorithm of `shown`."""
    finals = [{final["label"]: final for final in summary(run)} for run in runs]
    keys = [*shown.metrics, *([BEST] if "test_accuracy" in shown.metrics else [])]
    groups = []
    for title, series in problem_groups(shown):
        rows = [runs[s.run].rows_of(s.own) for s in series]
        own = [finals[s.run][s.own] for s in series]
        equally_long = len({final["rounds"] for final in own if final["rounds"] is not None}) == 1
        marked: dict[str, list[str]] = {}
        for key in keys:
            values: list[dict[int, float]] = [
                best_by_seed(r, "test_accuracy") if key == BEST else final_by_seed(r, key) if key in s.curves else {}
                for s, r in zip(series, rows, strict=True)
            ]
            marked[key] = marks(values, shown.metric(key)) if equally_long else [""] * len(series)
        lines = [
            _line(s, final, runs[s.run].config, {key: marked[key][i] for key in keys}, shown)
            for i, (s, final) in enumerate(zip(series, own, strict=True))
        ]
        groups.append((title, lines))
    seeds = max((final["seeds"] for own in finals for final in own.values()), default=0)
    return Table([shown.metric(key).name for key in keys], groups, seeds)


def _line(
    series: Series, final: dict[str, Any], config: dict[str, Any], mark: dict[str, str], shown: Picture
) -> Line:  # fmt: skip
    planned, seeds = config.get("rounds"), config.get("seeds")
    done, n, lost = final["rounds"], final["seeds"], final["diverged"]
    notes = ["failed" if final["failure"] else f"{lost} of {n} seeds diverged" if lost else "", final["privacy"] or ""]
    cells = []
    for key, own in mark.items():
        text = formats.spread(final.get(key), final.get(f"{key}_std"), shown.metric(key).percent)
        cells.append(Cell(text, final.get(key), own))
    return Line(
        series=series,
        rounds="–" if done is None else f"{done} of {planned}" if planned not in (None, done) else f"{done}",
        seeds=f"{n} of {len(seeds)}" if isinstance(seeds, list) and len(seeds) != n else f"{n}",
        note="; ".join(filter(None, notes)),
        cells=cells,
        costs=[Cell(write(final[key]), final[key]) for _, key, write in COSTS],
    )
