"""What the reproduction consists of, read from `parts.toml`: figures, sweeps and pilots as experiments."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from fedda import presets
from fedda.experiments.config import Experiment, checked, find, hyper, one_line
from fedda.experiments.grid import placed
from fedda.experiments.overrides import choose
from fedda.experiments.sweep import Sweep
from fedda.registry import algorithms


@dataclass(frozen=True)
class Part:
    """Some figures in one setting, or sweeps, or pilots."""

    name: str
    setting: str = ""
    figures: tuple[str, ...] = ()
    sweep: str = ""  # whose winners a tuned part takes
    sweeps: tuple[str, ...] = ()
    pilots: tuple[str, ...] = ()
    rounds: int | None = None  # where they are not the plan's
    precision: str = ""  # where it is not that of the command


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
    words: tuple[str, ...] = ()  # what is changed in every experiment: another model, other data
    readme: str = ""

    def chosen(self, names: list[str]) -> list[Part]:
        """The parts of these names, in the order given; all of them where none is given."""
        known = {part.name: part for part in self.parts}
        for name in names:
            if name not in known:
                raise ValueError(f"reproduce: unknown part {name!r}; the parts are {', '.join(known)}")
        return [known[name] for name in names] or list(self.parts)

    def figure(self, part: Part, name: str, best: Path | None = None) -> Experiment:
        """A figure of the paper, with tuned values where `best` names the file of a sweep's winners."""
        wanted = self._as_here(name, part.rounds or self.rounds, self.every, self.seeds, setting=part.setting)
        if best is None:
            return wanted
        tuned, own = presets.read(best), self.searched_as(part, wanted)
        full = {label: words | tuned.get(own.get(label, ""), {}) for label, words in wanted.algorithms.items()}
        return wanted.model_copy(update={"algorithms": full})

    def searched_as(self, part: Part, figure: Experiment) -> dict[str, str]:
        """What the sweep of a part calls the methods of a figure, which has the paper's values."""
        searched, asked = self.searched(part.sweep).algorithms.items(), figure.algorithms.items()
        return {label: own for label, words in asked for own, theirs in searched if alike(theirs, words)}

    def searched(self, name: str) -> Experiment:
        """What a sweep searches: the methods of its figures, each once."""
        asked = self.sweeps[name]
        each = [self._as_here(f, asked["rounds"], asked["every"], asked["seeds"]) for f in asked["figures"]]
        found: dict[str, dict[str, Any]] = {}
        for one in each:
            for label, words in one.algorithms.items():
                if not any(alike(words, other) for other in found.values()):
                    found[label] = words
        update = {"name": name, "title": "", "figure": "", "setting": "", "algorithms": found}
        return each[0].model_copy(update=update)

    def search(self, name: str) -> Sweep:
        """A sweep with the same number of points for every method."""
        asked, experiment = self.sweeps[name], self.searched(name)
        grids = []
        for label, words in experiment.algorithms.items():
            word = "server_lr" if words["name"] in asked.get("server", ()) else "lr"
            penalised = "gammas" in asked and words.get("prox") is not None
            rates = asked["rates_with_gamma"] if penalised else asked["rates"]
            grids.append(f"{label}.{word}=" + ",".join(f"x{rate:g}" for rate in rates))
            if penalised:
                grids.append(f"{label}.prox.gamma=" + ",".join(f"{gamma:g}" for gamma in asked["gammas"]))
        # `force`: the figures are run with it, and every point is judged by what it comes to
        return Sweep(experiment, grids, metric=asked.get("metric", "validation_accuracy"), force=True)

    def pilot(self, name: str) -> Experiment:
        """The readings of one ambiguity, side by side."""
        asked = self.pilots[name]
        base = self._as_here(asked["experiment"], asked["rounds"], asked["every"], asked["seeds"])
        table = base.model_dump() | {"name": name, "title": asked["question"], "algorithms": asked["runs"]}
        return checked(table | {"figure": "", "setting": ""}, name).completed()

    def figures(self) -> Iterator[tuple[Part, str]]:
        """Every figure in every setting."""
        for part in self.parts:
            for name in part.figures:
                yield part, name

    def _as_here(self, name: str, rounds: int, every: int | None, seeds: Any, setting: str = "") -> Experiment:
        wanted = choose(find(name), rounds=rounds, seeds=",".join(map(str, seeds)), words=self.words)
        return wanted.model_copy(update={"every": every, "setting": setting}).completed()


def alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two tables are of one method with the same values, whatever its number of local steps.

    >>> alike({"name": "fedda-mvr", "lr": 0.1, "steps": 5}, {"name": "fedda-1-1", "lr": 0.1, "steps": 20})
    True
    """
    return canonical(a | {"steps": 0}) == canonical(b | {"steps": 0})


def canonical(words: dict[str, Any]) -> dict[str, Any]:
    """What an algorithm's table comes to: its name without an alias, and its hyper-parameters.

    >>> canonical({"name": "fedda-1-1", "group": "I = 5", "lr": 0.1})
    {'name': 'fedda-mvr', 'lr': 0.1}
    """
    entry = algorithms.find(words["name"])
    return {"name": entry.alias_of or entry.name} | placed(hyper(words), {})


def plan(path: Path | None = None) -> PartList:
    """The reproduction that comes with fedda, or another one from a file.

    >>> [part.name for part in plan().parts][:4]
    ['pilots', 'femnist-pilots', 'colon-pilots', 'cifar10']
    """
    file = resources.files(__package__) / "parts.toml" if path is None else path
    try:
        text = file.read_text(encoding="utf-8")
        table = tomllib.loads(text)
        parts = tuple(Part(**_tuples(one)) for one in table.pop("parts"))
        for word in ("seeds", "words"):
            table[word] = tuple(table.get(word, ()))
        return PartList(text=text, parts=parts, **table)
    except OSError as why:
        raise ValueError(f"{path}: cannot be read: {why.strerror}") from None
    except (ValueError, KeyError, TypeError) as why:
        raise ValueError(f"{path}: is no plan of a reproduction: {one_line(why)}") from None


def _tuples(table: dict[str, Any]) -> dict[str, Any]:
    return {word: tuple(value) if isinstance(value, list) else value for word, value in table.items()}
