"""The pool of runs: one method each, named by everything it depends on, so that figures share runs.

The folder of a figure is put together from them. A finished run keeps its rows and no checkpoint.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedda.experiments.config import Experiment
from fedda.runs.names import slug
from fedda.runs.reading import read_lines

from .parts import Part, PartList, canonical

DONE, TIMES = "done.json", "times.jsonl"
# Hyper-parameters that are newer than the kept runs, with the value that those runs had: a run with this value keeps
# its old name.
NEWER = {
    "old_point": "server", "eps_mode": "absolute", "kappa": 1.0, "v0": "gradient", "raw_statistics": False,
    "statistics": "batch", "nesterov": False,
}  # fmt: skip


@dataclass(frozen=True)
class PoolRun:
    """One method of a figure as an experiment in its own folder; `label` is its label in the figure."""

    label: str
    experiment: Experiment
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def algorithm(self) -> str:
        return next(iter(self.experiment.algorithms))

    @property
    def rounds(self) -> int:
        """The number of rounds of the finished run, or 0."""
        try:
            return int(json.loads((self.folder / DONE).read_bytes())["rounds"])
        except (OSError, ValueError, LookupError):
            return 0

    @property
    def done(self) -> bool:
        return self.rounds >= self.experiment.rounds

    @property
    def steps(self) -> int:
        """Local steps of each client that takes part."""
        return self.experiment.rounds * int(self.experiment.algorithms[self.algorithm]["steps"])

    def finish(self, rounds: int) -> None:
        """Mark the run as finished and delete its checkpoint."""
        (self.folder / DONE).write_text(json.dumps({"rounds": rounds}) + "\n", encoding="utf-8")
        shutil.rmtree(self.folder / "checkpoint", ignore_errors=True)

    @property
    def failure(self) -> str:
        """Why the run ended early, if it did."""
        try:
            return str(json.loads((self.folder / "failures.json").read_bytes())[self.algorithm])
        except (OSError, KeyError):
            return ""


def read_times(work: Path) -> list[dict[str, Any]]:
    """One row per command and task: what was run, when, and for how long."""
    return [row for _, _, row in read_lines(work / TIMES)]


def winners(work: Path, sweep: str) -> Path | None:
    """The file with a sweep's winners, once the sweep is finished."""
    folder = work / "sweeps" / sweep
    return folder / "best.toml" if (folder / DONE).is_file() else None


def experiments(plan: PartList, part: Part, work: Path) -> Iterator[tuple[Experiment, bool]]:
    """The pilots and figures of a part, and whether their values are known: tuned values need a finished sweep."""
    best = winners(work, part.sweep) if part.sweep else None
    yield from ((plan.pilot(name), True) for name in part.pilots)
    yield from ((plan.figure(part, name, best), best is not None or not part.sweep) for name in part.figures)


def known_experiments(plan: PartList, work: Path) -> list[tuple[Part, Experiment]]:
    """The pilots and figures of all parts whose values are known."""
    return [(part, experiment) for part in plan.parts for experiment, known in experiments(plan, part, work) if known]


def pool_runs(experiment: Experiment, work: Path) -> list[PoolRun]:
    """The runs that make up a completed experiment, in the folder `work`.

    >>> from fedda.experiments import find
    >>> [a, b] = [pool_runs(find(name).completed(), Path("w"))[0] for name in ("digits", "digits-heterogeneous")]
    >>> a.name, a.folder == b.folder  # other seeds
    ('digits-fedda-mvr-...', False)
    """
    runs = []
    for label, table in experiment.algorithms.items():
        method = canonical(table)
        update = {"figure": "", "setting": "", "title": "", "algorithms": {method["name"]: method}}
        single = experiment.model_copy(update=update)
        ignored = {"name", "rounds", "evaluate"}  # a shorter run is the beginning of a longer one
        identity = single.model_dump(exclude=ignored | ({"budget"} if single.budget is None else set()))
        identity["algorithms"] = {method["name"]: {k: v for k, v in method.items() if k not in NEWER or v != NEWER[k]}}
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]
        name = f"{slug(Path(experiment.problem.data).stem)}-{method['name']}-{digest}"
        runs.append(PoolRun(label, single.model_copy(update={"name": name}), work / "runs" / name))
    return runs
