"""A search for hyper-parameters: the points of a grid are replicas of one program, judged on a validation split."""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..checks import warn
from ..registry import RATES, make
from ..run import Run
from ..runs.final_values import mean, tail
from ..runs.folder import Folder
from ..runs.metrics import metric, validation_metric
from ..runs.names import BEST, CONFIG, METRICS, OUT_OF_MEMORY, SWEEP, SWEEP_CONFIG
from ..runs.reading import read_rows
from ..runs.toml import dumps
from .config import Experiment, errors_named, hyper_params
from .grid import Point, apply_point, points
from .jobs import Job, Watcher
from .runner import Program, RunOptions


@dataclass(frozen=True)
class Sweep:
    """What is searched, and by which metric."""

    experiment: Experiment
    grids: list[str]
    budget: int | None = None
    metric: str | None = None  # the validation accuracy, or the validation loss if there are no classes
    draw: int = 0  # the seed of a random search
    force: bool = False  # accept a point whose first step size `fedda run` would refuse

    def __post_init__(self) -> None:
        if self.budget is not None:
            checks.count("sweep", "budget", self.budget, at_most=10_000)
        if self.draw < 0:
            raise ValueError(f"--draw must be a whole number >= 0, got {self.draw}")

    def toml(self) -> str:
        return dumps({"grid": self.grids, "budget": self.budget, "metric": self.metric, "draw": self.draw})


@dataclass(frozen=True)
class Stack:
    """The points of one algorithm that run as one program: they differ in numbers, not in shapes."""

    label: str
    key: str  # the label in the rows and checkpoints
    points: list[Point]
    numbers: list[int]  # indices of the points among those of the algorithm


