"""The layout of a figure: rows of panels, the curves in each with colour and dashes, and the legend."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..runs.curves import Curve
from ..runs.metrics import ShownMetric, metric
from ..runs.reading import RecordedRun, ordered
from .style import COLOURS, DASHES, Axis, axes, pen

PAPER = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")  # a row of the paper's figures
Dash = tuple[float, ...]


@dataclass(frozen=True)
class Series:
    """An algorithm of a run with its colour and dashes; `entries` are its lines in the legend."""

    label: str
    run: int
    own: str  # its label within its run
    row: int
    colour: str
    dash: Dash
    entries: tuple[int, ...]
    curves: dict[str, Curve]


@dataclass(frozen=True)
class LegendEntry:
    """A line of the legend: of a curve in `section` 0, of a run of a comparison in section 1 (without a colour)."""

    text: str
    colour: str
    dash: Dash
    section: int = 0


@dataclass(frozen=True)
class Picture:
    """Rows of panels by title, `[""]` without groups; a curve is drawn only in its row."""

    rows: list[str]
    metrics: list[str]
    series: list[Series]
    entries: list[LegendEntry]
    directions: dict[str, str] = field(default_factory=dict)  # of the runs' own metrics

    def metric(self, key: str) -> ShownMetric:
        return metric(key, self.directions)

    @property
    def lines(self) -> list[list[str]]:
        """The metrics of a row by line: the paper's four panels, then the others."""
        first = [m for m in self.metrics if m in PAPER]
        rest = [m for m in self.metrics if m not in PAPER]
        return [line for line in (first, rest) if line] if len(self.metrics) > 4 else [self.metrics]

    @property
    def axes(self) -> list[Axis]:
        return axes(curve for series in self.series for curve in series.curves.values())


@dataclass(frozen=True)
class _Mark:
    run: int
    label: str
    key: str  # the curves of one key have the same colour in all rows and runs
    group: str


def picture(runs: Sequence[RecordedRun], names: Sequence[str] = ("",)) -> Picture:
    """Lay out one run, or several by name.

    `group` in an algorithm's table names its row; a method looks the same in all rows. If several runs have the same
    algorithms, the colour is the algorithm's and the dashes are the run's.
    """
    marks = [mark for i, run in enumerate(runs) for mark in _marks(i, run)]
    keys = list(dict.fromkeys(mark.key for mark in marks))
    groups = dict.fromkeys(mark.group for mark in marks) or {"": None}
    rows = sorted(groups, key=bool)  # curves without a group come first; the sort is stable
    shared = len({(mark.run, mark.key) for mark in marks}) > len(keys)  # some algorithm is in several runs
    crossed = shared and len(keys) <= len(COLOURS) and len(runs) <= len(DASHES)
    if shared:
        marks.sort(key=lambda mark: keys.index(mark.key))  # next to each other in the tables

    twice = Counter(label for run in runs for label in set(run.labels))
    drawn: list[tuple[Series, list[LegendEntry]]] = []
    for i, mark in enumerate(marks):
        label = f"{mark.label} · {names[mark.run]}" if twice[mark.label] > 1 else mark.label
        k, text = keys.index(mark.key), _text(mark, marks)
        if crossed:
            colour, dash = COLOURS[k], DASHES[mark.run]
            legend = [LegendEntry(text, colour, ()), LegendEntry(names[mark.run], "", dash, 1)]
        else:
            colour, dash = pen(i if shared else k)
            legend = [LegendEntry(label if shared else text, colour, dash)]
        curves = runs[mark.run].curves.get(mark.label, {})
        series = Series(label, mark.run, mark.label, rows.index(mark.group), colour, dash, (), curves)
        drawn.append((series, legend if curves else []))
    entries = sorted(dict.fromkeys(e for _, legend in drawn for e in legend), key=lambda e: e.section)
    places = {entry: i for i, entry in enumerate(entries)}
    return Picture(
        rows=rows,
        metrics=ordered(m for run in runs for m in run.metrics),
        series=[replace(series, entries=tuple(places[e] for e in legend)) for series, legend in drawn],
        entries=entries,
        directions={name: better for run in runs for name, better in run.directions.items()},
    )


def _marks(index: int, run: RecordedRun) -> list[_Mark]:
    grouped = any(run.params(label).get("group") for label in run.table("algorithms"))
    by_steps = grouped and _differ_in_steps([run.params(label) for label in run.labels])
    seen: Counter[tuple[str, str]] = Counter()
    marks = []
    for label in run.labels:
        params = run.params(label)
        key, group = label, ""
        if grouped:
            group, name = str(params.get("group", "")), str(params.get("name", label))
            seen[group, name] += 1
            # The same method twice in one row needs two colours.
            key = name if seen[group, name] == 1 else f"{name} ({seen[group, name]})"
            key = f"I = {params['steps']}" if by_steps else key
        marks.append(_Mark(index, label, key, group))
    return marks


def _differ_in_steps(tables: list[dict[str, object]]) -> bool:
    """Whether each row has one method with several numbers of local steps: then the colour is that of the number."""
    rows: dict[str, list[dict[str, object]]] = {}
    for table in tables:
        rows.setdefault(str(table.get("group", "")), []).append(table)
    steps = [[table.get("steps") for table in row] for row in rows.values()]
    one_method = all(len({table.get("name") for table in row}) == 1 for row in rows.values())
    return one_method and all(None not in row and len(set(row)) == len(row) > 1 for row in steps)


def _text(mark: _Mark, marks: list[_Mark]) -> str:
    labels = {other.label for other in marks if other.key == mark.key}
    return mark.label if len(labels) == 1 else mark.key
