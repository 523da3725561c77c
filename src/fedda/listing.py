"""What there is, as tables: for `fedda list` and for the documentation."""

from __future__ import annotations

from inspect import Parameter

from . import presets, registry
from .aggregation import aggregations
from .costs import Cost, cost
from .experiments import builtin, find
from .problems import options_of

REGISTRIES = {
    "algorithms": registry.algorithms,
    "data": registry.datasets,
    "partitions": registry.partitions,
    "models": registry.models,
    "prox": registry.proxes,
    "engines": registry.engines,
    "aggregation": aggregations,
}
KINDS = ("experiments", "algorithms", "words", "presets", *list(REGISTRIES)[1:])
# How the parts of a cost are headed, for one client and one round of I local steps.
COSTS = {
    "down": "vectors down",
    "up": "up",
    "gradients": "gradients",
    "start": "up at the start",
    "memory": "client keeps",
}
assert tuple(COSTS) == Cost._fields

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def rows(kind: str) -> Table:
    """The heads and the rows of one kind.

    >>> sorted(row[0] for row in rows("engines")[1])
    ['distributed', 'sequential', 'vectorised']
    """
    if kind == "experiments":
        found = {name: find(name) for name in builtin()}
        return ("experiment", "title", "algorithms"), [(n, e.title, ", ".join(e.algorithms)) for n, e in found.items()]
    if kind == "presets":
        return ("preset", "algorithm", "words"), [
            (which, name, _words(words)) for which, table in presets.builtin().items() for name, words in table.items()
        ]
    if kind == "algorithms":
        heads = ("name", "what it is", *COSTS.values())
        return heads, [(names(e), e.summary, *cost(e.name)) for e in registry.algorithms if not e.alias_of]
    if kind == "words":
        return ("algorithm", "its words and their defaults"), [
            (names(e), words(e)) for e in registry.algorithms if not e.alias_of
        ]
    return ("name", "what it is", "words and defaults"), [(e.name, e.summary, words(e)) for e in REGISTRIES[kind]]


def names(entry: registry.Entry) -> str:
    """The name of an algorithm and its aliases."""
    return ", ".join([entry.name, *(e.name for e in registry.algorithms if e.alias_of == entry.name)])


def words(entry: registry.Entry) -> str:
    """The words that a user gives, with their defaults; what `fedda.load` takes from the data is none of them."""
    loaded = entry in (*registry.partitions, *registry.models)
    return _words(options_of(entry) if loaded else entry.defaults)


def _words(values: dict[str, object]) -> str:
    return ", ".join(k if v is Parameter.empty else f"{k}={v}" for k, v in values.items())
