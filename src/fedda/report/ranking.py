"""Which method leads on a problem, and whether chance can explain it: paired differences over seeds, Student's t."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..runs import formats
from ..runs.curves import Row, number
from ..runs.metrics import ShownMetric
from ..runs.reading import RecordedRun
from ..runs.student import quantile
from .picture import Picture, Series

LEVEL = 0.05
HEADLINE = ("test_accuracy", "validation_accuracy", "test_loss", "validation_loss", "train_accuracy", "train_loss")
BySeed = Mapping[int, float]  # the final value of each seed


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, its 95 % half-width (None for one seed) and the number of pairs."""

    mean: float
    half: float | None
    seeds: int

    @property
    def clear(self) -> bool:
        """Whether 0 lies outside the interval: the two can be told apart."""
        return self.half is not None and abs(self.mean) > self.half


def difference(a: BySeed, b: BySeed) -> Difference:
    """The difference a - b over the seeds that both have.

    >>> difference({0: 0.9, 1: 0.8, 2: 0.85}, {0: 0.8, 1: 0.7, 2: 0.75}).clear
    True
    >>> difference({0: 0.9, 1: 0.7}, {0: 0.8, 1: 0.7}).clear
    False
    """
    pairs = [a[seed] - b[seed] for seed in a if seed in b]
    if len(pairs) < 2:
        return Difference(pairs[0] if pairs else math.nan, None, len(pairs))
    error = statistics.stdev(pairs) / math.sqrt(len(pairs))
    return Difference(statistics.fmean(pairs), quantile(LEVEL, len(pairs) - 1) * error, len(pairs))


def final_by_seed(rows: Sequence[Row], metric: str, at: int | None = None) -> dict[int, float]:
    """The value of each seed in the last round, or in round `at`; empty if a seed diverged."""
    last = max((row["round"] for row in rows if metric in row), default=None) if at is None else at
    values = {row["seed"]: number(row[metric]) for row in rows if row["round"] == last and metric in row}
    # Beyond 1e150 sums of squares overflow: such a value has diverged.
    return {} if any(not abs(v) < 1e150 for v in values.values()) else values


def marks(values: Sequence[BySeed], metric: ShownMetric) -> list[str]:
    """ "best" for the one method that is clearly ahead of all others; otherwise "tie" for the leader and for all that
    cannot be told apart from it. Nothing is marked with one seed, one method, or a metric without a direction."""
    order = ranked(values, metric)
    marked = [""] * len(values)
    if len(order) < 2 or min(len(values[i]) for i in order[:2]) < 2:
        return marked
    first, *rest = order
    close = [i for i in rest if not difference(values[first], values[i]).clear]
    for i in close:
        marked[i] = "tie"
    marked[first] = "tie" if close else "best"
    return marked


def ranked(values: Sequence[BySeed], metric: ShownMetric) -> list[int]:
    """The indices of the methods that have a value, the best mean first."""
    if not metric.better:
        return []
    sign = 1 if metric.better == "lower" else -1
    return sorted((i for i, v in enumerate(values) if v), key=lambda i: sign * statistics.fmean(values[i].values()))


def sentences(shown: Picture, runs: Sequence[RecordedRun]) -> list[tuple[str, str]]:
    """For each row of panels and problem: its title, and one sentence on who leads."""
    metric = next((m for m in (*HEADLINE, *shown.metrics) if m in shown.metrics and shown.metric(m).better), None)
    if metric is None:
        return []
    titled = []
    for title, group in problem_groups(shown):
        series = [s for s in group if metric in s.curves]
        if series:
            titled.append((title, sentence(series, [runs[s.run].rows_of(s.own) for s in series], shown.metric(metric))))
    return titled


def problem_groups(shown: Picture) -> list[tuple[str, list[Series]]]:
    """The series that may be compared with each other: those of one row of panels and one problem."""
    groups = []
    for row, title in enumerate(shown.rows):
        own = [s for s in shown.series if s.row == row]
        for problem in dict.fromkeys(s.problem for s in own):
            name = " · ".join(filter(None, (title, shown.problems[problem])))
            groups.append((name, [s for s in own if s.problem == problem]))
    return groups


def sentence(series: Sequence[Series], rows: Sequence[Sequence[Row]], metric: ShownMetric) -> str:
    """Who leads, by how much, and whether it can be told apart from chance."""
    ends = [max(row["round"] for row in own if metric.key in row) for own in rows]
    at = min(ends)
    values = [final_by_seed(own, metric.key, at) for own in rows]
    order, name = ranked(values, metric), metric.name[0].lower() + metric.name[1:]
    when = f"at round {at:,}" + (", the last that all methods reached" if len(set(ends)) > 1 else "")
    if not order:
        return f"No method has a finite {name} {when}."
    first = order[0]
    label, reached = series[first].name, _value(values[first], metric)
    diverged = len(series) - len(order)
    lost = f" {diverged} of {len(series)} methods diverged." if diverged else ""
    if len(order) == 1:
        return f"{label} reaches a {name} of {reached} {when}.{lost}"
    beaten = [difference(values[first], values[i]) for i in order[1:]]
    close = [series[i].name for i, d in zip(order[1:], beaten, strict=True) if not d.clear]
    behind = [series[i].name for i, d in zip(order[1:], beaten, strict=True) if d.clear]
    second, gap = series[order[1]].name, beaten[0]
    superlative = "lowest" if metric.better == "lower" else "highest"
    if gap.half is None:
        return (
            f"{label} has the {superlative} {name} {when}, {reached}, {_amount(gap.mean, metric)} ahead of {second}; "
            f"with one seed this may be chance.{lost}"
        )
    interval = f"95 % interval {_amount(gap.mean, metric, gap.half)} over {gap.seeds} seeds"
    if not close:
        others = "" if len(beaten) == 1 else ", and of all others,"
        return (
            f"{label} leads {when} with a {name} of {reached}, {_amount(gap.mean, metric)} ahead of {second}{others} "
            f"by more than chance explains ({interval}).{lost}"
        )
    than = f"; it is clearly better than {_join(behind)}" if behind else ""
    return (
        f"{label} has the {superlative} {name} {when}, {reached}, but it cannot be told apart from {_join(close)} "
        f"(difference to {second}: {interval}){than}.{lost}"
    )


def _value(values: BySeed, metric: ShownMetric) -> str:
    std = statistics.stdev(values.values()) if len(values) > 1 else None
    return formats.spread(statistics.fmean(values.values()), std, metric.percent)


def _amount(mean: float, metric: ShownMetric, half: float | None = None) -> str:
    """A difference as its size, in points for a share."""
    scale, unit = (100, " points") if metric.percent else (1, "")
    write = (lambda v: f"{v:.1f}") if metric.percent else (lambda v: formats.plain(v, 3))
    low = scale * abs(mean)
    return f"{write(low)}{unit}" if half is None else f"{write(low)} ± {write(scale * half)}{unit}"


def _join(names: Sequence[str]) -> str:
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} others"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
