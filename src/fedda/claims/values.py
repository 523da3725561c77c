"""The values that verdicts compare: per method and metric, a mean over seeds and its standard error."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..runs.curves import Row, number
from ..runs.final_values import mean, tail

METRICS = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "density", "nonzero")
# Per seed: both halves of a gap come from the same model.
GAPS = {"loss_gap": ("test_loss", "train_loss"), "accuracy_gap": ("train_accuracy", "test_accuracy")}
EMPTY = 1e-3  # share of the weights: fewer count as none
ALIKE = 1e-6  # accuracies of predictors of one class differ by less


@dataclass(frozen=True)
class Value:
    """A mean over seeds. A difference of two has the standard error of independent values.

    >>> a = Value.over({0: 0.9, 1: 0.8, 2: 0.7}, {0: 0.5, 1: 0.5, 2: 0.5})
    >>> round(a.mean, 3), round(a.se, 3), a.seeds
    (0.8, 0.058, 3)
    >>> round((a - a).se / a.se, 3)
    1.414
    """

    mean: float
    se: float  # 0 for one seed, which gets no verdict
    area: float  # mean over all rounds: the area under the curve
    seeds: int
    last: Mapping[int, float] = field(default_factory=dict)  # by seed
    areas: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def over(cls, last: Mapping[int, float], areas: Mapping[int, float]) -> Value:
        values = list(last.values())
        se = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        return cls(statistics.fmean(values), se, statistics.fmean(areas.values()), len(values), last, areas)

    def __sub__(self, other: Value) -> Value:
        se = math.hypot(self.se, other.se)
        return Value(self.mean - other.mean, se, self.area - other.area, min(self.seeds, other.seeds))

    def __neg__(self) -> Value:
        return Value(-self.mean, self.se, -self.area, self.seeds)

    def plus(self, amount: float) -> Value:
        return Value(self.mean + amount, self.se, self.area + amount, self.seeds)


@dataclass(frozen=True)
class MethodValues:
    """One curve of a figure: its values by metric, or the reason why it has none."""

    label: str
    values: Mapping[str, Value] = field(default_factory=dict)
    seeds: int = 0
    lost: str = ""  # "diverged ...": the method loses every comparison
    broken: frozenset[int] = frozenset()  # the seeds that diverged
    params: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    rounds: int = 0
    figure: str = ""  # the figure of its run

    @property
    def unreduced(self) -> bool:
        """Whether alpha = min(1, c eta^2) is 1 in every step: then the estimate is a plain gradient.

        >>> params = {"lr": 1.0, "w": 100.0, "c": 2000.0, "steps": 5}
        >>> [MethodValues("stem", params=params, rounds=n).unreduced for n in (4000, 40_000)]
        [True, False]
        """
        lr, w, c = (number(self.params.get(word)) for word in ("lr", "w", "c"))
        last = w + max(0.0, self.rounds * number(self.params.get("steps", 1)) - 1)
        return last > 0 and c * (lr / last ** (1 / 3)) ** 2 >= 1  # false without c, which is then NaN

    @property
    def constant(self) -> bool:
        """Whether it ended as a constant predictor: with almost no weights, or in every seed with the accuracy of one
        class and at least the loss of predicting that class."""
        if "nonzero" in self.values and self.values["nonzero"].mean < EMPTY:
            return True
        both = [self.values[m] for m in ("train_accuracy", "test_accuracy") if m in self.values]
        if not both or self.seeds < 2:
            return False
        share = both[0].mean
        loss = self.values.get("train_loss")
        surprised = loss is not None and 0 < share < 1 and loss.mean > -math.log(share) - EMPTY
        empty = "density" in self.values and self.values["density"].mean < EMPTY
        apart = max((max(v.last.values()) - min(v.last.values()) for v in both if v.last), default=math.inf)
        return (surprised and apart < ALIKE) or (empty and apart < EMPTY)


def known(rows: Iterable[Row]) -> list[str]:
    """The metrics that have a number in some row; the others do not belong to the problem."""
    present = {m for row in rows for m in METRICS if math.isfinite(number(row.get(m)))}
    return [m for m in METRICS if m in present]


def by_seed(rows: Iterable[Row]) -> dict[int, list[Row]]:
    """The rows of each seed, in the order of the rounds."""
    seeds: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["round"]):
        seeds.setdefault(row["seed"], []).append(row)
    return seeds


def measure(
    label: str, rows: list[Row], rounds: int, params: Mapping[str, Any] | None = None, metrics: list[str] | None = None
) -> MethodValues:
    """The values of one label from its rows.

    A method has diverged if one seed is not finite at the end: a mean over the other seeds would be too good.

    >>> rows = [{"seed": s, "round": r, "train_loss": 1 / (r + s + 1)} for s in (0, 1) for r in range(101)]
    >>> value = measure("fedavg", rows, 100).values["train_loss"]
    >>> value.last[0] == sum(1 / (r + 1) for r in range(96, 101)) / 5
    True
    """
    seeds = by_seed(rows)
    own = [m for m in (known(rows) if metrics is None else metrics) if any(m in row for row in rows)]
    last = {m: {seed: mean(tail(mine, rounds), m) for seed, mine in seeds.items()} for m in own}
    areas = {m: {seed: mean([r for r in mine if r["round"]], m) for seed, mine in seeds.items()} for m in own}
    for gap, (high, low) in GAPS.items():
        if high in last and low in last:
            last[gap] = {seed: last[high][seed] - last[low][seed] for seed in seeds}
            areas[gap] = {seed: areas[high][seed] - areas[low][seed] for seed in seeds}
    broken = frozenset(seed for m in own for seed, value in last[m].items() if not math.isfinite(value))
    lost = f"diverged in {len(broken)} of {len(seeds)} seeds" if broken else ""
    values = {} if lost else {m: Value.over(last[m], areas[m]) for m in last}
    lost = "diverged" if len(broken) == len(seeds) and broken else lost
    return MethodValues(label, values, len(seeds), lost, broken, params or {}, tuple(rows), rounds)
