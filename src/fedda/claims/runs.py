"""Which run speaks to which figure, and which of its curves is which method."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from fedda.runs.reading import RecordedRun, kept, read

from ..experiments.config import Experiment, builtin, find
from ..experiments.jobs import MEMORY
from ..problems import options_of
from ..registry import partitions
from .values import MethodValues, known, measure

THEORY = "theory.json"
TITLES = {"cifar10": "CIFAR-10", "femnist": "FEMNIST", "pathmnist": "PathMNIST"}
ALIASES = {"fedda-mvr": "fedda-1-1"}


@dataclass(frozen=True, eq=False)  # a run is itself: arrays have no single truth
class Source:
    """A run and what it can speak to."""

    run: RecordedRun
    name: str
    figure: str
    setting: str
    data: str
    rounds: int
    seeds: int

    @property
    def stand_in(self) -> str | None:
        """What the data are, where they are not those of the figure's built-in experiment."""
        figure = shipped(self.figure)
        if figure is None or self.data == figure.problem.data:
            return None
        return f"{self.data or 'unknown data'}, standing in for {TITLES.get(figure.problem.data, figure.problem.data)}"

    @property
    def place(self) -> str:
        """What the figure is about, in words."""
        if self.stand_in:
            return f"{self.data} for {self.figure}"
        title = TITLES.get(self.data, self.data)
        return f"heterogeneous {title}" if self.figure.endswith("-heterogeneous") else title

    @cached_property
    def ran(self) -> set[str]:
        """The labels, less those that the machine had no memory for."""
        return {label for label in self.run.labels if not self.run.failures.get(label, "").startswith(MEMORY)}

    @cached_property
    def conditions(self) -> dict[str, Any]:
        """What two runs must have in common to be compared: the rounds, the cohort, how replies are averaged, the
        whole problem."""
        config, problem = self.run.config, _table(self.run.config.get("problem"))
        cohort = config.get("cohort") or problem.get("clients")
        how = {"weights": config.get("weights", "uniform"), "aggregation": config.get("aggregation")}
        return {"rounds": self.rounds, "cohort": cohort} | how | dict(problem)

    def differs(self, other: Source, partition: bool = True) -> list[str]:
        """The conditions in which two runs differ, with those of the partition or without."""
        ours, theirs = self.conditions, other.conditions
        apart = [word for word in {**ours, **theirs} if ours.get(word) != theirs.get(word)]
        if partition:
            return apart
        names = {str(found.get("partition")) for found in (ours, theirs)} & set(partitions.entries)
        own = {"partition"}.union(*(options_of(partitions.find(name)) for name in names))
        return [word for word in apart if word not in own]

    @cached_property
    def unfinished(self) -> str:
        """Which method is not at its last round yet, if one is."""
        reached: dict[str, dict[int, int]] = {}
        for row in self.run.rows:
            seeds = reached.setdefault(row["algorithm"], {})
            seeds[row["seed"]] = max(row["round"], seeds.get(row["seed"], 0))
        for label in self.run.labels:
            at = reached.get(label, {})
            last = min(at.values(), default=0) if len(at) >= self.seeds else 0
            if label not in self.run.failures and last < self.rounds:
                return f"{self.name} is unfinished: {label} is at round {last} of {self.rounds}"
        return ""

    @cached_property
    def metrics(self) -> list[str]:
        return known(self.run.rows)

    @property
    def short(self) -> str:
        """That the run is shorter than the experiment of its name, if it is."""
        full = shipped(self.name)
        return f"after {self.rounds} of {full.rounds} rounds" if full and self.rounds < full.rounds else ""

    @cached_property
    def methods(self) -> list[MethodValues]:
        """Every curve of the run with its values."""
        return [method for label in self.run.labels if (method := self.method(label, None)) is not None]

    def method(self, name: str, steps: int | None) -> MethodValues | None:
        """The curve of a method: by its label, else by the algorithm (and local steps) behind the label.

        None where there is none, or several that could be meant, or where the machine failed it.
        """
        label = _label(self.run, name, steps)
        if label is None or self.run.failures.get(label, "").startswith(MEMORY):
            return None
        rows = [row for row in self.run.rows if row["algorithm"] == label]
        found = replace(measure(label, rows, self.rounds, _words(self.run, label), self.metrics), figure=self.figure)
        if label in self.run.failures:
            why = self.run.failures[label].splitlines() or [""]
            return replace(found, values={}, seeds=self.seeds, lost=f"diverged ({why[0][:80]})")
        return found


@cache
def shipped(name: str) -> Experiment | None:
    """The built-in experiment of this name."""
    return find(name) if name in builtin() else None


def _table(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}


def _words(run: RecordedRun, label: str) -> Mapping[str, Any]:
    return _table(_table(run.config.get("algorithms")).get(label))


def _label(run: RecordedRun, name: str, steps: int | None) -> str | None:
    full = name if steps is None else f"{name} ({steps})"
    if full in run.labels:
        return full
    found = [label for label in run.labels if _is(name, steps, label, _words(run, label))]
    return found[0] if len(found) == 1 else None


def _is(name: str, steps: int | None, label: str, words: Mapping[str, Any]) -> bool:
    """Whether the algorithm behind a label is this method; FedDA-MVR comes with the penalty and without."""
    algorithm, wanted = words.get("name", label), name.removesuffix("-l1")
    prox = words.get("prox")
    l1 = isinstance(prox, dict) and prox.get("kind") == "l1"
    same = label == name or ALIASES.get(algorithm, algorithm) == ALIASES.get(wanted, wanted)
    return same and (steps is None or words.get("steps") == steps) and (wanted != "fedda-mvr" or l1 == (name != wanted))


def sources(folders: Iterable[str | Path]) -> tuple[list[Source], dict[str, dict[str, Any]]]:
    """The runs in and below `folders`, and what their `theory.json` say."""
    runs: dict[Path, Source] = {}
    theory: dict[str, dict[str, Any]] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder; give a run folder, or a folder that holds some")
        itself = (folder / "config.toml").is_file() or kept(folder, "metrics.jsonl").is_file()
        below = [folder] if itself else sorted({p.parent for p in folder.rglob("metrics.jsonl*") if p.suffix != ".tmp"})
        # A folder that is being made begins with a dot; a sweep has rows of many settings, and is no result.
        held = [p for p in below if itself or not any(part.startswith(".") for part in p.relative_to(folder).parts)]
        held = [p for p in held if not (p / "sweep.toml").is_file()]
        files = sorted(folder.rglob(THEORY))
        if not held and not files:
            raise ValueError(f"{folder}: holds no run; give a run folder, or a folder that holds some")
        for path in held:
            runs.setdefault(path.resolve(), source(path))
        for file in files:
            theory |= _theory(file)
    return list(runs.values()), theory


def source(folder: str | Path) -> Source:
    """A run folder as a source."""
    run = read(folder)
    data = str(_table(run.config.get("problem")).get("data", ""))
    rounds, seeds = run.config.get("rounds"), run.config.get("seeds")
    return Source(
        run,
        str(run.config.get("name") or run.folder.resolve().name),
        str(run.config.get("figure") or ""),
        str(run.config.get("setting") or ""),
        data,
        rounds if isinstance(rounds, int) else max(row["round"] for row in run.rows),
        len(seeds) if isinstance(seeds, list) else len({row["seed"] for row in run.rows}),
    )


def _theory(path: Path) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(v, dict) and "verdict" in v for v in found.values()):
        raise ValueError(f'{path}: must read {{"C26": {{"verdict": ..., "reason": ...}}, ...}}')
    return found
