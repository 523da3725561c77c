"""What an experiment is: read from TOML, checked, completed with every default, written back re-runnable."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from .. import aggregation, checks
from ..aggregation import Budget, Wrapper
from ..core import Algorithm
from ..data import find_dataset
from ..problems import Neural, load, options_of
from ..problems.loading import CLIENTS, names_owners
from ..registry import algorithms, expanded, make, models, partitions
from ..runs.toml import dumps

SEED = 2**63  # seeds are counters of 63 bits
MOST = 10**9  # rounds that anybody can mean
LATER = ("norm", "pool")  # options that older files lack: a default is not written, so that these stay as they are


class ProblemTable(BaseModel):
    """[problem]: the arguments of `fedda.load`; options of the partition and the model stand beside them."""

    model_config = ConfigDict(extra="allow", strict=True)
    data: str
    clients: int | None = Field(None, ge=1)
    partition: str = "iid"
    model: str = "mlp"
    batch: int = Field(16, ge=1)
    seed: int = Field(0, ge=0, lt=SEED)
    resplit: bool = False
    validation: float | None = Field(None, gt=0, lt=1)

    @model_serializer(mode="wrap")
    def _as_before(self, words: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without `validation` where there is none: files, and names that are made of them, stay as they were."""
        return {word: value for word, value in words(self).items() if word != "validation" or value is not None}

    def build(self, tuning: bool = False) -> Neural:
        """The problem; for `tuning` without its test set: a sweep looks at the validation samples, or at a fifth of the
        training samples where the table holds out none."""
        words = self.model_dump()
        share = words.pop("validation", tuning)
        with owned("problem"):
            problem = load(words.pop("data"), validation=share, **words)
        if tuning and self.validation is not None:
            problem.test = None
        return problem

    def completed(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        with owned("problem"):
            find_dataset(self.data)
            for entry in (partitions.find(self.partition), models.find(self.model)):
                options |= options_of(entry)
            for word in self.model_extra or {}:
                if word not in options:
                    words = {*type(self).model_fields, *options}
                    raise ValueError(f"no key {word!r} with this partition and model; {checks.nearest(word, words)}")
            # Those that the data names are counted when it is read.
            counted = None if names_owners(self.partition) else CLIENTS
        full = options | self.model_dump() | {"clients": self.clients or counted}
        return {word: value for word, value in full.items() if word not in LATER or value != options[word]}


class Experiment(BaseModel):
    """A whole experiment. [algorithms.LABEL] holds flat words; `name` says which algorithm, if not LABEL, and `group`
    in which row of the figure its curve is drawn."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    title: str = ""
    figure: str = ""  # the figure of the paper whose claims this run can speak to
    setting: str = ""  # whose hyper-parameters these are: "paper", "tuned", ...
    rounds: int = Field(ge=1, le=MOST)
    every: int | None = Field(None, ge=1)
    cohort: int | None = Field(None, ge=1)
    seeds: list[int] = [0]
    weights: Literal["uniform", "samples"] = "uniform"
    aggregation: list[dict[str, Any]] | None = None  # wrappers round every cohort, in this order
    budget: dict[str, Any] | None = None  # of privacy: {epsilon = 8.0, delta = 1e-5}
    detail: bool = False
    problem: ProblemTable
    algorithms: dict[str, dict[str, Any]]

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not name.isprintable() or "/" in name or name.strip() in ("", ".", ".."):
            raise ValueError("must be a plain name without '/': the run folder gets it")
        return name

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed < SEED for seed in seeds):
            raise ValueError("must be distinct whole numbers >= 0, at least one")
        return seeds

    @field_validator("aggregation", mode="before")
    @classmethod
    def _named(cls, tables: Any) -> Any:
        if tables in (None, []):
            return None
        if not isinstance(tables, list) or not all(isinstance(t, dict) and type(t.get("name")) is str for t in tables):
            raise ValueError("must be a list of tables with a name, such as [{name = 'clip', norm = 1.0}]")
        return tables

    @model_validator(mode="after")
    def _fits(self) -> Experiment:
        if self.cohort and self.problem.clients and self.cohort > self.problem.clients:
            raise ValueError(f"cohort must be at most {self.problem.clients}, the number of clients, got {self.cohort}")
        if not self.algorithms:
            raise ValueError("algorithms must hold at least one table, such as [algorithms.fedavg]")
        for label, words in self.algorithms.items():
            if not label.strip() or not label.isprintable():
                raise ValueError(f"algorithms: a label must be printable text, got {label!r}")
            for word, what in (("name", "the name of an algorithm"), ("group", "a text, the name of a row")):
                if not isinstance(words.get(word, ""), str):
                    raise ValueError(f"algorithms.{label}: {word} must be {what}, got {words[word]!r}")
        return self

    def build(self, label: str) -> Algorithm:
        name, words = self.algorithms[label].get("name", label), hyper(self.algorithms[label])
        with owned(f"algorithms.{label}"):
            return make(name, **words)

    def wrappers(self) -> tuple[Wrapper, ...]:
        """What is done to replies on their way to the mean."""
        with owned(self.name), owned("aggregation"):
            made = [aggregation.make(**table) for table in self.aggregation or ()]
        return aggregation.check_wrappers(made, self.name)

    def spending(self) -> Budget | None:
        """The privacy budget."""
        with owned(self.name):
            return None if self.budget is None else Budget.of(self.budget)

    def completed(self) -> Experiment:
        """The same with every default, as it is read back from its file: what runs is what is written."""
        self.wrappers()
        self.spending()
        full = {}
        with owned(self.name):
            for label, words in self.algorithms.items():
                with owned(f"algorithms.{label}"):
                    entry = algorithms.find(words.get("name", label))
                    ours = {"name": entry.name} | ({"group": words["group"]} if "group" in words else {})
                    full[label] = ours | entry.complete(expanded(entry, hyper(words)))
            problem = self.problem.completed()
            table = self.model_dump() | {
                "every": self.every or max(1, self.rounds // 100),
                "cohort": self.cohort or problem["clients"],
                "aggregation": [aggregation.completed(**own) for own in self.aggregation or ()],
                "problem": problem,
                "algorithms": full,
            }
            text = dumps(table)
        return parse(text, self.name)

    def toml(self) -> str:
        return dumps(self.model_dump())


def hyper(words: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of an algorithm's table: all but what says which algorithm, and where it is drawn."""
    return {word: value for word, value in words.items() if word not in ("name", "group")}


@contextmanager
def owned(owner: str) -> Iterator[None]:
    """A mistake is said with its owner's name; a builder may fail on a wrong word in any of these ways."""
    try:
        yield
    except ValueError as why:
        raise ValueError(f"{owner}: {why}") from None
    except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError) as why:
        raise ValueError(f"{owner}: cannot be built ({type(why).__name__}: {one_line(why)})") from None


