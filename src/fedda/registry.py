"""Names to things: the command line, the docs' tables and the shared tests are driven by these registries."""

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
    owner: str  # how messages call it: the class's name
    summary: str  # the first sentence of its docstring
    defaults: dict[str, Any]  # every word it takes (`inspect.Parameter.empty` where one must be given)
    reference: str = ""
    alias_of: str | None = None

    def complete(self, given: dict[str, Any]) -> dict[str, Any]:
        """`given` with the defaults filled in; unknown and missing names are refused."""
        known = self.defaults
        for name in given:
            if name not in known:
                raise ValueError(f"{self.name}: no parameter {name!r}; {checks.nearest(name, known)}")
        full = known | given
        for name, value in full.items():
            if value is inspect.Parameter.empty:
                raise ValueError(f"{self.name}: {name} is missing")
        return full

    def __call__(self, **given: Any) -> Any:
        full = self.complete(given)
        checks.check(self.owner, **{k: v for k, v in full.items() if v is not None})
        return self.build(**full)


@dataclass
class Registry:
    """The things of one kind by name; the built-in ones are those that the package `home` registers.

    >>> Registry("algorithm").find("fedavg")
    Traceback (most recent call last):
    ValueError: unknown algorithm 'fedavg'; known:
    """

    kind: str
    home: str | None = None
    known: dict[str, Entry] = field(default_factory=dict)

    @property
    def entries(self) -> dict[str, Entry]:
        """All of them. The package is imported on the first use, so that `import fedda` stays fast."""
        if self.home is not None:
            importlib.import_module(self.home)
        return self.known

    def add(
        self,
        build: Callable[..., Any],
        name: str,
        *aliases: str,
        owner: str,
        summary: str,
        defaults: dict[str, Any],
        reference: str = "",
    ) -> None:
        for label in (name, *aliases):
            if label in self.entries:
                raise ValueError(f"{self.kind} {label!r} is registered twice")
            alias_of = None if label == name else name
            self.entries[label] = Entry(label, build, owner, summary, defaults, reference, alias_of)

    def register(self, name: str, *aliases: str, reference: str = "", owner: str = "") -> Callable[[T], T]:
        """Register a class or function as it is: words and defaults from its signature, summary from its docstring.
        `owner` is how messages call it: by default the class's name, or the name that a function is registered by."""

        def decorate(build: T) -> T:
            self.add(
                build,
                name,
                *aliases,
                owner=owner or (build.__name__ if inspect.isclass(build) else name),
                summary=" ".join((inspect.getdoc(build) or "").split("\n\n")[0].split()),
                defaults={p.name: p.default for p in inspect.signature(build).parameters.values()},
                reference=reference,
            )
            return build

        return decorate

    def find(self, name: str) -> Entry:
        if name not in self.entries:
            plugins.discover()  # it may live in an installed package
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
proxes = Registry("prox", "fedda.rules.prox")


def make(name: str, *, preset: str | None = None, **hyper: Any) -> Algorithm:
    """An algorithm by its name, with its hyper-parameters as flat words; `preset` gives the paper's for a data set.

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
    algorithm: Algorithm = entry(**expanded(entry, hyper if preset is None else hyper | {"preset": preset}))
    return algorithm


def expanded(entry: Entry, given: dict[str, Any]) -> dict[str, Any]:
    """The words given, and those of the preset that they name for the rest."""
    own = {word: value for word, value in given.items() if word != "preset"}
    return presets.preset(entry.alias_of or entry.name, given["preset"]) | own if "preset" in given else own
