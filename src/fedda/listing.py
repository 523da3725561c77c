"""The tables of `fedda list` and of the documentation: registered names, hyper-parameters, and measured costs."""

from inspect import Parameter
from typing import NamedTuple

import torch

from . import checks, meanings, presets, registry
from .aggregation import aggregations
from .experiments import builtin, find
from .problems import Quadratic, options_of
from .run import Run
from .runs.toml import inline
from .training import for_rounds

REGISTRIES = {
    "algorithms": registry.algorithms,
    "data": registry.datasets,
    "partitions": registry.partitions,
    "models": registry.models,
    "augmentations": registry.augmentations,
    "metrics": registry.metrics,
    "prox": registry.proxes,
    "engines": registry.engines,
    "aggregation": aggregations,
}
KINDS = ("experiments", "algorithms", "params", "presets", *list(REGISTRIES)[1:])
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def rows(kind: str) -> Table:
    """The column heads and the rows of one table.

    >>> sorted(row[0] for row in rows("engines")[1])
    ['distributed', 'sequential', 'vectorised']
    """
    entries = [entry for entry in registry.algorithms if not entry.alias_of]
    if kind == "experiments":
        experiments = {name: find(name) for name in builtin()}
        return ("experiment", "title", "algorithms"), [
            (name, e.title, ", ".join(e.algorithms)) for name, e in experiments.items()
        ]
    if kind == "presets":
        return ("preset", "algorithm", "hyper-parameters"), [
            (which, name, _text(values)) for which, table in presets.builtin().items() for name, values in table.items()
        ]
    if kind == "algorithms":
        return ("name", "what it is", *COSTS.values()), [(names(e), e.summary, *cost_or_error(e.name)) for e in entries]
    if kind == "params":
        common = ("all algorithms", _text(registry.algorithms.common))
        return ("algorithm", "hyper-parameters and defaults"), [common, *((names(e), params(e)) for e in entries)]
    if kind == "metrics":
        return ("name", "what it is", "better"), [
            (e.name, e.summary, getattr(e.build, "better", "higher")) for e in registry.metrics
        ]
    return ("name", "what it is", "parameters and defaults"), [(e.name, e.summary, params(e)) for e in REGISTRIES[kind]]


def entry_of(kind: str, name: str) -> registry.Entry:
    """The entry of this kind and name."""
    kind = "algorithms" if kind == "params" else kind
    if kind not in REGISTRIES:
        raise ValueError(f"list: {kind} have no parameters: leave out {name!r}, or name one of {', '.join(REGISTRIES)}")
    return REGISTRIES[kind].find(name)


def parameters(entry: registry.Entry) -> Table:
    """The parameters of one entry: default, bounds and meaning."""
    loaded = entry in (*registry.partitions, *registry.models)
    defaults = (options_of(entry) if loaded else entry.defaults) | entry.common
    defaults.pop("proportional", None)  # as steps="proportional"
    if entry in list(registry.metrics):  # functions of outputs and targets
        defaults = {}
    texts = meanings.meanings(entry.build, defaults)
    lines: list[tuple[str, ...]] = [(name, shown(value), bounds(name), texts[name]) for name, value in defaults.items()]
    return ("parameter", "default", "bounds", "meaning"), lines


def shown(value: object) -> str:
    """A default; a schedule stands as in TOML."""
    if value is Parameter.empty:
        return ""
    return inline(value) if isinstance(value, dict) else str(value)


def bounds(name: str) -> str:
    """The bounds of a number, which are the same wherever a parameter has this name."""
    if name in checks.COUNTS:
        return "whole, >= 1"
    return checks.BOUNDS[name].text if name in checks.BOUNDS else ""


def names(entry: registry.Entry) -> str:
    """The name of an algorithm and its aliases."""
    return ", ".join([entry.name, *(e.name for e in registry.algorithms if e.alias_of == entry.name)])


def params(entry: registry.Entry) -> str:
    """The parameters that a user sets, with their defaults, without those that `fedda.load` takes from the data."""
    loaded = entry in (*registry.partitions, *registry.models)
    return _text(options_of(entry) if loaded else entry.defaults)


def _text(values: dict[str, object]) -> str:
    return ", ".join(k if v is Parameter.empty else f"{k}={shown(v)}" for k, v in values.items())


# -- costs, measured by running an algorithm ----------------------------------------------------------------------
D = 512  # larger than the count of single numbers that any algorithm sends, so that vectors and numbers differ


class Cost(NamedTuple):
    """For one client and one round of I local steps; `start` is what every client sends once, before round one."""

    down: str
    up: str
    gradients: str
    start: str
    memory: str


# The column heads of the costs.
COSTS = dict(zip(Cost._fields, ("vectors down", "up", "gradients", "up at the start", "client keeps"), strict=True))


def cost(name: str) -> Cost:
    """The costs of an algorithm with its defaults, measured on a small quadratic.

    >>> cost("fedda-mvr")
    Cost(down='3 + 1 number', up='2', gradients='2I', start='1', memory='none')
    """
    (two, start, memory), (three, _, _) = (_measure(name, steps) for steps in (2, 3))
    slope = three["gradients"] - two["gradients"]
    rest = two["gradients"] - 2 * slope
    gradients = f"{slope if slope != 1 else ''}I" + (f" {'+' if rest > 0 else '-'} {abs(rest)}" if rest else "")
    return Cost(
        down=_vectors(two["bytes_down"]),
        up=_vectors(two["bytes_up"]),
        gradients=gradients + (" + full pass" if two["full_gradients"] else ""),
        start=_vectors(start["bytes_up"]),
        memory=", ".join(memory) or "none",
    )


def cost_or_error(name: str) -> tuple[str, ...]:
    """The costs; if a plugin's algorithm fails, the first column says why, so that the others can still be listed."""
    try:
        return cost(name)
    except Exception as why:  # a plugin can raise anything
        return (f"cannot run: {type(why).__name__}: {checks.one_line(why, 60)}", *["?"] * (len(COSTS) - 1))


def _measure(name: str, steps: int) -> tuple[dict[str, int], dict[str, int], tuple[str, ...]]:
    """The counts of the second round, those of the start, and the names of the client memory."""
    ones = torch.ones(1, D, dtype=torch.float64)
    problem = Quadratic(ones, ones)
    run = Run(for_rounds(registry.algorithms.find(name)(steps=steps), problem, 2), problem)
    start = dict(vars(run.counts))
    run.step()
    first = dict(vars(run.counts))
    run.step()
    return {key: value - first[key] for key, value in vars(run.counts).items()}, start, run.algorithm.memory


def _vectors(count: int) -> str:
    vectors, numbers = divmod(count // 8, D)
    return f"{vectors}" + (f" + {numbers} number{'s' if numbers > 1 else ''}" if numbers else "")
