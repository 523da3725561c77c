"""What an experiment is: read from TOML, checked, completed with every default, written back re-runnable."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .. import checks
from ..core import Algorithm
from ..problems import Neural, load
from ..registry import algorithms, make, models, partitions
from .toml import dumps


class ProblemTable(BaseModel):
    """[problem]: the arguments of `fedda.load`; options of the partition and the model stand beside them."""

    model_config = ConfigDict(extra="allow", strict=True)
    data: str
    clients: int = Field(10, ge=1)
    partition: str = "iid"
    model: str = "mlp"
    batch: int = Field(16, ge=1)
    seed: int = Field(0, ge=0)

    def build(self) -> Neural:
        words = self.model_dump()
        return load(words.pop("data"), **words)

    def completed(self) -> dict[str, Any]:
        options = {}
        for entry in (partitions.find(self.partition), models.find(self.model)):
            given = ("labels", "clients", "seed", "client", "shape", "classes")
            options |= {k: v for k, v in entry.defaults.items() if k not in given}
        return options | self.model_dump()


class Experiment(BaseModel):
    """A whole experiment. [algorithms.LABEL] holds flat hyper-parameters; `name` says which algorithm, if not LABEL."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(min_length=1)
    title: str = ""
    rounds: int = Field(ge=1)
    every: int | None = Field(None, ge=1)
    cohort: int | None = Field(None, ge=1)
    seeds: list[int] = Field([0], min_length=1)
    weights: Literal["uniform", "samples"] = "uniform"
    problem: ProblemTable
    algorithms: dict[str, dict[str, Any]] = Field(min_length=1)

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise ValueError("must be distinct whole numbers >= 0")
        return seeds

    def build(self, label: str) -> Algorithm:
        words = dict(self.algorithms[label])
        try:
            return make(words.pop("name", label), **words)
        except ValueError as why:
            raise ValueError(f"algorithms.{label}: {why}") from None

    def completed(self) -> Experiment:
        """The same with every default filled in."""
        full = {}
        for label, words in self.algorithms.items():
            name = words.get("name", label)
            rest = {k: v for k, v in words.items() if k != "name"}
            full[label] = {"name": name} | algorithms.find(name).complete(rest)
        return self.model_copy(
            update={
                "every": self.every or max(1, self.rounds // 100),
                "cohort": self.cohort or self.problem.clients,
                "problem": ProblemTable(**self.problem.completed()),
                "algorithms": full,
            }
        )

    def toml(self) -> str:
        return dumps(self.model_dump())


def find(name: str) -> Experiment:
    """An experiment by a built-in name or from a TOML file.

    >>> find("digits").problem.partition
    'dominant_class'
    """
    if name in builtin():
        return parse((resources.files(__package__) / "figures" / f"{name}.toml").read_text(), name)
    path = Path(name)
    if path.suffix != ".toml":
        raise ValueError(f"unknown experiment {name!r}; {checks.nearest(name, builtin())} (or give a .toml file)")
    try:
        return parse(path.read_text(encoding="utf-8"), name)
    except OSError as why:
        raise ValueError(f"{name}: cannot be read: {why.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{name}: is no UTF-8 text, a TOML file must be") from None


def builtin() -> list[str]:
    """The names of the experiments that come with fedda."""
    return sorted(p.name.removesuffix(".toml") for p in (resources.files(__package__) / "figures").iterdir())


def parse(text: str, where: str) -> Experiment:
    """An experiment from TOML text; the first mistake is said in one line that begins with `where`."""
    try:
        return checked(tomllib.loads(text), where)
    except tomllib.TOMLDecodeError as why:
        raise ValueError(f"{where}: is no TOML: {why}") from None


def checked(table: dict[str, Any], where: str) -> Experiment:
    """An experiment from a table."""
    try:
        return Experiment.model_validate(table)
    except ValidationError as why:
        raise ValueError(f"{where}: {_first(why)}") from None


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        return f"no key {'.'.join(path)!r}; {checks.nearest(path[-1], Experiment.model_fields)}"
    if first["type"] == "missing":
        return f"the key {'.'.join(path)!r} is missing"
    message = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ").removeprefix("must be ")
    return f"{'.'.join(path)} must be {message}, got {first['input']!r}"
