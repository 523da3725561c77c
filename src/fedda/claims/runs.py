"""Which run belongs to which figure of the paper, and which of its curves is which method."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..runs.names import CONFIG, METRICS, OUT_OF_MEMORY, SWEEP_CONFIG
from ..runs.reading import RecordedRun, kept, read_run
from .statements import figures, key, partial_data, targets
from .values import MethodValues, known, measure

THEORY = "theory.json"
TITLES = {"cifar10": "CIFAR-10", "femnist": "FEMNIST", "pathmnist": "PathMNIST"}
ALIASES = {"fedda-mvr": "fedda-1-1"}
# The keys of [problem] about the shares of clients.
PARTITION = frozenset(("partition", "rho", "alpha", "shards", "labels", "choose"))

Theory = dict[str, dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Source:
    """A run as a source of evidence. Values are computed once per method."""

    run: RecordedRun
    name: str
    figure: str
    setting: str
    data: str
    rounds: int
    seeds: int

    @property
    def replaced(self) -> str:
        """The data of the figure's built-in experiment, if others replace them."""
        data = figures().get(self.figure, {}).get("data", self.data)
        return str(data) if data != self.data else ""

    @property
    def stand_in(self) -> str | None:
        """Which data stand in for those of the paper, in whole or in part."""
        if self.replaced:
            return f"{self.data or 'unknown data'}, standing in for {TITLES.get(self.replaced, self.replaced)}"
        part = partial_data().get(self.data)
        return f"{part}, standing in for {TITLES.get(self.data, self.data)} in part" if part else None

    @property
    def place(self) -> str:
        """The data of the figure as text."""
        if self.replaced:
            return f"{self.data} for {self.figure}"
        title = TITLES.get(self.data, self.data)
        return f"heterogeneous {title}" if self.figure.endswith("-heterogeneous") else title

    @cached_property
    def ran(self) -> set[str]:
        """The labels, except those that ran out of memory."""
        return {label for label in self.run.labels if not self.run.failures.get(label, "").startswith(OUT_OF_MEMORY)}

    @cached_property
    def conditions(self) -> dict[str, Any]:
        """What comparable runs have in common: rounds, cohort, aggregation and the whole problem."""
        config, problem = self.run.config, self.run.table("problem")
        return {
            "rounds": self.rounds,
            "cohort": config.get("cohort") or problem.get("clients"),
            "weights": config.get("weights", "uniform"),
            "aggregation": config.get("aggregation"),
            **problem,
        }

    def differs(self, other: Source, partition: bool = True) -> list[str]:
        """The conditions in which two runs differ, with or without those of the partition."""
        ours, theirs = self.conditions, other.conditions
        different = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        return different if partition else [key for key in different if key not in PARTITION]

    @cached_property
    def unfinished(self) -> str:
        """Which method has not reached its last round, if one has not."""
        for label in self.run.labels:
            last: dict[int, int] = {}
            for row in self.run.rows_of(label):
                last[row["seed"]] = max(row["round"], last.get(row["seed"], 0))
            reached = min(last.values(), default=0) if len(last) >= self.seeds else 0
            if label not in self.run.failures and reached < self.rounds:
                return f"{self.name} is unfinished: {label} is at round {reached} of {self.rounds}"
        return ""

    @property
    def short(self) -> str:
        """A remark if the run has fewer rounds than the built-in experiment of its name."""
        full = figures().get(self.name, {}).get("rounds", 0)
        return f"after {self.rounds} of {full} rounds" if self.rounds < full else ""

    @cached_property
    def by_label(self) -> dict[str, MethodValues]:
        """Every curve of the run with its values."""
        metrics = known(self.run.rows)
        return {label: self._values(label, metrics) for label in self.run.labels if label in self.ran}

    @property
    def methods(self) -> list[MethodValues]:
        return list(self.by_label.values())

    def method(self, name: str, steps: int | None) -> MethodValues | None:
        """The curve of a method, by its label, else by the algorithm (and local steps) of the label.

        None if no curve or several match, or if it ran out of memory.
        """
        full = key(name, steps)
        matches = [label for label in self.run.labels if _is(name, steps, label, self.run.params(label))]
        label = full if full in self.run.labels else matches[0] if len(matches) == 1 else ""
        return self.by_label.get(label)

    def _values(self, label: str, metrics: list[str]) -> MethodValues:
        rows, params = self.run.rows_of(label), self.run.params(label)
        full = self.conditions["cohort"] == self.conditions.get("clients")
        values = measure(label, rows, self.rounds, params, metrics, targets().get(self.data))
        values = replace(values, figure=self.figure, full=full, short=bool(self.short))
        if label in self.run.failures:
            why = self.run.failures[label].splitlines() or [""]
            values = replace(values, values={}, best={}, seeds=self.seeds, lost=f"diverged ({why[0][:80]})")
        return values


