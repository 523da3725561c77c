"""The value of a point as a place on an axis, a shade and a text: the same on the page and in the figure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.ticker import MaxNLocator

from fedda.report.style import metric
from fedda.runs.formats import plain

_VIRIDIS = colormaps["viridis"]  # equally dark steps, also without colours and for any eye


@dataclass(frozen=True)
class Shades:
    """The range of the values that did not diverge; logarithmic where a loss spans more than two decades."""

    low: float
    high: float
    log: bool
    percent: bool
    better: Literal["higher", "lower"]

    def share(self, value: float) -> float:
        """Give where a value lies between the lowest (0) and the highest (1).

        >>> Shades(0.01, 1.0, True, False, "lower").share(0.1)
        0.5
        """
        if self.high <= self.low:
            return 0.5
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def colours(self, value: float) -> tuple[str, str]:
        """Give the shade of a value, brighter the better, and black or white for the text on it.

        >>> Shades(0.0, 1.0, False, True, "higher").colours(1.0)
        ('#fde725', '#000000')
        """
        share = self.share(value)
        red, green, blue, _ = _VIRIDIS(share if self.better == "higher" else 1 - share)
        return to_hex((red, green, blue)), "#000000" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.45 else "#ffffff"

    def text(self, value: float) -> str:
        """Write a value in few characters.

        >>> Shades(0.0, 1.0, False, True, "higher").text(0.9123)
        '91.2'
        """
        return f"{100 * value:.1f}" if self.percent else plain(value, 3)

    def ticks(self) -> list[tuple[float, str]]:
        """Give marks for an axis from low to high.

        >>> Shades(0.0, 1.0, False, True, "higher").ticks()[1]
        (0.25, '25 %')
        """
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [10.0**p for p in powers][:: max(1, len(powers) // 5)]
        else:
            found = [float(v) for v in MaxNLocator(4).tick_values(self.low, self.high)]
        inside = [v for v in found if self.low - 1e-9 * abs(self.low) <= v <= self.high + 1e-9 * abs(self.high)]
        return [(v, f"{plain(100 * v)} %" if self.percent else plain(v)) for v in inside]


def shades(values: Iterable[float], name: str, better: Literal["higher", "lower"]) -> Shades:
    """Measure the values of a metric, with a little room around them if asked for an axis.

    >>> shades([0.5, math.nan, 0.9], "validation_accuracy", "higher").high
    0.9
    """
    found = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(found), max(found)
    log = better == "lower" and low > 0 and high > 100 * low
    return Shades(low, high, log, metric(name).percent, better)


def widened(own: Shades) -> Shades:
    """Give the same with room at both ends, for points that should not touch the frame.

    >>> widened(Shades(1.0, 2.0, False, False, "lower")).low
    0.9
    """
    if own.log:
        margin = (own.high / own.low) ** 0.1
        return Shades(own.low / margin, own.high * margin, True, own.percent, own.better)
    margin = 0.1 * (own.high - own.low) or 0.1 * abs(own.high) or 1.0
    return Shades(own.low - margin, own.high + margin, False, own.percent, own.better)
