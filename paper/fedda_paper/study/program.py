"""Some points of one method on one partition, as replicas of one program."""

import math
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import fedda
from fedda.engines import Vectorised
from fedda.experiments import find
from fedda.rules.schedules import SMALLEST_SHARE
from fedda.run import Run
from fedda.training import timed

from .methods import Point, StudyMethod, first_rate

VALIDATION = 0.1  # of each client's training samples
NONZERO = "nonzero"  # the share of the weights that are not exactly 0
ALL = ("validation_accuracy", "validation_loss", "train_accuracy", "train_loss", "test_accuracy", "test_loss")


@dataclass(frozen=True)
class How:
    """Where and how programs are run."""

    task: str  # a built-in experiment or a TOML file: its data, model, clients and cohort
    device: str | None = None
    precision: str = "auto"
    command: str = ""
    commit: str = ""


@dataclass(frozen=True)
class StudyProgram:
    """`points` run from one seed, which is also the seed of the partition."""

    method: StudyMethod
    stage: str
    seed: int
    points: list[Point]
    rounds: int
    every: int


@dataclass(frozen=True)
class CosineRate:
    """eta_t = lr where `falls` is 0, and lr (1 + cos(pi t / total)) / 2 where it is 1. With a warm-up, all this follows
    a rise from 0 in a straight line.

    >>> CosineRate(0.1, 1.0, 20)(torch.tensor([0.0, 10.0, 20.0]))
    tensor([0.1000, 0.0500, 0.0000])
    """

    lr: Any
    falls: Any
    total: float
    warmup: float = 0.0

    def __call__(self, t: torch.Tensor) -> Any:
        if self.warmup:
            rise = self.warmup * self.total
            after = CosineRate(self.lr, self.falls, self.total - rise)((t - rise).clamp(min=0))
            return after * (t / rise).clamp(SMALLEST_SHARE, 1)
        return self.lr * (1 - self.falls * (1 - torch.cos(math.pi * t / self.total)) / 2)


def algorithm(method: StudyMethod, points: list[Point], rounds: int) -> Any:
    """One algorithm for all points: its numbers are tensors [points, 1, 1]."""
    words = dict(method.words)
    for word in points[0]:
        column = [point[word] == "cosine" if word == "schedule" else point[word] for point in points]
        words[word] = torch.tensor(column, dtype=torch.float64).view(-1, 1, 1)
    if "schedule" in words:
        rate, steps = method.rate, rounds * words.get("steps", 5)
        words[rate] = CosineRate(words[rate], words.pop("schedule"), steps, words.pop("warmup", 0.0))
    if "alpha0" in words:
        words["c"] = words.pop("alpha0") / first_rate(words["lr"], words["w"]) ** 2
    if "gamma" in words:
        words["prox"] = fedda.prox.L1(words.pop("gamma"))
    return fedda.make(method.algorithm or method.name, **words)


@lru_cache(maxsize=8)
def problem(task: str, device: str | None, partition: int, tuning: bool) -> Any:
    """The task on a partition; for tuning without its test set."""
    table = find(task).problem.model_copy(update={"seed": partition, "validation": VALIDATION})
    built = table.build(tuning).to(device)
    built.metrics = built.sample_metrics = {}  # the rules use losses and accuracies alone; others take time on text
    return built


def run(how: How, program: StudyProgram) -> list[dict[str, Any]]:
    """A record for each point: what it was, what it came to at every evaluation, and how it was run."""
    began, tuning = time.perf_counter(), program.stage != "finals"
    experiment = find(how.task)
    made = algorithm(program.method, program.points, program.rounds)
    on = problem(how.task, how.device, program.seed, tuning)
    classes = on.data.y.dim() == 1  # else there is no accuracy
    # Of text, evaluating the training samples would take longer than training on them.
    train = classes and not tuning and not program.method.once
    columns = [
        name
        for name in ALL
        if (classes or "accuracy" not in name) and (train or "train" not in name) and not (tuning and "test" in name)
    ]
    limited = {"limit": program.method.limit} if program.method.limit < 1 else {}
    columns += [NONZERO] if limited else []
    rows: list[list[list[float]]] = [[] for _ in program.points]
    diverged = [False] * len(rows)
    seconds = 0.0
    this = Run(
        made, on, cohort=experiment.cohort, seed=[program.seed] * len(rows), weights=experiment.weights, force=True,
        engine=Vectorised(precision=how.precision),
    )  # fmt: skip
    try:
        for spent in timed(this, program.rounds, program.every):
            seconds = spent
            diverged = this.ended.reshape(-1).tolist()
            if all(diverged):
                break
            for found, own in zip(this.evaluate() if train else held_out(this, columns), rows, strict=True):
                own.append([this.round, *(digits(found[name]) for name in columns)])
    except fedda.Diverged:
        diverged = [True] * len(rows)
    paths = this.problem.gradient_paths
    counts = asdict(this.counts) if this.round else {}
    return [
        {
            "method": program.method.name, "stage": program.stage, "point": point, "seed": program.seed,
            "partition": program.seed, "rounds": program.rounds,
            "diverged": over or not all(map(finite, own)),
            "columns": ["round", *columns], "rows": list(filter(finite, own)),
            "words": program.method.words, "task": Path(how.task).stem, "validation": VALIDATION, **limited,
            "gradients": counts.get("gradients"), "bytes_up": counts.get("bytes_up"),
            "bytes_down": counts.get("bytes_down"),
            "device": on.device.type if on.device.type == "cpu" else torch.cuda.get_device_name(on.device),
            "precision": paths.precision, "path": paths.chosen,
            "replicas": len(rows), "seconds": round(seconds, 2), "wall": round(time.perf_counter() - began, 2),
            "torch": torch.__version__, "commit": how.commit, "command": how.command,
        }
        for point, own, over in zip(program.points, rows, diverged, strict=True)
    ]  # fmt: skip


@torch.no_grad()
def held_out(this: Run, columns: list[str]) -> list[dict[str, float]]:
    """The metrics on the validation samples of each replica, and on the test samples if it has some. The training
    samples, nine times as many, are left out."""
    on: Any = this.problem
    totals = on.totals(this.server.x.squeeze(-2), this.simulation.weights, lambda n: slice(0, n * (n != on.clients)))
    found = {name: (totals[name][0] / totals[name][1]).tolist() for name in columns if name != NONZERO}
    found[NONZERO] = (this.server.x != 0).double().mean(dim=(-2, -1)).reshape(-1).tolist()
    return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]


def finite(row: list[float]) -> bool:
    return all(map(math.isfinite, row))


def digits(value: float) -> float:
    return float(f"{value:.5g}")