def _is(name: str, steps: int | None, label: str, params: Mapping[str, Any]) -> bool:
    """Whether the algorithm of a label is this method; FedDA-MVR exists with and without the penalty."""
    algorithm, wanted = params.get("name", label), name.removesuffix("-l1")
    prox = params.get("prox")
    l1 = isinstance(prox, dict) and prox.get("kind") == "l1"
    same = label == name or ALIASES.get(algorithm, algorithm) == ALIASES.get(wanted, wanted)
    same = same and (steps is None or params.get("steps") == steps)
    return same and (wanted != "fedda-mvr" or l1 == (name != wanted))


def sources(places: Iterable[str | Path | RecordedRun | Source]) -> tuple[list[Source], Theory]:
    """The runs in and below folders, or runs that were read already, and the content of every `theory.json`."""
    runs: dict[Path, Source] = {}
    theory: Theory = {}
    for place in places:
        if isinstance(place, Source | RecordedRun):
            one = place if isinstance(place, Source) else source(place)
            runs.setdefault(one.run.folder.resolve(), one)
            continue
        folder = Path(place)
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder; give a run folder, or a folder that holds some")
        itself = (folder / CONFIG).is_file() or kept(folder, METRICS).is_file()
        below = [folder] if itself else sorted({p.parent for p in folder.rglob(f"{METRICS}*") if p.suffix != ".tmp"})
        # A folder under construction begins with a dot. A sweep has rows of many settings and is not a result.
        held = [p for p in below if itself or not any(part.startswith(".") for part in p.relative_to(folder).parts)]
        held = [p for p in held if not (p / SWEEP_CONFIG).is_file()]
        files = sorted(folder.rglob(THEORY))
        if not held and not files:
            raise ValueError(f"{folder}: holds no run; give a run folder, or a folder that holds some")
        for path in held:
            if path.resolve() not in runs:
                runs[path.resolve()] = source(path)
        for file in files:
            theory |= _theory(file)
    return list(runs.values()), theory


def source(place: str | Path | RecordedRun) -> Source:
    """A run, or a folder that holds one, as a source."""
    run = place if isinstance(place, RecordedRun) else read_run(place)
    rounds, seeds = run.config.get("rounds"), run.config.get("seeds")
    return Source(
        run,
        str(run.config.get("name") or run.folder.resolve().name),
        str(run.config.get("figure") or ""),
        str(run.config.get("setting") or ""),
        str(run.table("problem").get("data", "")),
        rounds if isinstance(rounds, int) else max(row["round"] for row in run.rows),
        len(seeds) if isinstance(seeds, list) else len({row["seed"] for row in run.rows}),
    )


def _theory(path: Path) -> Theory:
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict) or not all(isinstance(v, dict) and "verdict" in v for v in content.values()):
        raise ValueError(f'{path}: must read {{"C26": {{"verdict": ..., "reason": ...}}, ...}}')
    return content
