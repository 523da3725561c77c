"""What the parts come to in runs, local steps and, on the device they were planned for, seconds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedda.experiments.config import Experiment, read

from .parts import Part, PartList
from .pool import DONE, PoolRun, entries, experiments, winners

TIMES = "times.jsonl"
# Measured on one H200: the paper's CNN on CIFAR-10, 10 clients, batch 16, five seeds as replicas; seconds a local step
# with one gradient, and with two.
STEP = {"tf32": (0.2168e-3 * 3.10, 0.3419e-3 * 3.72), "bf16": (0.1409e-3 * 2.79, 0.2159e-3 * 3.39)}
TWICE = ("fedda-mvr", "fedda-1-2", "stem", "mime-mvr")  # methods with two gradients a step
IMAGE = 20e-3 / 60_000  # seconds to evaluate one model on one image
START = 1.0  # seconds until a run's rounds are captured
# (work of an image beside CIFAR-10's under the paper's CNN for it, images that an evaluation looks at)
DATA = {"cifar10": (1.0, 60_000), "femnist": (0.7, 52_000), "colon": (0.21, 9_900), "pathmnist": (0.21, 97_000)}


@dataclass(frozen=True)
class Speeds:
    """Seconds a step, by the figures above and by what was run here."""

    step: tuple[float, float]
    seen: dict[str, float]


@dataclass
class Estimate:
    """A part in the plan."""

    part: str
    runs: int = 0
    done: int = 0
    steps: int = 0
    seconds: float = 0.0  # of what is left


def lines(plan: PartList, parts: list[Part], work: Path, precision: str = "auto") -> list[Estimate]:
    """The parts with what is left of each; what an earlier part has run is not run again.

    >>> from .parts import plan
    >>> found = lines(plan(), plan().chosen(["cifar10", "variants"]), Path("nowhere"))
    >>> [(line.part, line.runs, line.steps) for line in found]
    [('cifar10', 8, 160000), ('variants', 3, 60000)]
    """
    seen: set[Any] = set()
    here, found = measured(work), []
    for part in parts:
        step = STEP.get(part.precision or precision, STEP["tf32"])
        found.append(_line(plan, part, work, seen, Speeds(step, here)))
    return found


def _line(plan: PartList, part: Part, work: Path, seen: set[Any], known: Speeds) -> Estimate:
    line = Estimate(part.name)
    for name in part.sweeps:
        asked, whole = plan.search(name), plan.searched(name)
        points = len(plan.sweeps[name]["rates"])
        for entry in entries(asked.experiment, work):
            line.runs += 1
            done = winners(work, name) is not None
            _add(line, entry, points * len(whole.seeds), done, known)
    for experiment, settled in experiments(plan, part, work):
        for entry in entries(experiment, work):
            key = entry.place.name if settled else (part.setting, entry.place.name)
            if key not in seen:
                seen.add(key)
                line.runs += 1
                _add(line, entry, len(experiment.seeds), settled and entry.done, known)
    return line


def _add(line: Estimate, entry: PoolRun, replicas: int, done: bool, known: Speeds) -> None:
    line.steps += entry.steps
    line.done += done
    line.seconds += 0.0 if done else seconds(entry, replicas, known)


def seconds(entry: PoolRun, replicas: int, known: Speeds) -> float:
    """What a run takes: by a run of its kind in the same folder where there is one, else by the figures above."""
    e = entry.experiment
    (name,) = e.algorithms
    if (key := kind(e)) in known.seen:
        return known.seen[key] * entry.steps * replicas
    share, images = DATA.get(e.problem.data, (1.0, 60_000))
    work = share * (e.cohort or 10) / 10 * e.problem.batch / 16 * replicas / 5
    evaluations = e.rounds // (e.every or 1) + 1
    rounds = known.step[name in TWICE] * work * entry.steps
    return START + rounds + evaluations * replicas * images * share * IMAGE


def measured(work: Path) -> dict[str, float]:
    """Seconds a local step and replica of the runs that are done, evaluations and all, by their kind.

    Where several processes shared the device, all of them are taken to go on as they did.
    """
    walls: dict[str, float] = {}
    rows = times(work)
    for row in rows:
        if row["kind"] == "run":
            walls[row["name"]] = walls.get(row["name"], 0.0) + row["wall"]
    together = covered((row["began"], row["wall"]) for row in rows) / (sum(row["wall"] for row in rows) or 1.0)
    found = {}
    for name, wall in walls.items():
        place = work / "runs" / name
        if (place / DONE).is_file() and not (place / "failures.json").is_file():
            e = read(place / "config.toml")
            (words,) = e.algorithms.values()
            found[kind(e)] = together * wall / (e.rounds * words["steps"] * len(e.seeds))
    return found


def kind(experiment: Experiment) -> str:
    """Runs of one kind take as long a step."""
    p = experiment.problem
    shape = [p.data, p.model, p.batch, p.model_extra, experiment.cohort]
    return json.dumps([*shape, list(experiment.algorithms), len(experiment.seeds), experiment.every], sort_keys=True)


def times(work: Path) -> list[dict[str, Any]]:
    """What was run by which command, and how long it took."""
    file = work / TIMES
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The seconds in which something went on, of spans (beginning, seconds) that may overlap.

    >>> covered([(0.0, 10.0), (5.0, 10.0), (20.0, 1.0)])
    16.0
    """
    total, until = 0.0, -math.inf
    for began, seconds in sorted(spans):
        total += max(0.0, began + seconds - max(began, until))
        until = max(until, began + seconds)
    return total
