"""The values that verdicts compare: per method and metric, one number per seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..runs.curves import Row, number
from ..runs.final_values import mean, tail
from ..runs.metrics import is_better, validation_metric
from ..runs.metrics import metric as metric_of
from ..runs.student import quantile, two_sided_p

METRICS = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "density", "nonzero")
# Per seed: both halves of a gap come from the same model.
GAPS = {"loss_gap": ("test_loss", "train_loss"), "accuracy_gap": ("train_accuracy", "test_accuracy")}
ROUNDS, BYTES = "rounds_to_target", "bytes_to_target"
COSTS = (ROUNDS, BYTES)
EMPTY = 1e-3  # share of the weights: fewer count as none
ALIKE = 1e-6  # accuracies of predictors of one class differ by less
EQUAL = 1e-12  # smaller differences are rounding
LEVEL = 0.05  # of a test; an interval covers 1 - LEVEL


@dataclass(frozen=True)
class Value:
    """One number per seed. A difference of two is taken seed by seed.

    >>> a = Value({0: 0.9, 1: 0.8, 2: 0.7})
    >>> round(a.mean, 3), round(a.se, 3), round(a.interval, 3)
    (0.8, 0.058, 0.248)
    >>> (a - a).se
    0.0
    """

    by_seed: Mapping[int, float]
    open: frozenset[int] = frozenset()  # seeds that did not reach the target: the number is only a lower bound

    @property
    def seeds(self) -> int:
        return len(self.by_seed)

    @cached_property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed.values())

    @cached_property
    def se(self) -> float:
        """The standard error of the mean; 0 for one seed."""
        return statistics.stdev(self.by_seed.values()) / math.sqrt(self.seeds) if self.seeds > 1 else 0.0

    @property
    def interval(self) -> float:
        """Half the width of the t interval for the mean."""
        return self.se * quantile(LEVEL, self.seeds - 1) if self.seeds > 1 else math.inf

    @property
    def p(self) -> float:
        """The two-sided p-value of the mean being 0, by the t test."""
        if abs(self.mean) <= EQUAL or self.seeds < 2:
            return 1.0
        return two_sided_p(self.mean / self.se, self.seeds - 1) if self.se > EQUAL else 0.0

    def __sub__(self, other: Value) -> Value:
        both = {s: v - other.by_seed[s] for s, v in self.by_seed.items() if s in other.by_seed}
        return Value(both, self.open | other.open)

    def __neg__(self) -> Value:
        return Value({s: -v for s, v in self.by_seed.items()}, self.open)

    def plus(self, amount: float) -> Value:
        return Value({s: v + amount for s, v in self.by_seed.items()}, self.open)

    def saved(self, other: Value) -> Value:
        """How many times less this cost is than the other, as a natural logarithm.

        A seed that did not reach the target has cost at least what the whole run cost. If neither did, they are equal.

        >>> slow, fast = Value({0: 400, 1: 400}, frozenset({1})), Value({0: 200, 1: 100})
        >>> {seed: round(math.exp(v), 6) for seed, v in fast.saved(slow).by_seed.items()}
        {0: 2.0, 1: 4.0}
        """
        logs = {}
        for s in self.by_seed.keys() & other.by_seed.keys():
            d = math.log(max(1.0, other.by_seed[s])) - math.log(max(1.0, self.by_seed[s]))
            d = min(d, 0.0) if s in self.open else d
            logs[s] = max(d, 0.0) if s in other.open else d
        return Value(dict(sorted(logs.items())), self.open | other.open)


@dataclass(frozen=True)
class MethodValues:
    """One curve of a figure: its values by metric, or the reason why it has none."""

    label: str
    values: Mapping[str, Value] = field(default_factory=dict)  # at the end; and what it took to reach the target
    seeds: int = 0
    lost: str = ""  # "diverged ..."
    broken: frozenset[int] = frozenset()  # the seeds that diverged
    params: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    rounds: int = 0
    figure: str = ""  # the figure of its run
    best: Mapping[str, Value] = field(default_factory=dict)  # at the checkpoint that is best on validation data
    target: float | None = None  # the test accuracy to reach
    full: bool = False  # whether all clients take part in every round
    short: bool = False  # whether the run has fewer rounds than the experiment of its name

    @property
    def every(self) -> int:
        """The number of rounds between the first two evaluations."""
        first = sorted({row["round"] for row in self.rows})[:2]
        return int(first[-1] - first[0]) if first else 0

    @property
    def untrained(self) -> str:
        """Why the method did not train, if so."""
        return self.lost or ("constant predictor" if self.constant else "")

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
        apart = max(max(v.by_seed.values()) - min(v.by_seed.values()) for v in both)
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
    label: str,
    rows: list[Row],
    rounds: int,
    params: Mapping[str, Any] | None = None,
    metrics: list[str] | None = None,
    target: float | None = None,
) -> MethodValues:
    """The values of one label from its rows.

    A method has diverged if one seed is not finite at the end: a mean over the other seeds would be too good.

    >>> rows = [{"seed": s, "round": r, "train_loss": 1 / (r + s + 1)} for s in (0, 1) for r in range(101)]
    >>> value = measure("fedavg", rows, 100).values["train_loss"]
    >>> value.by_seed[0] == sum(1 / (r + 1) for r in range(96, 101)) / 5
    True
    """
    seeds = by_seed(rows)
    own = [m for m in (known(rows) if metrics is None else metrics) if any(m in row for row in rows)]
    end = over_seeds({seed: tail(mine, rounds) for seed, mine in seeds.items()}, own)
    broken = frozenset(seed for m in own for seed, value in end[m].by_seed.items() if not math.isfinite(value))
    if broken:
        lost = "diverged" if len(broken) == len(seeds) else f"diverged in {len(broken)} of {len(seeds)} seeds"
        return MethodValues(label, {}, len(seeds), lost, broken, params or {}, tuple(rows), rounds, target=target)
    chosen = {seed: row for seed, mine in seeds.items() if (row := checkpoint(mine)) is not None}
    best = over_seeds({seed: [row] for seed, row in chosen.items()}, own) if chosen.keys() == seeds.keys() else {}
    costs = {} if target is None or "test_accuracy" not in own else reached(seeds, target)
    return MethodValues(
        label, end | costs, len(seeds), params=params or {}, rows=tuple(rows), rounds=rounds, best=best, target=target
    )


def over_seeds(rows: Mapping[int, list[Row]], metrics: Iterable[str]) -> dict[str, Value]:
    """The mean of each metric, and of each gap, over the rows of each seed."""
    values = {m: Value({seed: mean(mine, m) for seed, mine in rows.items()}) for m in metrics}
    return values | {gap: values[a] - values[b] for gap, (a, b) in GAPS.items() if a in values and b in values}


def checkpoint(rows: list[Row]) -> Row | None:
    """The row of one seed that is best on validation data; the earliest of several; None without such data."""
    metric = validation_metric({key for row in rows for key in row})
    if metric is None:
        return None
    best, value = None, math.nan
    for row in rows:
        if is_better(number(row.get(metric)), value, metric_of(metric).better):
            best, value = row, number(row[metric])
    return best


def reached(seeds: Mapping[int, list[Row]], target: float) -> dict[str, Value]:
    """The rounds, and the bytes up and down, until the test accuracy is at the target."""
    first = {
        seed: next((row for row in rows if number(row.get("test_accuracy")) >= target), None)
        for seed, rows in seeds.items()
    }
    missed = frozenset(seed for seed, row in first.items() if row is None)
    at = {seed: row or seeds[seed][-1] for seed, row in first.items()}
    sent = {seed: number(row.get("bytes_up")) + number(row.get("bytes_down")) for seed, row in at.items()}
    costs = {ROUNDS: Value({seed: float(row["round"]) for seed, row in at.items()}, missed)}
    return costs | ({BYTES: Value(sent, missed)} if all(map(math.isfinite, sent.values())) else {})
