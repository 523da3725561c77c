"""Runs of one method each, under a name that says all they depend on: what two figures share is run once.

A figure's folder is put together from them. A run that came to its end keeps its rows and no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedda.experiments.config import Experiment
from fedda.runs.curves import Row
from fedda.runs.names import slug

from .parts import Part, PartList, canonical

DONE = "done.json"
# Words that are younger than the kept runs, and the value that those runs had: a run at this value keeps its old name.
LATER = {"old_point": "server", "eps_mode": "absolute", "kappa": 1.0}


@dataclass(frozen=True)
class PoolRun:
    """One method of an experiment, as an experiment of its own in the folder `place`."""

    label: str
    experiment: Experiment
    place: Path

    @property
    def rounds(self) -> int:
        """The round that the run was asked for and has come to, or 0."""
        try:
            return int(json.loads((self.place / DONE).read_bytes())["rounds"])
        except (OSError, ValueError, LookupError):
            return 0

    @property
    def done(self) -> bool:
        return self.rounds >= self.experiment.rounds

    @property
    def steps(self) -> int:
        """Local steps of every client that takes part."""
        (words,) = self.experiment.algorithms.values()
        return self.experiment.rounds * int(words["steps"])

    def finish(self) -> None:
        """Note that the run is over, and let go of its checkpoint: the rows are what is kept."""
        (self.place / DONE).write_text(json.dumps({"rounds": self.experiment.rounds}) + "\n", encoding="utf-8")
        shutil.rmtree(self.place / "checkpoint", ignore_errors=True)

    def rows(self, name: str) -> Iterator[Row]:
        """The rows of the run up to the last round of the experiment, under the figure's own label."""
        for line in (self.place / name).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["round"] <= self.experiment.rounds:
                yield row | {"algorithm": self.label}

    @property
    def seconds(self) -> float:
        """Seconds spent in rounds, evaluations left out."""
        return spent(self.place)

    @property
    def failure(self) -> str:
        """Why the run ended early, if it did."""
        try:
            return str(next(iter(json.loads((self.place / "failures.json").read_bytes()).values())))
        except (OSError, StopIteration):
            return ""

    @property
    def environment(self) -> dict[str, Any]:
        return dict(json.loads((self.place / "environment.json").read_bytes()))


def spent(place: Path) -> float:
    """Seconds in rounds of all that a folder has run; none where the run ended before there was a folder."""
    file = place / "timings.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    last = {row["algorithm"]: row["seconds"] for row in map(json.loads, filter(str.strip, lines))}
    return float(sum(last.values()))


def winners(work: Path, sweep: str) -> Path | None:
    """The file of a sweep's winners, once it is over."""
    place = work / "sweeps" / sweep
    return place / "best.toml" if (place / DONE).is_file() else None


def experiments(plan: PartList, part: Part, work: Path) -> list[tuple[Experiment, bool]]:
    """The pilots and figures of a part, and whether their values are known: tuned ones are when the sweep is over."""
    best = winners(work, part.sweep) if part.sweep else None
    known = best is not None or not part.sweep
    pilots = [(plan.pilot(name), True) for name in part.pilots]
    return pilots + [(plan.figure(part, name, best), known) for name in part.figures]


def ready(plan: PartList, work: Path) -> Iterator[tuple[Part, Experiment]]:
    """The pilots and figures of all parts whose values are known."""
    for part in plan.parts:
        yield from ((part, experiment) for experiment, known in experiments(plan, part, work) if known)


def entries(experiment: Experiment, work: Path) -> list[PoolRun]:
    """The runs that a completed experiment is made of, in the folder `work`.

    >>> from fedda.experiments import find
    >>> [a, b] = [entries(find(name).completed(), Path("w"))[0] for name in ("digits", "digits-heterogeneous")]
    >>> a.place.name, a.place == b.place  # other seeds
    ('digits-fedda-mvr-...', False)
    """
    found = []
    for label, words in experiment.algorithms.items():
        own = canonical(words)
        one = experiment.model_copy(update={"figure": "", "setting": "", "title": "", "algorithms": {own["name"]: own}})
        without = {"name", "rounds"}  # a shorter run is the beginning of a longer one
        about = one.model_dump(exclude=without | ({"budget"} if one.budget is None else set()))
        about["algorithms"] = {own["name"]: {k: v for k, v in own.items() if k not in LATER or v != LATER[k]}}
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:10]
        name = f"{slug(Path(experiment.problem.data).stem)}-{own['name']}-{key}"
        found.append(PoolRun(label, one.model_copy(update={"name": name}), work / "runs" / name))
    return found
