"""What the points of a sweep allow to be drawn: the levels of a word, whether they form a grid, where the best lies."""

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from fedda.runs.formats import plain
from fedda.runs.sweeps import Point, Swept, Value

MAPS = 6  # heat maps of pairs: all of four words


@dataclass(frozen=True)
class SweepScale:
    """The axis of a word: its levels in order, and a place for each, on a scale of its own kind."""

    word: str
    levels: list[Value]
    kind: Literal["log", "linear", "ordinal"]

    def place(self, value: Value) -> float:
        """Give where a value stands: its logarithm, itself, or its number among the levels.

        >>> SweepScale("lr", [0.01, 0.1], "log").place(0.1), SweepScale("mu0", ["nu0", "zero"], "ordinal").place("zero")
        (-1.0, 1.0)
        """
        if self.kind == "ordinal" or not isinstance(value, int | float):
            return float([key(level) for level in self.levels].index(key(value)))
        return math.log10(value) if self.kind == "log" else float(value)


@dataclass(frozen=True)
class Cell:
    """A cell of a heat map: the best point over the other words, None where nothing was tried or all diverged."""

    point: Point | None
    tried: bool


@dataclass(frozen=True)
class Map:
    """A heat map: `cells[i][j]` belongs to the i-th level of `down` and the j-th of `across`."""

    across: SweepScale
    down: SweepScale
    cells: list[list[Cell]]
    rest: list[str]  # the words over which the best is taken


def text(value: Value) -> str:
    """Write a value of a word.

    >>> text(0.010000001), text("zero"), text(True), text(100)
    ('0.01', 'zero', 'true', '100')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    return plain(value) if isinstance(value, float) else str(value)


def key(value: Value) -> float | str:
    """Give what makes two values the same level: 1 and 1.0 are, 1 and true are not.

    >>> key(1) == key(1.0), key(1) == key(True)
    (True, False)
    """
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else text(value)


def scale(swept: Swept, word: str) -> SweepScale:
    """Give the axis of a word: logarithmic where its values span a decade or more.

    >>> points = [Point({"lr": v}, 0.5, math.nan, 1, "", False, math.nan) for v in (0.1, 0.01, 0.001)]
    >>> scale(Swept("a", ["lr"], points, "higher"), "lr").levels
    [0.001, 0.01, 0.1]
    """
    values = [point.values[word] for point in swept.points]
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values) or not numbers:
        # 1 and true are the same key, but not the same level.
        others = {text(v): v for v in values if isinstance(v, bool) or not isinstance(v, int | float)}
        return SweepScale(word, [*sorted(set(numbers)), *others.values()], "ordinal")
    levels: list[Value] = [*sorted(set(numbers))]
    low, high = min(numbers), max(numbers)
    if low > 0:
        return SweepScale(word, levels, "log" if high >= 10 * low else "linear")
    # With a zero among decades, a linear axis would put all but one level into a corner.
    positive = [v for v in numbers if v > 0]
    crowded = low == 0 and positive and max(positive) >= 10 * min(positive)
    return SweepScale(word, levels, "ordinal" if crowded else "linear")


def on_grid(swept: Swept) -> bool:
    """Tell whether the points are a product grid; one that a budget cut short still counts.

    >>> points = [Point({"a": i, "b": j}, 0.5, math.nan, 1, "", False, math.nan) for i in (1, 2) for j in (3, 4)]
    >>> on_grid(Swept("x", ["a", "b"], points, "higher"))
    True
    """
    if not swept.points:
        return False
    cells = {tuple(key(point.values[word]) for word in swept.words) for point in swept.points}
    sizes = [len(scale(swept, word).levels) for word in swept.words]
    return 2 * len(cells) >= math.prod(sizes)


def maps(swept: Swept) -> list[Map]:
    """Give a heat map for each pair of words, best over the rest; none where the points are not on a grid.

    >>> points = [Point({"a": i, "b": j}, i * j, math.nan, 1, "", False, math.nan) for i in (1, 2) for j in (3, 4)]
    >>> [[cell.point.value for cell in row] for row in maps(Swept("x", ["a", "b"], points, "higher"))[0].cells]
    [[3, 6], [4, 8]]
    """
    words = [word for word in swept.words if len(scale(swept, word).levels) > 1]
    if len(swept.words) < 2 or not on_grid(swept):
        return []
    pairs = list(combinations(words, 2)) or [(swept.words[0], swept.words[1])]
    return [_map(swept, across, down) for across, down in pairs[:MAPS]]


def _map(swept: Swept, across: str, down: str) -> Map:
    x, y = scale(swept, across), scale(swept, down)
    best: dict[tuple[float | str, float | str], Point] = {}
    tried = set()
    for point in swept.ranked:
        place = key(point.values[down]), key(point.values[across])
        tried.add(place)
        if point.ok:
            best.setdefault(place, point)
    cells = [[Cell(best.get((key(i), key(j))), (key(i), key(j)) in tried) for j in x.levels] for i in y.levels]
    return Map(x, y, cells, [word for word in swept.words if word not in (across, down)])


def edges(swept: Swept) -> list[str]:
    """List the words whose best value is the smallest or the largest of a grid: the best may lie outside.

    >>> points = [Point({"lr": v}, v, math.nan, 1, "", v == 3.0, math.nan) for v in (1.0, 2.0, 3.0)]
    >>> edges(Swept("a", ["lr"], points, "higher"))
    ['lr = 3 (the largest)']
    """
    top = best(swept)
    if top is None or not on_grid(swept):
        return []
    found = []
    for word in swept.words:
        value = top.values[word]
        levels = [v for v in scale(swept, word).levels if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(levels) > 1 and value in (levels[0], levels[-1]) and not isinstance(value, str | bool):
            found.append(f"{word} = {text(value)} (the {'smallest' if value == levels[0] else 'largest'})")
    return found


def best(swept: Swept) -> Point | None:
    """Give the point that was chosen, else the best that did not diverge.

    >>> best(Swept("a", ["lr"], [], "higher")) is None
    True
    """
    return next((point for point in swept.ranked if point.ok), None)
