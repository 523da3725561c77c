"""Registries of algorithms, engines, data sets and so on, by name. The command line, the tables of the documentation
and the shared tests are driven by them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from . import checks, meanings, plugins, presets
from .core import Algorithm, LocalWork

__all__ = [
    "Entry", "Registry", "algorithms", "augmentations", "datasets", "engines", "make", "metrics", "models",
    "partitions", "proxes", "schedules",
]  # fmt: skip

T = TypeVar("T", bound=Callable[..., Any])
RATES = frozenset({"lr", "server_lr"})  # hyper-parameters that may be schedules


@dataclass(frozen=True)
class Entry:
    """A registered builder: its flat keyword arguments are the hyper-parameters of the name.

    Args:
        name: its name.
        build: the class or function.
        owner: its name in messages.
        summary: the first sentence of its docstring.
        defaults: every hyper-parameter; `inspect.Parameter.empty` if it has no default.
        reference: the paper.
        alias_of: the name that it is another name of.
        example: hyper-parameters that suit a small noisy problem, for tests.
        common: hyper-parameters that all entries of this kind take.
    """

    name: str
    build: Callable[..., Any]
    owner: str  # its name in messages
    summary: str  # the first sentence of its docstring
    defaults: dict[str, Any]  # every hyper-parameter; `inspect.Parameter.empty` if it has no default
    reference: str = ""
    alias_of: str | None = None
    example: dict[str, Any] = field(default_factory=dict)  # hyper-parameters that suit a small noisy problem, for tests

    common: dict[str, Any] = field(default_factory=dict)  # hyper-parameters that all entries of this kind take

    def complete(self, params: dict[str, Any]) -> dict[str, Any]:
        """The hyper-parameters with the defaults filled in; unknown and missing names are refused. Common hyper-
        parameters are left out if they are not given.

        Args:
            params: those that are given.
        """
        known = self.defaults | self.common
        for name in params:
            if name not in known:
                raise ValueError(f"{self.name}: no parameter {name!r}; {checks.nearest(name, known)}")
        full = self.defaults | params
        for name, value in full.items():
            if value is inspect.Parameter.empty:
                raise ValueError(f"{self.name}: {name} is missing")
        return full

    def __call__(self, **params: Any) -> Any:
        full = self.complete(params)
        if self.common and full.get("steps") == "proportional":
            full |= {"steps": self.defaults["steps"], "proportional": True}
        # Tables, and values with a name of an algorithm's own, are checked where they are made.
        named = getattr(self.build, "named", {})
        numbers = {k: v for k, v in full.items() if not (isinstance(v, dict) or (k in named and isinstance(v, str)))}
        checks.check(self.owner, **{k: v for k, v in numbers.items() if v is not None})
        for name in RATES & full.keys() if self.common else ():
            if isinstance(full[name], dict):
                full[name] = make_schedule(name, full[name])
        common = {name: full.pop(name) for name in self.common if name in full}
        built = self.build(**full)
        return replace(built, **common) if common else built


@dataclass
class Registry:
    """The entries of one kind, by name. The package `home` registers the built-in ones.

    Args:
        kind: what it registers, for messages.
        home: the package that registers the built-in entries, imported on the first use.
        known: the entries so far, by name.
        common: hyper-parameters that every entry takes, with their defaults.

    >>> Registry("algorithm").find("fedavg")
    Traceback (most recent call last):
    ValueError: unknown algorithm 'fedavg'; known:
    """

    kind: str
    home: str | None = None
    known: dict[str, Entry] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)  # hyper-parameters that every entry takes, with their defaults

    @property
    def entries(self) -> dict[str, Entry]:
        """All entries. `home` is imported on the first use, so that `import fedda` stays fast."""
        if self.home is not None:
            importlib.import_module(self.home)
        return self.known

    def add(self, entry: Entry) -> None:
        """Add an entry; a name that is taken is refused.

        Args:
            entry: the entry.
        """
        if entry.name in self.entries:
            raise ValueError(f"{self.kind} {entry.name!r} is registered twice")
        self.entries[entry.name] = entry

    def register(
        self, name: str, *aliases: str, reference: str = "", owner: str = "", example: dict[str, Any] | None = None
    ) -> Callable[[T], T]:
        """Register a class or a function: the hyper-parameters are those of its signature, the summary is the first
        paragraph of its docstring. The docstring should also say what the hyper-parameters mean.

        Args:
            name: its name.
            aliases: other names.
            reference: the paper.
            owner: its name in messages: by default that of the class, or `name` for a function.
            example: hyper-parameters with which the shared tests run it.
        """

        def decorate(build: T) -> T:
            called = owner or (build.__name__ if inspect.isclass(build) else name)
            summary = " ".join((inspect.getdoc(build) or "").split("\n\n")[0].split())
            signature = inspect.signature(build).parameters.values()
            defaults = {p.name: p.default for p in signature if p.name not in self.common}
            for label in (name, *aliases):
                alias_of = None if label == name else name
                self.add(
                    Entry(label, build, called, summary, defaults, reference, alias_of, example or {}, self.common)
                )
            return meanings.explained(build) if self.common else build

        return decorate

    def find(self, name: str) -> Entry:
        """The entry of a name, also of an installed plugin; the nearest names are suggested if there is none.

        Args:
            name: its name.
        """
        if name not in self.entries:
            plugins.discover()  # it may be in an installed package
        if name not in self.entries:
            raise ValueError(f"unknown {self.kind} {name!r}; {checks.nearest(str(name), self.entries)}".rstrip())
        return self.entries[name]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())


algorithms = Registry("algorithm", "fedda.algorithms", common={f.name: f.default for f in fields(LocalWork)})
engines = Registry("engine", "fedda.engines")
datasets = Registry("data set", "fedda.data")
partitions = Registry("partition", "fedda.data")
models = Registry("model", "fedda.problems")
augmentations = Registry("augmentation", "fedda.problems")
metrics = Registry("metric", "fedda.problems")  # functions f(output, target), or fedda.Metric
proxes = Registry("prox", "fedda.rules.prox")
schedules = Registry("schedule", "fedda.rules.schedules")


def make_schedule(name: str, table: dict[str, Any]) -> Any:
    """A rate that changes, from a table as in TOML: ``lr = {kind = "cosine", start = 0.1}``."""
    if "kind" not in table:
        raise ValueError(f"{name}: a table needs a kind, such as {{kind = 'cosine', start = 0.1}}, got {table!r}")
    return schedules.find(table["kind"])(**{key: value for key, value in table.items() if key != "kind"})


def rates_of_unknown_length(params: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rates, among the hyper-parameters or the defaults of the algorithm `name`, whose tables describe a rate that
    depends on the length of the run, without giving it.

    >>> rates_of_unknown_length({"name": "fedavg", "lr": {"kind": "cosine", "start": 0.1}})
    {'lr': {'kind': 'cosine', 'start': 0.1}}
    """
    full = (algorithms.find(params["name"]).defaults if "name" in params else {}) | params
    return {
        name: full[name] for name in sorted(RATES & full.keys())
        if isinstance(full[name], dict) and "horizon" not in full[name]
        and "horizon" in schedules.find(full[name].get("kind", "")).defaults
    }  # fmt: skip


def make(name: str, *, preset: str | None = None, **params: Any) -> Algorithm:
    """An algorithm by its name.

    Args:
        name: its name (`fedda list algorithms`).
        preset: a data set whose tuned values from the paper are the defaults (`fedda list presets`).
        params: its hyper-parameters (`fedda list algorithms NAME`); the others keep their defaults.

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


def __dir__() -> list[str]:
    return sorted(__all__)
