"""An experiment: read from TOML, checked, completed with every default, and written back so that it can be repeated."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
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

from .. import aggregation, checks, plugins
from ..aggregation import Budget, Wrapper
from ..aggregation.cohort import check_wrappers
from ..clients import PERSONAL_ALREADY, FineTuning
from ..core import Algorithm
from ..data import absolute, find_dataset
from ..engines.participation import cohort_size
from ..problems import Neural, load, options_of
from ..problems.augment import named
from ..problems.loading import CLIENTS, names_owners, partition_of
from ..problems.metrics import find_metrics
from ..registry import algorithms, make, models, partitions, with_preset
from ..runs.toml import dumps, loads, read_toml

SEED = 2**63  # seeds are counters of 63 bits
MOST = 10**9  # rounds: more must be a mistake
LATER = ("choose", "norm", "pool")  # older files lack them: their defaults are not written, so that files stay the same


class ProblemTable(BaseModel):
    """[problem]: the arguments of `fedda.load`, with the options of the partition and the model."""

    model_config = ConfigDict(extra="allow", strict=True)
    data: str
    clients: int | None = Field(None, ge=1)
    partition: str = "iid"
    model: str = "mlp"
    batch: int = Field(16, ge=1)
    seed: int = Field(0, ge=0, lt=SEED)
    resplit: bool = False
    validation: float | None = Field(None, gt=0, lt=1)
    target: str | None = None  # a column of a table
    client: str | None = None  # another one
    ignore: str | list[str] | None = None  # columns that are not features
    missing: Literal["refuse", "drop"] | None = None  # rows with gaps
    task: Literal["regression", "classes"] | None = None  # what the target is
    augment: str | dict[str, Any] | list[str | dict[str, Any]] | None = None
    trainable: str | list[str] | None = None  # the parameters to train, by patterns
    personal: str | list[str] | None = None  # those that stay on their clients
    personal_lr: float | None = Field(None, gt=0)
    metrics: list[str] | None = None  # besides the loss and the accuracy

    @model_validator(mode="after")
    def _owners_of_a_table(self) -> ProblemTable:
        self.partition = partition_of(self.partition, self.client)
        return self

    @model_serializer(mode="wrap")
    def _without_none(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without later keys that are None: older files, and names made of them, stay the same."""
        later = (
            "validation",
            "target",
            "client",
            "ignore",
            "missing",
            "task",
            "augment",
            "trainable",
            "personal",
            "personal_lr",
            "metrics",
        )
        return {key: value for key, value in fields(self).items() if key not in later or value is not None}

    def build(self, tuning: bool = False) -> Neural:
        """The problem. For `tuning` it has no test set: a sweep uses the validation samples, which are a fifth of the
        training samples if the table does not say otherwise."""
        arguments = self.model_dump()
        share = arguments.pop("validation", tuning)
        with errors_named("problem"):
            problem = load(arguments.pop("data"), validation=share, **arguments)
        if tuning and self.validation is not None:
            problem.test = None
        return problem

    def completed(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        with errors_named("problem"):
            find_dataset(
                self.data,
                target=self.target,
                client=self.client,
                ignore=self.ignore or (),
                missing=self.missing or "refuse",
                task=self.task,
            )
            named("problem", self.augment)  # built only to refuse a mistake now
            find_metrics(self.metrics)
            for entry in (partitions.find(self.partition), models.find(self.model)):
                options |= options_of(entry)
            for key in self.model_extra or {}:
                if key not in options:
                    keys = {*type(self).model_fields, *options}
                    raise ValueError(f"no key {key!r} with this partition and model; {checks.nearest(key, keys)}")
            # If the data names its clients, they are counted when it is read.
            counted = None if names_owners(self.partition) else CLIENTS
        full = options | self.model_dump() | {"clients": self.clients or counted}
        return {key: value for key, value in full.items() if key not in LATER or value != options[key]}


class Experiment(BaseModel):
    """An experiment. [algorithms.LABEL] holds hyper-parameters, `name` (the algorithm, by default LABEL) and `group`
    (the row of the figure in which its curve is drawn)."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    title: str = ""
    figure: str = ""  # the figure of the paper that this run reproduces
    setting: str = ""  # the source of the hyper-parameters: "paper", "tuned", ...
    rounds: int = Field(ge=1, le=MOST)
    every: int | None = Field(None, ge=1)
    cohort: int | float | None = Field(None, gt=0)  # a number of clients, or a share of them such as 0.1
    seeds: list[int] = [0]
    weights: Literal["uniform", "samples"] | None = None  # uniform, with a warning where sizes differ much
    sampling: Literal["uniform", "samples"] | None = None  # uniform
    drop: float | None = Field(None, ge=0, lt=1)  # the probability that a reply gets lost
    availability: str | None = None  # a CSV file: when clients can take part
    aggregation: list[dict[str, Any]] | None = None  # wrappers around every cohort, in this order
    budget: dict[str, Any] | None = None  # privacy budget: {epsilon = 8.0, delta = 1e-5}
    detail: bool = False
    plugin: list[str] | None = None  # .py files or modules that are imported first
    evaluate: str | int | None = None  # "all", or the number of training samples of an evaluation
    patience: int | None = Field(None, ge=1)  # evaluations without an improvement, after which an algorithm stops
    metric: str | None = None  # the validation metric that must improve
    personalise: str | None = None  # "fine-tune 5": evaluate clients after local steps as well
    problem: ProblemTable
    algorithms: dict[str, dict[str, Any]]

    @model_serializer(mode="wrap")
    def _without_none(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without later keys that are None: older files, and names made of them, stay the same."""
        later = ("sampling", "drop", "availability", "plugin", "evaluate", "patience", "metric", "personalise")
        return {key: value for key, value in fields(self).items() if key not in later or value is not None}

    @field_validator("evaluate")
    @classmethod
    def _evaluated(cls, evaluate: str | int | None) -> str | int | None:
        if (isinstance(evaluate, str) and evaluate != "all") or (isinstance(evaluate, int) and evaluate < 1):
            raise ValueError("must be 'all' or a whole number >= 1, the training samples of an evaluation")
        return evaluate

    @field_validator("personalise")
    @classmethod
    def _personalised(cls, personalise: str | None) -> str | None:
        try:
            FineTuning.of(personalise)
        except ValueError:
            raise ValueError("must be text such as 'fine-tune 5' or 'fine-tune 5 lr 0.1'") from None
        return personalise

    @field_validator("name")
    @classmethod
    def _name_fits_a_folder(cls, name: str) -> str:
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
        if isinstance(self.cohort, float) and self.cohort > 1:
            raise ValueError(f"cohort must be a whole number, or a share of the clients up to 1.0, got {self.cohort}")
        if self.personalise is not None and self.problem.personal is not None:
            raise ValueError(PERSONAL_ALREADY)
        if self.patience is None and self.metric is not None:
            raise ValueError(f"metric is for patience: give patience = 5 as well, got metric = {self.metric!r}")
        if not self.algorithms:
            raise ValueError("algorithms must hold at least one table, such as [algorithms.fedavg]")
        for label, params in self.algorithms.items():
            if not label.strip() or not label.isprintable():
                raise ValueError(f"algorithms: a label must be printable text, got {label!r}")
            for key, what in (("name", "the name of an algorithm"), ("group", "a text, the name of a row")):
                if not isinstance(params.get(key, ""), str):
                    raise ValueError(f"algorithms.{label}: {key} must be {what}, got {params[key]!r}")
        return self

    def build(self, label: str) -> Algorithm:
        params = self.algorithms[label]
        with errors_named(f"algorithms.{label}"):
            return make(params.get("name", label), **hyper_params(params))

    def wrappers(self) -> tuple[Wrapper, ...]:
        """The aggregation wrappers of every cohort."""
        with errors_named(self.name), errors_named("aggregation"):
            wrappers = [aggregation.make(**table) for table in self.aggregation or ()]
        return check_wrappers(wrappers, self.name)

    def privacy_budget(self) -> Budget | None:
        """The privacy budget."""
        with errors_named(self.name):
            return None if self.budget is None else Budget.of(self.budget)

    def completed(self) -> Experiment:
        """The experiment with every default, parsed from its own TOML, so that it equals its `config.toml`."""
        self.wrappers()  # these two are built only to refuse mistakes now
        self.privacy_budget()
        full = {}
        with errors_named(self.name):
            for label, params in self.algorithms.items():
                with errors_named(f"algorithms.{label}"):
                    entry = algorithms.find(params.get("name", label))
                    head = {"name": entry.name} | ({"group": params["group"]} if "group" in params else {})
                    full[label] = head | entry.complete(with_preset(entry, hyper_params(params)))
            problem = self.problem.completed()
            table = self.model_dump() | {
                "every": self.every or max(1, self.rounds // 100),
                "cohort": cohort_size(self.cohort, problem["clients"]) if problem["clients"] else self.cohort,
                "weights": self.weights or "uniform",
                "aggregation": [aggregation.completed(**wrapper) for wrapper in self.aggregation or ()],
                "problem": problem,
                "algorithms": full,
            }
            text = dumps(table)
        return parse(text, self.name)

    def toml(self) -> str:
        return dumps(self.model_dump())

    def located(self, folder: Path) -> Experiment:
        """The experiment of a file in this folder, to which its paths are relative: with absolute paths, so that it is
        the same from anywhere. Its plugins are imported."""
        names = absolute_plugins(self.plugin or (), folder)
        for name in names:
            plugins.load(name)
        problem = self.problem.model_copy(update={"data": absolute(self.problem.data, folder)})
        algorithms = {
            label: params | {"preset": os.path.abspath(folder / params["preset"])}
            if str(params.get("preset", "")).endswith(".toml")
            else params
            for label, params in self.algorithms.items()
        }
        trace = None if self.availability is None else os.path.abspath(folder / self.availability)
        update = {"plugin": names or None, "problem": problem, "algorithms": algorithms, "availability": trace}
        return self.model_copy(update=update)


def changed_keys(experiment: Experiment) -> list[str]:
    """The keys of a completed experiment, dotted, whose values differ from the defaults: what a reader looks at first.

    >>> changed_keys(find("digits").completed())[:4]
    ['name', 'title', 'rounds', 'every']
    """
    table = experiment.model_dump()
    problem, methods = table.pop("problem"), table.pop("algorithms")
    usual: dict[str, Any] = {name: field.default for name, field in Experiment.model_fields.items()}
    usual |= {"weights": "uniform", "every": max(1, experiment.rounds // 100), "cohort": experiment.problem.clients}
    changed = [key for key, value in table.items() if value not in (usual[key], [])]
    options: dict[str, Any] = {name: field.default for name, field in ProblemTable.model_fields.items()}
    for entry in (partitions.find(experiment.problem.partition), models.find(experiment.problem.model)):
        options |= options_of(entry)
    options["clients"] = CLIENTS
    changed += [f"problem.{key}" for key, value in problem.items() if key not in options or value != options[key]]
    for label, params in methods.items():
        entry = algorithms.find(params.get("name", label))
        known = entry.defaults | entry.common | {"name": label}
        changed += [f"algorithms.{label}.{k}" for k, v in params.items() if k not in known or v != known[k]]
    return changed


def absolute_plugins(names: Iterable[str], folder: Path) -> list[str]:
    """Plugins, each once: files by their absolute paths, modules by their names."""
    absolute = (os.path.abspath(folder / name) if name.endswith(".py") else name for name in names)
    return list(dict.fromkeys(absolute))


def hyper_params(params: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of an algorithm's table: all keys but `name` and `group`."""
    return {key: value for key, value in params.items() if key not in ("name", "group")}


@contextmanager
def errors_named(owner: str) -> Iterator[None]:
    """Begin the message of an error in the block with `owner`. Every error that a wrong value can cause becomes a
    ValueError."""
    try:
        yield
    except ValueError as why:
        raise ValueError(f"{owner}: {why}") from None
    except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError) as why:
        raise ValueError(f"{owner}: cannot be built ({type(why).__name__}: {checks.one_line(why, 300)})") from None


def find(name: str) -> Experiment:
    """A built-in experiment by its name, or one from a TOML file.

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
    """The experiment in a file."""
    experiment = checked(read_toml(path), str(path))
    with errors_named(str(path)):
        return experiment.located(path.parent)


def builtin() -> list[str]:
    """The names of the experiments that come with fedda."""
    names = (p.name for p in (resources.files(__package__) / "figures").iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def parse(text: str, where: str) -> Experiment:
    """An experiment from TOML text; the first mistake raises a ValueError of one line that begins with `where`."""
    return checked(loads(text, where), where)


def checked(table: dict[str, Any], where: str) -> Experiment:
    try:
        return Experiment.model_validate(table)
    except ValidationError as why:
        raise ValueError(f"{where}: {_first_mistake(why)}") from None


def _first_mistake(error: ValidationError) -> str:
    # A misspelt key appears as a missing and as an unknown one; the unknown one is more helpful.
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden" and path in ProblemTable.model_fields:
        return f"no key {path!r} at the top of the file; it belongs under [problem]"
    if first["type"] == "extra_forbidden":
        return f"no key {path!r}; {checks.nearest(path, Experiment.model_fields)}"
    if first["type"] == "missing":
        return f"the key {path!r} is missing"
    message = first["msg"].removeprefix("Value error, ")
    if not path:
        return message
    rule = message.removeprefix("Input should be ").removeprefix("must be ")
    rule = rule.replace("valid dictionary", "table").replace("valid integer", "whole number")
    return f"{path} must be {rule}, got {repr(first['input'])[:80]}"
