"""Registries of algorithms, engines, data sets and so on, by name. The command line, the tables of the documentation
and the shared tests are driven by them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from . import checks, plugins, presets

if TYPE_CHECKING:
    from .core import Algorithm

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """A registered builder: its flat keyword arguments are the hyper-parameters of the name."""

    name: str
    build: Callable[..., Any]
    owner: str  # its name in messages
    summary: str  # the first sentence of its docstring
    defaults: dict[str, Any]  # every hyper-parameter; `inspect.Parameter.empty` if it has no default
    reference: str = ""
    alias_of: str | None = None
    example: dict[str, Any] = field(default_factory=dict)  # hyper-parameters that suit a small noisy problem, for tests

    def complete(self, params: dict[str, Any]) -> dict[str, Any]:
        """`params` with the defaults filled in; unknown and missing names are refused."""
        for name in params:
            if name not in self.defaults:
                raise ValueError(f"{self.name}: no parameter {name!r}; {checks.nearest(name, self.defaults)}")
        full = self.defaults | params
        for name, value in full.items():
            if value is inspect.Parameter.empty:
                raise ValueError(f"{self.name}: {name} is missing")
        return full

    def __call__(self, **params: Any) -> Any:
        full = self.complete(params)
        checks.check(self.owner, **{k: v for k, v in full.items() if v is not None})
        return self.build(**full)


@dataclass
class Registry:
    """The entries of one kind, by name. The package `home` registers the built-in ones.

    >>> Registry("algorithm").find("fedavg")
    Traceback (most recent call last):
    ValueError: unknown algorithm 'fedavg'; known:
    """

    kind: str
    home: str | None = None
    known: dict[str, Entry] = field(default_factory=dict)

    @property
    def entries(self) -> dict[str, Entry]:
        """All entries. `home` is imported on the first use, so that `import fedda` stays fast."""
        if self.home is not None:
            importlib.import_module(self.home)
        return self.known

    def add(self, entry: Entry) -> None:
        if entry.name in self.entries:
            raise ValueError(f"{self.kind} {entry.name!r} is registered twice")
        self.entries[entry.name] = entry

    def register(
        self, name: str, *aliases: str, reference: str = "", owner: str = "", example: dict[str, Any] | None = None
    ) -> Callable[[T], T]:
        """Register a class or a function: the hyper-parameters are those of its signature, the summary is the first
        paragraph of its docstring. `owner` is its name in messages: by default that of the class, or `name` for a
        function. `example` holds hyper-parameters with which the shared tests run it."""

        def decorate(build: T) -> T:
            called = owner or (build.__name__ if inspect.isclass(build) else name)
            summary = " ".join((inspect.getdoc(build) or "").split("\n\n")[0].split())
            defaults = {p.name: p.default for p in inspect.signature(build).parameters.values()}
            for label in (name, *aliases):
                alias_of = None if label == name else name
                self.add(Entry(label, build, called, summary, defaults, reference, alias_of, example or {}))
            return build

        return decorate

    def find(self, name: str) -> Entry:
        if name not in self.entries:
            plugins.discover()  # it may be in an installed package
        if name not in self.entries:
            raise ValueError(f"unknown {self.kind} {name!r}; {checks.nearest(str(name), self.entries)}".rstrip())
        return self.entries[name]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())


algorithms = Registry("algorithm", "fedda.algorithms")
engines = Registry("engine", "fedda.engines")
datasets = Registry("data set", "fedda.data")
partitions = Registry("partition", "fedda.data")
models = Registry("model", "fedda.problems")
metrics = Registry("metric", "fedda.problems")  # functions f(output, target), or fedda.Metric
proxes = Registry("prox", "fedda.rules.prox")


def make(name: str, *, preset: str | None = None, **params: Any) -> Algorithm:
    """An algorithm by its name, with its hyper-parameters as keywords; `preset` names a data set whose tuned values
    from the paper are the defaults.

    >>> import fedda
    >>> fedda.make("fedavg", lr=0.1, steps=5).steps
    5
    >>> fedda.make("stem", preset="cifar10", steps=10).w
    100.0
    >>> fedda.make("fedavg", step=5)
    Traceback (most recent call last):
    ValueError: fedavg: no parameter 'step'; did you mean 'steps'?
    """
    entry = algorithms.find(name)
    algorithm: Algorithm = entry(**with_preset(entry, params if preset is None else params | {"preset": preset}))
    return algorithm


def with_preset(entry: Entry, params: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters; if `preset` is among them, its values are the defaults of the others."""
    explicit = {name: value for name, value in params.items() if name != "preset"}
    if "preset" not in params:
        return explicit
    return presets.find(params["preset"], entry.alias_of or entry.name) | explicit
