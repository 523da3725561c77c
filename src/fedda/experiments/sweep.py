"""A search for hyper-parameters: every point of a grid a replica of one program, judged on a validation split."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..problems.gradients.tuning import threads as so_many_threads
from ..registry import make
from ..run import Run
from ..runs.final_values import mean, tail
from ..runs.folder import Folder
from ..runs.toml import dumps
from .config import Experiment, hyper, owned
from .execution import agreed
from .grid import Point, placed, points
from .jobs import MEMORY, Job, Progress, Work
from .ranks import SINGLE, Ranks, folder_of
from .runner import built, environment, started

METRICS = {
    "validation_accuracy": "higher",
    "validation_loss": "lower",
    "train_accuracy": "higher",
    "train_loss": "lower",
    "objective": "lower",
}


@dataclass(frozen=True)
class Sweep:
    """What is searched, and what the best is best in."""

    experiment: Experiment
    grids: list[str]
    budget: int | None = None
    metric: str = "validation_accuracy"
    draw: int = 0  # the seed of a random search
    force: bool = False  # let a point win whose first rate `fedda run` would refuse

    def __post_init__(self) -> None:
        checks.one_of("--metric", "a metric", self.metric, METRICS)
        if self.budget is not None:
            checks.count("sweep", "budget", self.budget, at_most=10_000)
        if self.draw < 0:
            raise ValueError(f"--draw must be a whole number >= 0, got {self.draw}")

    def toml(self) -> str:
        words = {"grid": self.grids, "budget": self.budget, "metric": self.metric, "draw": self.draw}
        return dumps(words)


@dataclass(frozen=True)
class Program:
    """The points of one algorithm that fit in one program: they differ in numbers, not in shapes."""

    label: str
    key: str  # the label in the rows and checkpoints
    points: list[Point]
    numbers: list[int]  # of the points, among those of the algorithm


def search(
    sweep: Sweep,
    out: Path,
    watch: Progress,
    engine: str = "auto",
    device: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    save_seconds: float = 5.0,
    threads: int | None = None,
    precision: str = "auto",
    problem: Any = None,
    ranks: Ranks = SINGLE,
) -> dict[str, Any]:
    """Run the sweep into the folder `out`: sweep.json says what every point came to, best.toml holds the winners."""
    folder, engine = folder_of(out, ranks.world), ranks.engine(engine)
    if not resume and not overwrite:
        folder.refuse_if_taken()
    whole = sweep.experiment.completed()
    chosen = points(whole, sweep.grids, sweep.budget, sweep.draw)
    experiment = whole.model_copy(update={"algorithms": {label: whole.algorithms[label] for label in chosen}})
    files = {"config.toml": experiment.toml(), "sweep.toml": sweep.toml()}
    if resume and not ranks.world.rank:
        _refuse_other(folder, files)
    parts = list(programs(experiment, chosen))
    seeds = experiment.seeds
    problem = built(experiment, device, validation=True, ranks=ranks) if problem is None else problem
    clients, replicas = experiment.cohort or problem.clients, max(len(p.points) for p in parts) * len(seeds)
    choices = agreed(ranks.world, problem, engine, clients, replicas, threads, precision, out if resume else None)
    how = choices.engine(engine)

    absurd: dict[str, set[int]] = {}  # program -> points that begin with a step that a run would refuse

    def start(part: Program, state: dict[str, Tensor] | None) -> Run:
        with owned(f"{experiment.name}: {part.label}"):
            algorithm = stacked(experiment.algorithms[part.label], part.points, len(seeds))
        # Refused one by one, below: the other points of the program are good.
        every = seeds * len(part.points)
        run = started(experiment, part.label, algorithm, problem, every, state, ranks, engine=how, force=True)
        if state is None:
            absurd[part.key] = {part.numbers[i // len(seeds)] for i in run.absurd.nonzero().flatten().tolist()}
        return run

    def row(part: Program, replica: int, found: dict[str, Any]) -> dict[str, Any]:
        number = replica // len(seeds)
        return {"point": part.numbers[number], **{k.replace("test_", "validation_"): v for k, v in found.items()}}

    jobs = [Job(part.key, partial(start, part), partial(row, part)) for part in parts]
    work = Work(experiment, folder, watch, save_seconds, ranks.world)

    def look(job: Job, run: Run) -> None:
        (first, *_) = (job.row(0, row) for row in run.evaluate())
        if sweep.metric not in first:
            raise ValueError(f"--metric: {job.label} has no {sweep.metric!r} on this problem")

    with so_many_threads(choices.threads):
        work.try_out(jobs, look)
        work.do(jobs, resume, files | {"environment.json": environment(problem, engine, choices, ranks.world)})
    if ranks.world.rank:
        return {}
    found = judged(sweep, experiment, parts, folder.path, {} if sweep.force else absurd, folder.failures)
    folder.write("sweep.json", json.dumps(found, indent=1) + "\n")
    folder.write("best.toml", winners(sweep, experiment, found))
    return found


def programs(experiment: Experiment, chosen: dict[str, list[Point]]) -> Iterator[Program]:
    """The points by what can be stacked: fractions can, words, switches and numbers of steps cannot."""
    for label, some in chosen.items():
        groups: dict[str, list[int]] = {}
        for number, point in enumerate(some):
            fixed = {word: value for word, value in point.items() if not stackable(value)}
            groups.setdefault(repr(sorted(fixed.items())), []).append(number)
        for i, numbers in enumerate(groups.values()):
            key = label if len(groups) == 1 else f"{label} #{i + 1}"
            yield Program(label, key, [some[n] for n in numbers], numbers)


def stackable(value: Any) -> bool:
    return isinstance(value, float)


def stacked(words: dict[str, Any], some: list[Point], seeds: int) -> Any:
    """One algorithm for all the points: its numbers are tensors [points x seeds, 1, 1]."""
    point: Point = {}
    for word, value in some[0].items():
        column = [p[word] for p in some for _ in range(seeds)]
        point[word] = torch.tensor(column, dtype=torch.float64).view(-1, 1, 1) if stackable(value) else value
    for one in some:  # a mistake in one point is said as such, not of a tensor
        make(words["name"], **placed(hyper(words), one))
    return make(words["name"], **placed(hyper(words), point))


def judged(
    sweep: Sweep,
    experiment: Experiment,
    parts: list[Program],
    path: Path,
    absurd: dict[str, set[int]],
    failures: dict[str, str],
) -> dict[str, Any]:
    """What every point came to: the metric's mean over the last 5 % of the rounds, then over the seeds."""
    rows: dict[tuple[str, int], dict[int, list[dict[str, Any]]]] = {}
    for row in map(json.loads, filter(str.strip, (path / "metrics.jsonl").read_text().splitlines())):
        rows.setdefault((row["algorithm"], row["point"]), {}).setdefault(row["seed"], []).append(row)
    tables: dict[str, Any] = {}
    for part in parts:
        table = tables.setdefault(part.label, {"words": list(part.points[0]), "points": []})
        for number, point in zip(part.numbers, part.points, strict=True):
            own = rows.get((part.key, number), {})
            each = [mean(tail(one, experiment.rounds), sweep.metric) for one in own.values()]
            # A point that ended before the last round has no value, whatever it had on the way.
            ended = any(one[-1]["round"] < experiment.rounds for one in own.values())
            fine = len(each) == len(experiment.seeds) and all(map(math.isfinite, each)) and not ended
            note = None if fine else "out of memory" if failures.get(part.key, "").startswith(MEMORY) else "diverged"
            if number in absurd.get(part.key, ()):
                fine, note = False, "refused: its first rate is absurd"
            table["points"].append({
                "values": point,
                "value": statistics.fmean(each) if fine else None,
                "std": statistics.stdev(each) if fine and len(each) > 1 else None,
                "seeds": len(each),
                "note": note,
                "best": False,
                "gradients": max((one[-1]["gradients"] for one in own.values()), default=None),
            })  # fmt: skip
    better = METRICS[sweep.metric]
    for table in tables.values():
        alive = [row for row in table["points"] if row["value"] is not None]
        if alive:
            (max if better == "higher" else min)(alive, key=lambda row: row["value"])["best"] = True
    return {
        "metric": sweep.metric, "better": better, "rounds": experiment.rounds, "seeds": experiment.seeds,
        "budget": len(next(iter(tables.values()))["points"]), "algorithms": tables,
    }  # fmt: skip


def winners(sweep: Sweep, experiment: Experiment, found: dict[str, Any]) -> str:
    """The best point of every algorithm, as a preset file."""
    best = {}
    for label, table in found["algorithms"].items():
        for row in table["points"]:
            if row["best"]:
                words = placed(hyper(experiment.algorithms[label]), row["values"])
                best[label] = {word.partition(".")[0]: words[word.partition(".")[0]] for word in row["values"]}
    about = f"the best {sweep.metric} of {found['budget']} points each, {experiment.rounds} rounds of {experiment.name}"
    return f"# {about}\n{dumps(best) if best else ''}"


def _refuse_other(folder: Folder, files: dict[str, str]) -> None:
    if not folder.holds_run:
        raise ValueError(f"{folder.path}: holds no sweep to go on with; leave out --resume to begin one")
    for name, text in files.items():
        there = folder.path / name
        if not there.exists() or there.read_text() != text:
            raise ValueError(f"{folder.path}: was begun with another {name}; give the same words, or another --out")
