"""Where the y axis of a panel begins and ends: computed here once, for the page and for the figures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..runs.curves import Array, Curve
from ..runs.metrics import ShownMetric

START = 0.1  # this share of a curve's points, its beginning, does not set the axis
COLLAPSED = 5.0  # a curve that ends so many median deviations worse than the median does not set the axis either
LEAST = {True: 0.06, False: 0.28}  # the least such deviation: of a share, and of the logarithm of a loss
MOST = 1e30  # a logarithmic axis spans no larger factor: its ticks are counted
LOWEST = 1e-15  # smaller numbers are zero: the chart library has no ticks between them
DECADES = 20.0  # a loss whose axis spans a larger factor is logarithmic


@dataclass(frozen=True)
class Limits:
    """The ends of a linear axis, those of a logarithmic one if the values allow it, and which of the two is shown."""

    linear: tuple[float, float]
    log: tuple[float, float] | None
    prefer_log: bool
    outside: tuple[int, ...] = ()  # the curves that end outside, by their index

    @property
    def shown(self) -> tuple[float, float]:
        return self.log if self.prefer_log and self.log else self.linear


def limits(curves: Sequence[Curve], shown: ShownMetric) -> Limits:
    """The limits of a panel with these curves.

    All curves begin at the same value, and it is far from where they end: the first tenth of each does not count. A
    curve that collapsed or diverged, if there are three or more, leaves the panel and does not flatten the others.
    """
    late = [_after(curve.mean) for curve in curves]
    ends = np.array([mean[np.isfinite(mean)][-1] if np.isfinite(mean).any() else math.nan for mean in late])
    if not np.isfinite(ends).any():
        return Limits((0.0, 1.0), None, False)
    bad = _collapsed(ends, shown)
    kept = [i for i in range(len(curves)) if not bad[i] and math.isfinite(ends[i])]
    values = np.concatenate([late[i][np.isfinite(late[i])] for i in kept])
    low, high = float(values.min()), float(values.max())
    if shown.better == "lower" and high > 10 * max(abs(float(ends[kept].max())), 1e-300):
        # One that diverges within the panel: ten times the worst end is enough to see it leave.
        start = max((float(c.mean[np.isfinite(c.mean)][0]) for i, c in enumerate(curves) if i in kept), default=high)
        high = min(high, max(start, 10 * float(ends[kept].max())))
    log = None
    if low > 0 and high > 10 * LOWEST and not (shown.percent and shown.better == "higher"):
        lowest = max(low, high / MOST, LOWEST)
        margin = (high / lowest) ** 0.04 if high > lowest else 1.1
        log = lowest / margin, high * margin
    room = high - low
    for i in kept:  # the bands, but a band that is wider than all curves together may leave the panel
        std = np.nan_to_num(_after(curves[i].std, curves[i].mean))
        low = min(low, max(float(np.nanmin(late[i] - std)), float(values.min()) - room / 2))
        high = max(high, min(float(np.nanmax(late[i] + std)), float(values.max()) + room / 2, high + room / 2))
    if not shown.percent and shown.better == "lower" and values.min() >= 0:
        low = max(low, 0.0)
    margin = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
    margin = max(margin, 100 * LOWEST)
    linear = low - margin, high + margin
    if shown.percent:
        linear = max(linear[0], -0.02), min(linear[1], 1.0 + 0.02 * (high - low))
    below_or_above = [i for i, end in enumerate(ends) if math.isfinite(end) and not linear[0] <= end <= linear[1]]
    prefer = shown.better == "lower" and log is not None and log[1] > DECADES * log[0]
    return Limits(linear, log, prefer, tuple(below_or_above))


def band(mean: Array, std: Array, log: bool) -> tuple[Array, Array]:
    """Bottom and top of a band of one standard deviation; on a logarithmic axis the mean times and over the same
    factor, which has the same top and never falls to zero.

    >>> [float(v[0]) for v in band(np.array([1.0]), np.array([1.0]), log=True)]
    [0.5, 2.0]
    """
    if not log:
        return mean - std, mean + std
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factor = 1 + std / mean
        return np.where(mean > 0, mean / factor, math.nan), np.where(mean > 0, mean * factor, math.nan)


def _after(values: Array, whole: Array | None = None) -> Array:
    """The values without the beginning of the curve; all of them if nothing finite would be left."""
    first = math.ceil(START * values.size) if values.size > 3 else 0
    return values[first:] if np.isfinite((values if whole is None else whole)[first:]).any() else values


def _collapsed(ends: Array, shown: ShownMetric) -> Array:
    """Which curves end so much worse than the others that they must not set the axis."""
    none = np.zeros(len(ends), dtype=bool)
    if not shown.better or np.isfinite(ends).sum() < 3:
        return none
    size = ends if shown.percent else np.where(ends > 0, np.log(np.where(ends > 0, ends, 1.0)), math.nan)
    worse = size if shown.better == "lower" else -size
    middle = np.nanmedian(worse) if np.isfinite(worse).any() else 0.0
    deviation = max(float(np.nanmedian(abs(worse - middle))) if np.isfinite(worse).any() else 0.0, LEAST[shown.percent])
    return np.asarray(np.isfinite(worse) & (worse > middle + COLLAPSED * deviation))
