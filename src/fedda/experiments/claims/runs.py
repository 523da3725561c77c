"""Which run speaks to which figure, and which of its curves is which method."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedda.report.read import Run, read

from ..config import builtin, find
from ..jobs import MEMORY
from .values import Method, known, measure

THEORY = "theory.json"
TITLES = {"cifar10": "CIFAR-10", "femnist": "FEMNIST", "pathmnist": "PathMNIST"}
ALIASES = {"fedda-mvr": "fedda-1-1"}


@dataclass(frozen=True, eq=False)  # a run is itself: arrays have no single truth
class Source:
    """A run and what it can speak to."""

    run: Run
    name: str
    figure: str
    setting: str
    data: str
    rounds: int
    seeds: int

    @property
    def stand_in(self) -> str | None:
        """What the data are, where they are not the figure's own."""
        own = self.figure.split("-")[0]
        if self.name == self.figure or self.data.replace("-", "") == own:
            return None
        return f"{self.data}, standing in for {TITLES.get(own, own)}"

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
        full = find(self.name).rounds if self.name in builtin() else 0
        return f"after {self.rounds} rounds of the {full} of {self.name}" if self.rounds < full else ""

    def method(self, name: str, steps: int | None) -> Method | None:
        """The curve of a method: by its label, else by the algorithm (and local steps) behind the label.

        None where there is none, or several that could be meant, or where the machine failed it.
        """
        label = _label(self.run, name, steps)
        if label is None or self.run.failures.get(label, "").startswith(MEMORY):
            return None
        rows = [row for row in self.run.rows if row["algorithm"] == label]
        found = measure(label, rows, self.rounds, _words(self.run, label), self.metrics)
        if label in self.run.failures:
            why = self.run.failures[label].splitlines() or [""]
            return Method(label, {}, self.seeds, f"diverged ({why[0][:80]})", found.words, found.rows, self.rounds)
        return found


def _words(run: Run, label: str) -> dict[str, Any]:
    tables = run.config.get("algorithms")
    words = tables.get(label) if isinstance(tables, dict) else None
    return words if isinstance(words, dict) else {}


def _label(run: Run, name: str, steps: int | None) -> str | None:
    full = name if steps is None else f"{name} ({steps})"
    if full in run.labels:
        return full
    found = [label for label in run.labels if _is(name, steps, label, _words(run, label))]
    return found[0] if len(found) == 1 else None


def _is(name: str, steps: int | None, label: str, words: dict[str, Any]) -> bool:
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
        itself = (folder / "config.toml").is_file() or (folder / "metrics.jsonl").is_file()
        below = [folder] if itself else sorted({p.parent for p in folder.rglob("metrics.jsonl")})
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
    problem = run.config.get("problem")
    data = str(problem.get("data", "")) if isinstance(problem, dict) else ""
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
