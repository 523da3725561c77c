"""The plan of the reproduction, read from `parts.toml`: figures, sweeps and pilots as experiments."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from fedda import checks, presets
from fedda.experiments.config import Experiment, checked, find, hyper_params
from fedda.experiments.grid import apply_point
from fedda.experiments.overrides import override
from fedda.experiments.sweep import Sweep
from fedda.registry import algorithms


@dataclass(frozen=True)
class Part:
    """Some figures in one setting, or sweeps, or pilots."""

    name: str
    setting: str = ""
    figures: tuple[str, ...] = ()
    sweep: str = ""  # a tuned part takes the winners of this sweep
    sweeps: tuple[str, ...] = ()
    pilots: tuple[str, ...] = ()
    rounds: int | None = None  # default: those of the plan
    precision: str = ""  # default: that of the command


@dataclass(frozen=True)
class PartList:
    """All parts, in the order in which they are run."""

    text: str  # the file, which is kept with the results
    rounds: int
    every: int
    seeds: tuple[int, ...]
    parts: tuple[Part, ...]
    sweeps: dict[str, dict[str, Any]] = field(default_factory=dict)
    pilots: dict[str, dict[str, Any]] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()  # changes to every experiment, as for --set: another model, other data

    def select(self, names: list[str]) -> list[Part]:
        """The parts with these names, in this order; without names, all parts."""
        known = {part.name: part for part in self.parts}
        for name in names:
            if name not in known:
                raise ValueError(f"reproduce: unknown part {name!r}; the parts are {', '.join(known)}")
        return [known[name] for name in names] or list(self.parts)

    def figures(self) -> Iterator[tuple[Part, str]]:
        """Every figure in every setting."""
        return ((part, name) for part in self.parts for name in part.figures)

    def figure(self, part: Part, name: str, best: Path | None = None) -> Experiment:
        """A figure of the paper, with the tuned values in the file `best` if one is given."""
        figure = self._experiment(name, part.rounds or self.rounds, self.every, self.seeds, setting=part.setting)
        if best is None:
            return figure
        tuned, in_sweep = presets.read(best), self.labels_in_sweep(part, figure)
        full = {label: params | tuned.get(in_sweep.get(label, ""), {}) for label, params in figure.algorithms.items()}
        return figure.model_copy(update={"algorithms": full})

    def labels_in_sweep(self, part: Part, figure: Experiment) -> dict[str, str]:
        """For each method of a figure with the paper's values: its label in the part's sweep."""
        searched = self.searched(part.sweep).algorithms
        return {
            label: other
            for label, params in figure.algorithms.items()
            for other, candidate in searched.items()
            if same_method(candidate, params)
        }

    def searched(self, name: str) -> Experiment:
        """The experiment that a sweep searches: the methods of its figures, each once."""
        sweep = self.sweeps[name]
        figures = [self._experiment(f, sweep["rounds"], sweep["every"], sweep["seeds"]) for f in sweep["figures"]]
        methods: dict[str, dict[str, Any]] = {}
        for figure in figures:
            for label, params in figure.algorithms.items():
                if not any(same_method(params, other) for other in methods.values()):
                    methods[label] = params
        update = {"name": name, "title": "", "figure": "", "setting": "", "algorithms": methods}
        return figures[0].model_copy(update=update)

    def search(self, name: str) -> Sweep:
        """A sweep with the same number of points for every method."""
        sweep, experiment = self.sweeps[name], self.searched(name)
        grids = []
        for label, params in experiment.algorithms.items():
            param = "server_lr" if params["name"] in sweep.get("server", ()) else "lr"
            penalised = "gammas" in sweep and params.get("prox") is not None
            rates = sweep["rates_with_gamma"] if penalised else sweep["rates"]
            grids.append(f"{label}.{param}=" + ",".join(f"x{rate:g}" for rate in rates))
            if penalised:
                grids.append(f"{label}.prox.gamma=" + ",".join(f"{gamma:g}" for gamma in sweep["gammas"]))
        # `force`: the figures are run with it too, and every point is judged by its result
        return Sweep(experiment, grids, metric=sweep.get("metric", "validation_accuracy"), force=True)

    def pilot(self, name: str) -> Experiment:
        """The readings of one ambiguity, side by side."""
        pilot = self.pilots[name]
        base = self._experiment(pilot["experiment"], pilot["rounds"], pilot["every"], pilot["seeds"])
        table = base.model_dump() | {"name": name, "title": pilot["question"], "algorithms": pilot["runs"]}
        return checked(table | {"figure": "", "setting": ""}, name).completed()

    def _experiment(self, name: str, rounds: int, every: int | None, seeds: Any, setting: str = "") -> Experiment:
        experiment = override(find(name), rounds=rounds, seeds=",".join(map(str, seeds)), settings=self.overrides)
        return experiment.model_copy(update={"every": every, "setting": setting}).completed()


def same_method(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two tables have the same algorithm and hyper-parameters, apart from the number of local steps.

    >>> same_method({"name": "fedda-mvr", "lr": 0.1, "steps": 5}, {"name": "fedda-1-1", "lr": 0.1, "steps": 20})
    True
    """
    return canonical(a | {"steps": 0}) == canonical(b | {"steps": 0})


def canonical(params: dict[str, Any]) -> dict[str, Any]:
    """An algorithm's table with its name instead of an alias, and its hyper-parameters.

    >>> canonical({"name": "fedda-1-1", "group": "I = 5", "lr": 0.1})
    {'name': 'fedda-mvr', 'lr': 0.1}
    """
    entry = algorithms.find(params["name"])
    return {"name": entry.alias_of or entry.name} | apply_point(hyper_params(params), {})


def read_plan(path: Path | None = None) -> PartList:
    """The plan from a file, by default the one of the paper."""
    file = resources.files(__package__) / "parts.toml" if path is None else path
    try:
        text = file.read_text(encoding="utf-8")
        table = _tuples(tomllib.loads(text))
        parts = tuple(Part(**_tuples(part)) for part in table.pop("parts"))
        return PartList(text=text, parts=parts, **table)
    except OSError as why:
        raise ValueError(f"{path}: cannot be read: {why.strerror}") from None
    except (ValueError, KeyError, TypeError) as why:
        raise ValueError(f"{path}: is not a plan of a reproduction: {checks.one_line(why, 300)}") from None


def _tuples(table: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
