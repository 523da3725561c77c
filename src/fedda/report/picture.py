"""The layout of a figure: rows of panels, the curves in each with colour and dashes, and the legend."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..runs.curves import Curve
from ..runs.metrics import ShownMetric, metric
from ..runs.reading import RecordedRun, ordered
from .limits import Limits, limits
from .style import DASHES, Axis, axes, distinct_pens

PAPER = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")  # a row of the paper's figures
NOT_THE_PROBLEM = ("batch", "metrics")  # keys of [problem] that change how it is solved or what is measured
Dash = tuple[float, ...]


@dataclass(frozen=True)
class Series:
    """An algorithm of a run with its colour and dashes; `entries` are its lines in the legend."""

    label: str  # unlike all others on the page
    name: str  # the same without its run, if that is clear in its row
    run: int
    own: str  # its label within its run
    row: int
    problem: int  # values are compared only within one problem: the same data, split, model and penalty
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
    data: list[int]  # the data set of each row, as a number: the panels of one data set have the same scales
    problems: list[str]  # what tells a problem from the others on its data; "" if there is one
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

    def on(self, data: int, metric: str) -> list[Series]:
        """The series whose curves of a metric share their scale: those on one data set."""
        return [s for s in self.series if metric in s.curves and self.data[s.row] == data]

    def limits(self, data: int, metric: str) -> Limits:
        return limits([s.curves[metric] for s in self.on(data, metric)], self.metric(metric))


@dataclass(frozen=True)
class _Mark:
    run: int
    label: str
    method: str
    key: str  # the curves of one key have the same colour in all rows and runs
    group: str
    data: str
    problem: str


def picture(runs: Sequence[RecordedRun], names: Sequence[str] = ("",)) -> Picture:
    """Lay out one run, or several by name.

    Each data set has its own rows of panels, and `group` in an algorithm's table names a row. A method has one colour
    everywhere. If several runs have the same algorithms, the dashes are the run's.
    """
    marks = [mark for i, run in enumerate(runs) for mark in _marks(i, run)]
    keys = list(dict.fromkeys(mark.key for mark in marks))
    sets = list(dict.fromkeys(mark.data for mark in marks)) or [""]
    places = list(dict.fromkeys((mark.data, mark.group) for mark in marks)) or [("", "")]
    # By data set; curves without a group come first. The sort is stable.
    places.sort(key=lambda place: (sets.index(place[0]), bool(place[1])))
    problems = list(dict.fromkeys(mark.problem for mark in marks))
    # Whether some algorithm is in one panel from several runs.
    shared = len({(mark.run, mark.key) for mark in marks}) > len({(mark.data, mark.key) for mark in marks})
    if shared:
        marks.sort(key=lambda mark: keys.index(mark.key))  # next to each other in the tables

    method_of = {mark.key: mark.method for mark in reversed(marks)}
    pens = distinct_pens([method_of[key] for key in keys])
    crossed = shared and len({colour for colour, _ in pens}) == len(keys) and len(runs) <= len(DASHES)
    if shared and not crossed:
        pens = distinct_pens([mark.method for mark in marks])
    twice = Counter(label for run in runs for label in set(run.labels))
    in_row = Counter((mark.data, mark.group, mark.label) for mark in marks)
    drawn: list[tuple[Series, list[LegendEntry]]] = []
    for i, mark in enumerate(marks):
        label = f"{mark.label} · {names[mark.run]}" if twice[mark.label] > 1 else mark.label
        k, text = keys.index(mark.key), _text(mark, marks)
        if crossed:
            colour, dash = pens[k][0], DASHES[mark.run]
            legend = [LegendEntry(text, colour, ()), LegendEntry(names[mark.run], "", dash, 1)]
        else:
            colour, dash = pens[i if shared else k]
            legend = [LegendEntry(label if shared else text, colour, dash)]
        curves = runs[mark.run].curves.get(mark.label, {})
        row, problem = places.index((mark.data, mark.group)), problems.index(mark.problem)
        name = label if in_row[mark.data, mark.group, mark.label] > 1 else mark.label
        series = Series(label, name, mark.run, mark.label, row, problem, colour, dash, (), curves)
        drawn.append((series, legend if curves else []))
    entries = sorted(dict.fromkeys(e for _, legend in drawn for e in legend), key=lambda e: e.section)
    numbers = {entry: i for i, entry in enumerate(entries)}
    titles = [" · ".join(filter(None, [file_name(data) if len(sets) > 1 else "", group])) for data, group in places]
    return Picture(
        rows=titles,
        data=[sets.index(data) for data, _ in places],
        problems=_differences(problems, [{m.data for m in marks if m.problem == p} for p in problems]),
        metrics=ordered(m for run in runs for m in run.metrics),
        series=[replace(series, entries=tuple(numbers[e] for e in legend)) for series, legend in drawn],
        entries=entries,
        directions={name: better for run in runs for name, better in run.directions.items()},
    )


def _differences(problems: list[str], sets: list[set[str]]) -> list[str]:
    """What tells each problem from the others on the same data."""
    tables = [dict(flat(json.loads(problem))) for problem in problems]
    texts = []
    for own, data in zip(tables, sets, strict=True):
        others = [t for t, d in zip(tables, sets, strict=True) if d == data]
        keys = [k for k in dict.fromkeys(k for t in others for k in t) if len({t.get(k) for t in others}) > 1]
        if "prox" in {key.split(".")[0] for key in keys} and not any(key.startswith("prox") for key in own):
            keys = ["prox", *(key for key in keys if not key.startswith("prox"))]
        texts.append(", ".join(f"{k} = {own[k]}" if k in own else f"no {k}" for k in keys if k in own or k == "prox"))
    return texts


def file_name(data: str) -> str:
    """The data of a run without its folder, if it is a path.

    >>> file_name("digits"), file_name("/data/houses.csv · price")
    ('digits', 'houses.csv · price')
    """
    path, *rest = data.split(" · ")
    return " · ".join([Path(path).name, *rest])


def flat(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """A nested table as dotted keys and texts.

    >>> list(flat({"problem": {"data": "digits", "sizes": [1, 2]}}))
    [('problem.data', 'digits'), ('problem.sizes', '1, 2')]
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def problem_of(run: RecordedRun, params: dict[str, Any]) -> tuple[str, str]:
    """The data set of an algorithm of a run, and the whole problem as text: values of two algorithms are comparable if
    both solve the same problem. A penalty (`prox`) is a part of it."""
    table = {k: v for k, v in run.table("problem").items() if k not in NOT_THE_PROBLEM}
    data = " · ".join(str(v) for v in (table.get("data"), table.get("target"), params.get("problem")) if v)
    whole = table | {key: params[key] for key in ("prox", "problem") if params.get(key)}
    if isinstance(penalty := whole.get("prox"), dict) and "kind" in penalty:
        whole["prox"] = f"{penalty['kind']}({', '.join(f'{k}={v}' for k, v in penalty.items() if k != 'kind')})"
    return data, json.dumps(whole, sort_keys=True, default=str)


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
        method = key if by_steps else str(params.get("name", label))
        marks.append(_Mark(index, label, method, key, group, *problem_of(run, params)))
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
