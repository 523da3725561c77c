"""What the points of a sweep allow to draw: the levels of a hyper-parameter, whether they form a grid, heat maps."""

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from matplotlib.ticker import MaxNLocator

from ...runs.formats import plain
from ...runs.sweeps import Point, Swept, Value

MAPS = 6  # heat maps of pairs: all pairs of four hyper-parameters


@dataclass(frozen=True)
class SweepScale:
    """The axis of a hyper-parameter: its levels in order, and how they are placed."""

    name: str
    levels: list[Value]
    kind: Literal["log", "linear", "ordinal"]

    def position(self, value: Value) -> float:
        """Where a value stands on the axis: its logarithm, itself, or its index among the levels.

        >>> SweepScale("lr", [0.01, 0.1], "log").position(0.1)
        -1.0
        >>> SweepScale("mu0", ["nu0", "zero"], "ordinal").position("zero")
        1.0
        """
        if self.kind == "ordinal" or not isinstance(value, int | float):
            return float([key(level) for level in self.levels].index(key(value)))
        return math.log10(value) if self.kind == "log" else float(value)

    def ticks(self) -> list[tuple[float, str]]:
        """Ticks as (position, text): the levels if there are few."""
        if len(self.levels) <= 8 or self.kind == "ordinal":
            step = math.ceil(len(self.levels) / 8)
            return [(self.position(level), text(level)) for level in self.levels[::step]]
        low, high = self.position(self.levels[0]), self.position(self.levels[-1])
        if self.kind == "linear" or high - low < 2:
            inside = [float(v) for v in MaxNLocator(5).tick_values(low, high) if low <= v <= high]
            return [(v, plain(10**v, 2) if self.kind == "log" else plain(v)) for v in inside]
        powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
        return [(float(p), plain(10.0**p)) for p in powers][:: max(1, len(powers) // 5)]


@dataclass(frozen=True)
class Map:
    """A heat map: for each tried pair of values (down, across) the best point over the others, None if all failed."""

    across: SweepScale
    down: SweepScale
    best: dict[tuple[float | str, float | str], Point | None]
    rest: list[str]  # the hyper-parameters over which the best is taken


def text(value: Value) -> str:
    """A value as text.

    >>> text(0.010000001), text("zero"), text(True), text(100)
    ('0.01', 'zero', 'true', '100')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    return plain(value) if isinstance(value, float) else str(value)


def key(value: Value) -> float | str:
    """Equal for values of the same level: 1 and 1.0 are, 1 and true are not.

    >>> key(1) == key(1.0), key(1) == key(True)
    (True, False)
    """
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else text(value)


def scale(swept: Swept, name: str) -> SweepScale:
    """The axis of a hyper-parameter: logarithmic if its values span a decade or more."""
    values = [point.values[name] for point in swept.points]
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values) or not numbers:
        # 1 and True are equal keys of a dict, but different levels.
        others = {text(v): v for v in values if isinstance(v, bool) or not isinstance(v, int | float)}
        return SweepScale(name, [*sorted(set(numbers)), *others.values()], "ordinal")
    levels: list[Value] = [*sorted(set(numbers))]
    low, high = min(numbers), max(numbers)
    if low > 0:
        return SweepScale(name, levels, "log" if high >= 10 * low else "linear")
    # With zero and several decades, a linear axis would put all levels but one into a corner.
    positive = [v for v in numbers if v > 0]
    crowded = low == 0 and positive and max(positive) >= 10 * min(positive)
    return SweepScale(name, levels, "ordinal" if crowded else "linear")


def on_grid(swept: Swept) -> bool:
    """Whether the points are a product grid; one that was thinned to half by a budget counts."""
    cells = {tuple(key(point.values[name]) for name in swept.params) for point in swept.points}
    sizes = [len(scale(swept, name).levels) for name in swept.params]
    return bool(cells) and 2 * len(cells) >= math.prod(sizes)


def charted(swept: Swept) -> list[str]:
    """The hyper-parameters that are drawn against the metric: none if one heat map shows both."""
    return [] if len(swept.params) == 2 and maps(swept) else swept.params


def maps(swept: Swept) -> list[Map]:
    """A heat map per pair of hyper-parameters, best over the rest; none if the points are not on a grid."""
    if len(swept.params) < 2 or not on_grid(swept):
        return []
    varied = [name for name in swept.params if len(scale(swept, name).levels) > 1]
    pairs = list(combinations(varied, 2)) or [(swept.params[0], swept.params[1])]
    return [_map(swept, across, down) for across, down in pairs[:MAPS]]


def _map(swept: Swept, across: str, down: str) -> Map:
    best: dict[tuple[float | str, float | str], Point | None] = {}
    for point in swept.ranked:
        pair = key(point.values[down]), key(point.values[across])
        best[pair] = best.get(pair) or (point if point.ok else None)
    rest = [name for name in swept.params if name not in (across, down)]
    return Map(scale(swept, across), scale(swept, down), best, rest)


def edges(swept: Swept) -> list[str]:
    """The hyper-parameters whose best value is the smallest or the largest of a grid: a better one may lie outside."""
    if swept.best is None or not on_grid(swept):
        return []
    listed = []
    for name, value in swept.best.values.items():
        levels = [v for v in scale(swept, name).levels if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(levels) > 1 and value in (levels[0], levels[-1]) and not isinstance(value, str | bool):
            listed.append(f"{name} = {text(value)} (the {'smallest' if value == levels[0] else 'largest'})")
    return listed