def search(sweep: Sweep, out: Path, watch: Watcher, **options: Any) -> dict[str, Any]:
    """Run the sweep into the folder `out`: sweep.json has the value of every point, best.toml the winners.

    The options are those of `RunOptions`; the result is the content of sweep.json.
    """
    run_options = RunOptions(**options)
    folder = run_options.folder(out)
    whole = sweep.experiment.completed()
    chosen = points(whole, sweep.grids, sweep.budget, sweep.draw)
    experiment = whole.model_copy(update={"algorithms": {label: whole.algorithms[label] for label in chosen}})
    if experiment.personalise is not None:
        warn("a sweep ignores personalise: it has no rows of clients")
        experiment = experiment.model_copy(update={"personalise": None})
    stacks, seeds = list(stack_points(chosen)), experiment.seeds
    replicas = max(len(stack.points) for stack in stacks) * len(seeds)
    program = Program(experiment, folder, run_options, replicas, tuning=True)
    experiment = program.plan_evaluations(sweep.experiment.every)
    sweep = replace(sweep, metric=judged_by(sweep.metric, program.problem))
    files = {CONFIG: experiment.toml(), SWEEP_CONFIG: sweep.toml()}
    if run_options.resume and not run_options.ranks.world.rank:
        _refuse_other(folder, files)
    absurd: dict[str, set[int]] = {}  # key of a stack -> points whose first step size a run would refuse

    def start(stack: Stack, state: dict[str, Tensor] | None) -> Run:
        with errors_named(f"{experiment.name}: {stack.label}"):
            algorithm = stacked(experiment.algorithms[stack.label], stack.points, len(seeds))
        # Forced: absurd points are refused one by one, below, because the others are good.
        own_seeds = seeds * len(stack.points)  # of each replica
        run = program.start(stack.label, algorithm, own_seeds, state, force=True)
        with errors_named(f"{experiment.name}: {stack.label}"):
            run.set_patience(experiment.patience, experiment.metric, len(own_seeds), state)
        if state is None:
            absurd[stack.key] = {stack.numbers[i // len(seeds)] for i in run.absurd.nonzero().flatten().tolist()}
        return run

    def row(stack: Stack, replica: int, values: dict[str, Any]) -> dict[str, Any]:
        number = stack.numbers[replica // len(seeds)]
        return {"point": number, **{k.replace("test_", "validation_"): v for k, v in values.items()}}

    def refuse_metric(job: Job, run: Run) -> None:
        (first, *_) = (job.row(0, row) for row in run.evaluate())
        if sweep.metric not in first:
            raise ValueError(f"--metric: {job.label} has no {sweep.metric!r} on this problem")

    jobs = [Job(stack.key, partial(start, stack), partial(row, stack)) for stack in stacks]
    program.run(jobs, watch, files, inspect=refuse_metric)
    if run_options.ranks.world.rank:
        return {}
    refused = {} if sweep.force else absurd
    directions = program.problem.directions
    results = judge_points(sweep, experiment, stacks, folder.path, refused, folder.failures, directions)
    folder.write(SWEEP, json.dumps(results, indent=1) + "\n")
    folder.write(BEST, winners(sweep, experiment, results))
    return results


def judged_by(wanted: str | None, problem: Any) -> str:
    """The metric of a sweep on this problem, whose test samples are those of validation; "f1" is validation_f1."""
    names = problem.metric_names("test") or problem.metric_names("validation")
    known = {f"{part}_{name}" for part in ("validation", "train") for name in names}
    default = validation_metric(known) or "train_loss"
    if wanted is None:
        return default
    wanted = f"validation_{wanted}" if wanted in names else wanted
    checks.one_of("--metric", "a metric", wanted, dict.fromkeys([default, *sorted(known), "objective"]))
    return wanted


def stack_points(chosen: dict[str, list[Point]]) -> Iterator[Stack]:
    """Group the points of each algorithm: floats can differ within a stack; texts, switches and steps cannot."""
    for label, tried in chosen.items():
        groups: dict[str, list[int]] = {}
        for number, point in enumerate(tried):
            fixed = {name: value for name, value in point.items() if not stackable(name, value)}
            groups.setdefault(repr(sorted(fixed.items())), []).append(number)
        for i, numbers in enumerate(groups.values()):
            key = label if len(groups) == 1 else f"{label} #{i + 1}"
            yield Stack(label, key, [tried[n] for n in numbers], numbers)


def stackable(name: str, value: Any) -> bool:
    """Whether points with different values can run as one program. Epochs decide the number of steps, and the parts of
    a schedule but its start are numbers, not tensors."""
    first, _, last = name.rpartition(".")
    return isinstance(value, float) and name != "epochs" and (first not in RATES or last == "start")


def stacked(params: dict[str, Any], points: list[Point], seeds: int) -> Any:
    """One algorithm for all points: its numbers are tensors [points x seeds, 1, 1]."""
    stack: Point = {}
    for name, value in points[0].items():
        column = [point[name] for point in points for _ in range(seeds)]
        tensor = stackable(name, value)
        stack[name] = torch.tensor(column, dtype=torch.float64).view(-1, 1, 1) if tensor else value
    for point in points:  # a mistake is reported for the point, not for a tensor
        make(params["name"], **apply_point(hyper_params(params), point))
    return make(params["name"], **apply_point(hyper_params(params), stack))


def judge_points(
    sweep: Sweep, experiment: Experiment, stacks: list[Stack], path: Path, absurd: dict[str, set[int]],
    failures: dict[str, str], directions: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:  # fmt: skip
    """The value of every point: the metric's mean over the last 5 % of the rounds, then over the seeds. With patience,
    each seed counts with its best evaluation, because a stack runs until all of its points have stopped improving."""
    judged = sweep.metric or "validation_accuracy"
    better = metric(judged, directions).better
    best: Callable[..., Any] = max if better == "higher" else min
    rows: dict[tuple[str, int], dict[int, list[dict[str, Any]]]] = {}
    for row in read_rows(path / METRICS):
        rows.setdefault((row["algorithm"], row["point"]), {}).setdefault(row["seed"], []).append(row)
    tables: dict[str, Any] = {}
    for stack in stacks:
        table = tables.setdefault(stack.label, {"words": list(stack.points[0]), "points": []})
        for number, point in zip(stack.numbers, stack.points, strict=True):
            by_seed = rows.get((stack.key, number), {})
            values = [mean(tail(seed, experiment.rounds), judged) for seed in by_seed.values()]
            # A point that ended before the last round has no value.
            ended = any(seed[-1]["round"] < experiment.rounds for seed in by_seed.values())
            if experiment.patience is not None:
                finite = all(math.isfinite(mean(seed[-1:], judged)) for seed in by_seed.values())
                values = [best(mean([row], judged) for row in seed) for seed in by_seed.values()]
                ended = stack.key in failures or not finite
            ok = len(values) == len(experiment.seeds) and all(map(math.isfinite, values)) and not ended
            memory = failures.get(stack.key, "").startswith(OUT_OF_MEMORY)
            note = None if ok else OUT_OF_MEMORY if memory else "diverged"
            if number in absurd.get(stack.key, ()):
                ok, note = False, "refused: its first rate is absurd"
            table["points"].append({
                "values": point,
                "value": statistics.fmean(values) if ok else None,
                "std": statistics.stdev(values) if ok and len(values) > 1 else None,
                "seeds": len(values),
                "note": note,
                "best": False,
                "gradients": max((seed[-1]["gradients"] for seed in by_seed.values()), default=None),
            })  # fmt: skip
    for table in tables.values():
        valid = [point for point in table["points"] if point["value"] is not None]
        if valid:
            best(valid, key=lambda point: point["value"])["best"] = True
    return {
        "metric": judged, "better": better, "rounds": experiment.rounds, "seeds": experiment.seeds,
        "budget": len(next(iter(tables.values()))["points"]), "algorithms": tables,
    }  # fmt: skip


def winners(sweep: Sweep, experiment: Experiment, results: dict[str, Any]) -> str:
    """The best point of every algorithm, as a preset file."""
    best = {}
    for label, table in results["algorithms"].items():
        for point in table["points"]:
            if point["best"]:
                params = apply_point(hyper_params(experiment.algorithms[label]), point["values"])
                names = [name.partition(".")[0] for name in point["values"]]
                best[label] = {name: params[name] for name in names}
    budget = results["budget"]
    about = f"the best {sweep.metric} of {budget} points each, {experiment.rounds} rounds of {experiment.name}"
    return f"# {about}\n{dumps(best) if best else ''}"


def _refuse_other(folder: Folder, files: dict[str, str]) -> None:
    path = folder.path
    if not folder.holds_run:
        raise ValueError(f"{path}: holds no sweep to resume; leave out --resume to start one")
    for name, text in files.items():
        if not (path / name).exists() or (path / name).read_text() != text:
            raise ValueError(f"{path}: was started with another {name}; repeat the options, or give another --out")
