"""The points of a sweep: grids and ranges from text, the same number of points for every algorithm."""

import itertools
import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import checks
from ..registry import RATES, algorithms
from ..runs.toml import literal
from .config import Experiment, hyper_params
from .overrides import owner_of

Point = dict[str, Any]  # name -> value; "prox.gamma" is gamma in the table prox


@dataclass(frozen=True)
class Range:
    """A log-uniform distribution from low to high, for a random search."""

    low: float
    high: float


Axes = dict[str, list[Any] | Range]  # values by hyper-parameter


def points(experiment: Experiment, grids: list[str], budget: int | None, draw: int = 0) -> dict[str, list[Point]]:
    """The points of each algorithm that has an axis; every algorithm has the same number.

    A grid is "LABEL.NAME=VALUES"; LABEL * stands for all algorithms with this hyper-parameter. VALUES are separated by
    commas: 0.1,0.2 are values, x0.5,x1,x2 multiples of the experiment's value (of a schedule's start),
    LOW..HIGH is a range to draw from.
    A grid of more than `budget` points is thinned at random.
    """
    complete = experiment.completed()
    axes: dict[str, Axes] = {}
    for text in grids:
        for label, (name, values) in _parse(complete, text).items():
            if any(nested(name, other) for other in axes.setdefault(label, {})):
                raise ValueError(f"--grid: {label}.{name} is given twice")
            axes[label][name] = values
    if not axes:
        raise ValueError('--grid must be given, such as --grid "fedavg.lr=0.01,0.1"')
    chosen = {label: _points(axes[label], label, budget, draw) for label in complete.algorithms if label in axes}
    sizes = {label: len(some) for label, some in chosen.items()}
    fewest, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    if sizes[fewest] != sizes[most] or (budget is not None and sizes[fewest] < budget):
        wanted = f"the budget is {budget}" if budget else f"{most} has {sizes[most]}"
        raise ValueError(
            f"--grid: {fewest} has {sizes[fewest]} points but {wanted}: every algorithm needs the same number; "
            f"give it more values, or --budget {sizes[fewest]}"
        )
    return chosen


def apply_point(params: dict[str, Any], point: Point) -> dict[str, Any]:
    """The hyper-parameters of an algorithm with the values of a point."""
    full = dict(params)
    for name, value in point.items():
        first, _, rest = name.partition(".")
        full[first] = apply_point(full[first], {rest: value}) if rest else value
    return full


def _parse(experiment: Experiment, text: str) -> dict[str, tuple[str, list[Any] | Range]]:
    """For each label, the hyper-parameter of a grid and its values. Multiples of a schedule are those of its start."""
    path, equals, values = text.partition("=")
    label = owner_of(path, ("*", *experiment.algorithms))
    name = path[len(label) + 1 :] if label else ""
    if label is None and path.startswith("problem."):
        first = f"--set {path}={values.split(',')[0].strip()}"
        raise ValueError(
            f"--grid: {path} belongs to the problem, and all points of a sweep share one: run a sweep for each value, "
            f"such as {first}, each with its own --out"
        )
    if not equals or not values.strip() or label is None or not name:
        known = ", ".join(experiment.algorithms)
        raise ValueError(f"--grid must be LABEL.NAME=VALUES with LABEL * or one of {known}, got {text!r}")
    tables = {own: params for own, params in experiment.algorithms.items() if label in ("*", own)}
    bases = {own: value for own, params in tables.items() if (value := _value(params, name)) is not MISSING}
    if not bases:
        names = {other for params in tables.values() for other in hyper_params(params)}
        raise ValueError(f"--grid: {label} has no hyper-parameter {name!r}; {checks.nearest(name, names)}")
    found = {}
    for own, base in bases.items():
        multiples = [part.strip().startswith("x") for part in values.split(",") if part.strip()]
        axis = name
        if isinstance(base, dict) and "start" in base and any(multiples):
            if not all(multiples):
                raise ValueError(f"--grid: {own}.{name} is a schedule: give multiples of its start or values, not both")
            axis, base = f"{name}.start", base["start"]
        found[own] = axis, _values(own, axis, values, base)
    return found


def nested(name: str, other: str) -> bool:
    """Whether one of two names is a part of the other: "lr" and "lr.start"."""
    return f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.")


MISSING = object()


def _value(params: dict[str, Any], name: str) -> Any:
    """The experiment's value of a hyper-parameter; None for a default that is computed later."""
    first, _, rest = name.partition(".")
    given = hyper_params(params)
    if rest:
        return _value(given[first], rest) if isinstance(given.get(first), dict) else MISSING
    if name in given or "name" not in params:
        return given.get(name, MISSING)
    entry = algorithms.find(params["name"])
    return (entry.common | entry.defaults).get(name, MISSING)


def _values(label: str, name: str, text: str, base: Any) -> list[Any] | Range:
    owner = f"--grid: {label}.{name}"

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
                raise ValueError(f"{owner}: {part!r} of {base} is not a whole number")
            return int(value * base)
        return value * base if times else value

    parts = [part.strip() for part in text.split(",") if part.strip()]
    if any(".." in part for part in parts):
        low, high = (number(end.strip()) for end in text.split("..", 1))
        if len(parts) > 1 or not 0 < low < high:
            raise ValueError(f"{owner}: a range must be LOW..HIGH with 0 < LOW < HIGH, got {text!r}")
        return Range(low, high)
    values = [number(part) if part.startswith("x") else _literal(part, name) for part in parts]
    if not values or len({repr(value) for value in values}) < len(values):
        raise ValueError(f"{owner} must be distinct values, separated by commas, got {text!r}")
    return values


def _literal(part: str, name: str) -> Any:
    """A TOML value; a whole number becomes a float if the hyper-parameter takes fractions."""
    value = literal(part)
    first, _, last = name.rpartition(".")
    fraction = (last in checks.BOUNDS or first in RATES) and not isinstance(value, bool)
    return float(value) if fraction and isinstance(value, int) else value


def _points(axes: Axes, label: str, budget: int | None, draw: int) -> list[Point]:
    random = np.random.default_rng([draw, zlib.crc32(label.encode())])
    listed = {name: values for name, values in axes.items() if not isinstance(values, Range)}
    grid = [dict(zip(listed, values, strict=True)) for values in itertools.product(*listed.values())]
    ranges = {name: values for name, values in axes.items() if isinstance(values, Range)}
    if not ranges:
        if budget is not None and len(grid) > budget:
            grid = [grid[i] for i in sorted(random.choice(len(grid), budget, replace=False))]
        return grid
    if budget is None:
        name = next(iter(ranges))
        raise ValueError(f"--grid: {label}.{name} is a range to draw from: give the number of points with --budget")
    drawn = []
    for _ in range(budget):
        point = grid[random.integers(len(grid))] | {
            name: float(np.exp(random.uniform(np.log(r.low), np.log(r.high)))) for name, r in ranges.items()
        }
        drawn.append({name: point[name] for name in axes})
    return drawn