def one_line(why: object) -> str:
    """The first line of somebody else's message, at the length that a TOML mistake needs."""
    return checks.one_line(why, 300)


def find(name: str) -> Experiment:
    """An experiment by a built-in name or from a TOML file.

    >>> find("digits").problem.partition
    'dominant_class'
    """
    if name in builtin():
        return parse((resources.files(__package__) / "figures" / f"{name}.toml").read_text(encoding="utf-8"), name)
    path = Path(name)
    if path.suffix != ".toml":
        raise ValueError(f"unknown experiment {name!r}; {checks.nearest(name, builtin())} (or give a .toml file)")
    return read(path)


def read(path: Path) -> Experiment:
    """An experiment from a file."""
    try:
        return parse(path.read_text(encoding="utf-8-sig"), str(path))  # some editors begin a file with a mark
    except OSError as why:
        raise ValueError(f"{path}: cannot be read: {why.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is no UTF-8 text, a TOML file must be") from None


def builtin() -> list[str]:
    """The names of the experiments that come with fedda."""
    names = (p.name for p in (resources.files(__package__) / "figures").iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def parse(text: str, where: str) -> Experiment:
    """An experiment from TOML text; the first mistake is said in one line that begins with `where`."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as why:
        raise ValueError(f"{where}: is no TOML: {one_line(why)}") from None
    return checked(table, where)


def checked(table: dict[str, Any], where: str) -> Experiment:
    """An experiment from a table."""
    try:
        return Experiment.model_validate(table)
    except ValidationError as why:
        raise ValueError(f"{where}: {_first(why)}") from None


def _first(error: ValidationError) -> str:
    # A key with a slip shows as a missing one and an unknown one; the unknown one says what happened.
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"no key {path!r}; {checks.nearest(path, Experiment.model_fields)}"
    if first["type"] == "missing":
        return f"the key {path!r} is missing"
    message = first["msg"].removeprefix("Value error, ")
    if not path:
        return message
    words = message.removeprefix("Input should be ").removeprefix("must be ")
    words = words.replace("valid dictionary", "table").replace("valid integer", "whole number")
    return f"{path} must be {words}, got {repr(first['input'])[:80]}"
