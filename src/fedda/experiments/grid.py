"""Which hyper-parameters a sweep tries: grids and ranges from text, the same number of points for every algorithm."""

from __future__ import annotations

import itertools
import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import checks
from ..registry import algorithms
from ..runs.toml import literal
from .config import Experiment, hyper
from .overrides import owner_of

Point = dict[str, Any]  # word -> value; "prox.gamma" is gamma in the table prox


@dataclass(frozen=True)
class Range:
    """Log-uniform from low to high: for a random search."""

    low: float
    high: float


@dataclass(frozen=True)
class GridAxis:
    """The values of one word of one algorithm."""

    label: str
    word: str
    values: list[Any] | Range


def points(experiment: Experiment, grids: list[str], budget: int | None, draw: int = 0) -> dict[str, list[Point]]:
    """The points of each algorithm that has an axis, equally many for all.

    A grid is "LABEL.WORD=VALUES" (LABEL may be * for all that have the word): values by comma, such as 0.1,0.2; with
    an x before a number it is a multiple of the experiment's own, such as x0.5,x1,x2; LOW..HIGH is a range to draw
    from. A grid of more than `budget` points is thinned at random.

    >>> from fedda.experiments import find
    >>> points(find("digits"), ["*.lr=x0.5,x1"], None)["fedavg"]
    [{'lr': 0.32}, {'lr': 0.64}]
    """
    complete = experiment.completed()
    found: dict[str, list[GridAxis]] = {}
    for text in grids:
        for axis in _axes(complete, text):
            own = found.setdefault(axis.label, [])
            if any(axis.word == other.word for other in own):
                raise ValueError(f"--grid: {axis.label}.{axis.word} is given twice")
            own.append(axis)
    if not found:
        raise ValueError('--grid must be given, such as --grid "fedavg.lr=0.01,0.1"')
    chosen = {label: _points(found[label], label, budget, draw) for label in complete.algorithms if label in found}
    sizes = {label: len(some) for label, some in chosen.items()}
    fewest, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    if sizes[fewest] != sizes[most] or (budget is not None and sizes[fewest] < budget):
        wanted = f"the budget is {budget}" if budget else f"{most} has {sizes[most]}"
        raise ValueError(
            f"--grid: {fewest} has {sizes[fewest]} points but {wanted}: every algorithm gets as many; "
            f"give it more values, or --budget {sizes[fewest]}"
        )
    return chosen


def placed(words: dict[str, Any], point: Point) -> dict[str, Any]:
    """The words of an algorithm with a point's values in them.

    >>> placed({"lr": 1.0, "prox": {"kind": "l1", "gamma": 0.1}}, {"prox.gamma": 0.2})
    {'lr': 1.0, 'prox': {'kind': 'l1', 'gamma': 0.2}}
    """
    full = dict(words)
    for word, value in point.items():
        first, _, rest = word.partition(".")
        full[first] = placed(full[first], {rest: value}) if rest else value
    return full


def _axes(experiment: Experiment, text: str) -> list[GridAxis]:
    name, equals, values = text.partition("=")
    label = owner_of(name, ("*", *experiment.algorithms))
    word = name[len(label) + 1 :] if label else ""
    if not equals or not values.strip() or label is None or not word:
        known = ", ".join(experiment.algorithms)
        raise ValueError(f"--grid must be LABEL.WORD=VALUES with LABEL * or one of {known}, got {text!r}")
    chosen = {own: _value(words, word) for own, words in experiment.algorithms.items() if label in ("*", own)}
    having = {own: value for own, value in chosen.items() if value is not MISSING}
    if not having:
        words = hyper(experiment.algorithms[label]) if label != "*" else algorithms_words(experiment)
        raise ValueError(f"--grid: {label} has no word {word!r}; {checks.nearest(word, words)}")
    return [GridAxis(own, word, _values(own, word, values, base)) for own, base in having.items()]


MISSING = object()


def algorithms_words(experiment: Experiment) -> set[str]:
    return {word for words in experiment.algorithms.values() for word in hyper(words)}


def _value(words: dict[str, Any], word: str) -> Any:
    """What the experiment has in the place of a word: None where it is a default that is worked out later."""
    first, _, rest = word.partition(".")
    own = hyper(words)
    if rest:
        return _value(own[first], rest) if isinstance(own.get(first), dict) else MISSING
    known = algorithms.find(words["name"]).defaults if "name" in words else own
    return own.get(word) if word in {*own, *known} else MISSING


def _values(label: str, word: str, text: str, base: Any) -> list[Any] | Range:
    owner = f"--grid: {label}.{word}"

    def number(part: str) -> int | float:
        times = part.startswith("x")
        try:
            value = float(part.removeprefix("x"))
        except ValueError:
            raise ValueError(f"{owner} must be numbers, got {part!r}") from None
        if times and (isinstance(base, bool) or not isinstance(base, int | float)):
            raise ValueError(f"{owner}: {part!r} is a multiple, but the experiment gives no number: {base!r}")
        if not math.isfinite(value):
            raise ValueError(f"{owner} must be finite, got {part!r}")
        if times and isinstance(base, int):
            if not (value * base).is_integer():
                raise ValueError(f"{owner}: {part!r} of {base} is no whole number")
            return int(value * base)
        return value * base if times else value

    parts = [part.strip() for part in text.split(",") if part.strip()]
    if any(".." in part for part in parts):
        low, high = (number(end.strip()) for end in text.split("..", 1))
        if len(parts) > 1 or not 0 < low < high:
            raise ValueError(f"{owner}: a range must be LOW..HIGH with 0 < LOW < HIGH, got {text!r}")
        return Range(low, high)
    values = [number(part) if part.startswith("x") else _literal(part, word) for part in parts]
    if not values or len({repr(value) for value in values}) < len(values):
        raise ValueError(f"{owner} must be distinct values by comma, got {text!r}")
    return values


def _literal(part: str, word: str) -> Any:
    """A value as TOML has it; where a fraction may stand a whole number is one."""
    value = literal(part)
    fraction = word.rpartition(".")[2] in checks.BOUNDS and not isinstance(value, bool)
    return float(value) if fraction and isinstance(value, int) else value


def _points(axes: list[GridAxis], label: str, budget: int | None, draw: int) -> list[Point]:
    random = np.random.default_rng([draw, zlib.crc32(label.encode())])
    words = [axis.word for axis in axes]
    listed = {axis.word: axis.values for axis in axes if not isinstance(axis.values, Range)}
    grid = [dict(zip(listed, values, strict=True)) for values in itertools.product(*listed.values())]
    ranges = {axis.word: axis.values for axis in axes if isinstance(axis.values, Range)}
    if not ranges:
        if budget is not None and len(grid) > budget:
            grid = [grid[i] for i in sorted(random.choice(len(grid), budget, replace=False))]
        return grid
    if budget is None:
        raise ValueError(f"--grid: {label}.{next(iter(ranges))} is a range to draw from: say how often with --budget")
    drawn = []
    for _ in range(budget):
        point = grid[random.integers(len(grid))] | {
            word: float(np.exp(random.uniform(np.log(r.low), np.log(r.high)))) for word, r in ranges.items()
        }
        drawn.append({word: point[word] for word in words})
    return drawn
