"""Curves: mean and standard deviation over seeds, one curve per algorithm and metric."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Row = dict[str, Any]
Timings = dict[str, dict[int, float]]

BYTES = ("bytes_up", "bytes_down", "bytes")
COUNTERS = frozenset(
    (
        "algorithm",
        "seed",
        "round",
        "steps",
        "gradients",
        "full_gradients",
        "dropped",
        "seconds",
        "train_samples",
        *BYTES,
    )
)


@dataclass(frozen=True)
class Curve:
    """One metric of one algorithm over seeds, with every x axis; NaN is a missing value.

    >>> zero = np.zeros(1)
    >>> Curve(zero, zero, zero, zero, mean=zero + 0.5, std=zero, seeds=zero + 3).mean
    array([0.5])
    """

    round: Array
    gradients: Array
    bytes: Array  # up and down together
    seconds: Array
    mean: Array
    std: Array  # sample standard deviation (n - 1); NaN for one seed
    seeds: Array  # the number of seeds in the mean


def number(value: object) -> float:
    """`value` as a finite float, or NaN: a diverged value is null in the file.

    >>> number(2), number(None)
    (2.0, nan)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # an integer too large for a float
        return math.nan


def aggregate(rows: list[Row], timings: Timings, metrics: list[str]) -> dict[str, dict[str, Curve]]:
    """Aggregate rows over seeds into `curves[label][metric]`.

    A point is NaN when any of its seeds diverged: a mean over the survivors would flatter the algorithm.

    >>> rows = [{"algorithm": "a", "seed": s, "round": 0, "loss": 1.0 + s} for s in (0, 1)]
    >>> aggregate(rows, {}, ["loss"])["a"]["loss"].mean
    array([1.5])
    """
    by_label: dict[str, list[Row]] = {}
    for row in rows:
        by_label.setdefault(row["algorithm"], []).append(row)
    return {
        label: {m: _curve(rows, m, timings.get(label, {})) for m in metrics if any(m in row for row in rows)}
        for label, rows in by_label.items()
    }


def _curve(rows: list[Row], metric: str, clock: dict[int, float]) -> Curve:
    by_round: dict[int, list[Row]] = {}
    for row in rows:
        if metric in row:
            by_round.setdefault(row["round"], []).append(row)
    rounds = sorted(by_round)

    def mean(*keys: str) -> Array:
        return np.array([np.mean([sum(number(row.get(k)) for k in keys) for row in by_round[r]]) for r in rounds])

    with np.errstate(over="ignore", invalid="ignore"):  # the square of a huge loss overflows: no band then
        values = [np.array([number(row[metric]) for row in by_round[r]]) for r in rounds]
        std = np.array([v.std(ddof=1) if len(v) > 1 else math.nan for v in values])
        means = mean(metric)
    return Curve(
        round=np.array(rounds, dtype=float),
        gradients=mean("gradients"),
        bytes=mean("bytes_up", "bytes_down"),
        seconds=_seconds(rounds, clock),
        mean=np.where(np.isfinite(means), means, math.nan),
        std=np.where(np.isfinite(std), std, math.nan),
        seeds=np.array([len(v) for v in values], dtype=float),
    )


def _seconds(rounds: list[int], clock: dict[int, float]) -> Array:
    if not clock:
        return np.full(len(rounds), math.nan)
    known = sorted({0: 0.0, **clock}.items())  # the clock starts with the run
    at, seconds = zip(*known, strict=True)
    return np.asarray(np.interp(rounds, at, seconds, right=math.nan))
