"""What is drawn, and with which pen: the rows of panels, the curves in each, the legend."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedda.report.style import COLOURS, DASHES, Axis, axes, pen
from fedda.runs.curves import Curve
from fedda.runs.reading import RecordedRun, ordered

PAPER = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")  # a row of the paper's figures
Dash = tuple[float, ...]


@dataclass(frozen=True)
class Series:
    """An algorithm of a run with its pen; `entries` are the lines of the legend that stand for it."""

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
    """A line of the legend: `section` 0 tells curves apart, 1 the runs of a comparison (no colour then)."""

    text: str
    colour: str
    dash: Dash
    section: int = 0


@dataclass(frozen=True)
class Picture:
    """Rows of panels by title, `[""]` where there are no groups; a curve is drawn in its row alone."""

    rows: list[str]
    metrics: list[str]
    series: list[Series]
    entries: list[LegendEntry]

    @property
    def lines(self) -> list[list[str]]:
        """The metrics of a row, line by line: the paper's four panels, then the others.

        >>> Picture([""], [*PAPER, "density"], [], []).lines[1]
        ['density']
        """
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
    key: str  # the curves of one key share a colour, whatever their row or run
    group: str


def picture(runs: Sequence[RecordedRun], names: Sequence[str] = ("",)) -> Picture:
    """Lay out one run, or several by name.

    `group` in an algorithm's table names its row; one method has one pen in all rows. Where several runs have the same
    algorithms, colour tells the algorithm and the dashes tell the run.

    >>> from pathlib import Path
    >>> own = {"a (5)": {"name": "a", "group": "I = 5"}, "a (9)": {"name": "a", "group": "I = 9"}}
    >>> found = picture([RecordedRun(Path("a"), {"algorithms": own}, {}, {}, [], {}, list(own), [], {})])
    >>> found.rows, [series.colour for series in found.series]
    (['I = 5', 'I = 9'], ['#0072b2', '#0072b2'])
    """
    marks = [mark for i, run in enumerate(runs) for mark in _marks(i, run)]
    keys = list(dict.fromkeys(mark.key for mark in marks))
    groups = dict.fromkeys(mark.group for mark in marks) or {"": None}
    rows = sorted(groups, key=bool)  # those without a group come first; the sort is stable
    shared = len({(mark.run, mark.key) for mark in marks}) > len(keys)  # some algorithm is in several runs
    crossed = shared and len(keys) <= len(COLOURS) and len(runs) <= len(DASHES)
    if shared:
        marks.sort(key=lambda mark: keys.index(mark.key))  # one below the other in the tables

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
    )


def _marks(index: int, run: RecordedRun) -> list[_Mark]:
    asked = run.config.get("algorithms")
    tables = {k: v for k, v in asked.items() if isinstance(v, dict)} if isinstance(asked, dict) else {}
    grouped = any(table.get("group") for table in tables.values())
    by_steps = grouped and _told_by_steps([tables.get(label, {}) for label in run.labels])
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for label in run.labels:
        own = tables.get(label, {})
        key, group = label, ""
        if grouped:
            group, name = str(own.get("group", "")), str(own.get("name", label))
            seen[group, name] += 1
            # The same method twice in one row needs two pens.
            key = name if seen[group, name] == 1 else f"{name} ({seen[group, name]})"
            key = f"I = {own['steps']}" if by_steps else key
        found.append(_Mark(index, label, key, group))
    return found


def _told_by_steps(tables: list[dict[str, object]]) -> bool:
    """Whether each row has one method, several times, with other numbers of local steps: these have pens, then."""
    rows: dict[str, list[dict[str, object]]] = {}
    for table in tables:
        rows.setdefault(str(table.get("group", "")), []).append(table)
    steps = [[table.get("steps") for table in own] for own in rows.values()]
    alone = all(len({table.get("name") for table in own}) == 1 for own in rows.values())
    return alone and all(None not in own and len(set(own)) == len(own) > 1 for own in steps)


def _text(mark: _Mark, marks: list[_Mark]) -> str:
    labels = {other.label for other in marks if other.key == mark.key}
    return mark.label if len(labels) == 1 else mark.key
