"""From an experiment to a run folder: every algorithm in turn, all seeds as replicas of one program."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import __version__
from ..core import Algorithm, Problem
from ..engines import SingleProcess
from ..problems.gradients.tuning import threads as so_many_threads
from ..run import Diverged, Run
from ..runs.folder import Folder
from .config import Experiment, owned
from .execution import Choices, agreed
from .jobs import Job, Progress, Work
from .ranks import SINGLE, Ranks, folder_of
from .spread import Spread


def run(
    experiment: Experiment,
    out: Path,
    watch: Progress,
    engine: str = "auto",
    device: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    force: bool = False,
    save_seconds: float = 5.0,
    threads: int | None = None,
    precision: str = "auto",
    problem: Any = None,
    ranks: Ranks = SINGLE,
) -> Folder:
    """Run every algorithm of the experiment into the folder `out`.

    A mistake in the experiment (ValueError) is found before anything is written. With `resume`, the run goes
    on from the folder's last checkpoint. Threads are measured where they are not given (`choices`). `problem` is
    the experiment's own, where somebody has built it already.
    """
    folder, world = folder_of(out, ranks.world), ranks.world
    if not resume and not overwrite:
        folder.refuse_if_taken()
    experiment = experiment.completed()
    problem = built(experiment, device, ranks=ranks) if problem is None else problem
    engine = ranks.engine(engine)
    clients, replicas = experiment.cohort or problem.clients, len(experiment.seeds)
    choices = agreed(world, problem, engine, clients, replicas, threads, precision, out if resume else None)
    how = choices.engine(engine)

    def start(label: str, state: dict[str, Tensor] | None) -> Run:
        with owned(experiment.name):
            algorithm = experiment.build(label)
        return started(experiment, label, algorithm, problem, experiment.seeds, state, ranks, engine=how, force=force)

    jobs = [Job(label, partial(start, label)) for label in experiment.algorithms]
    work = Work(experiment, folder, watch, save_seconds, world)
    with so_many_threads(choices.threads):
        if not resume:
            work.try_out(jobs)
        about = environment(problem, engine, choices, world)
        work.do(jobs, resume, {"config.toml": experiment.toml(), "environment.json": about})
    return folder


def built(experiment: Experiment, device: str | None, validation: bool = False, ranks: Ranks = SINGLE) -> Any:
    """The experiment's problem, on its device."""
    with owned(experiment.name):
        problem: Any = experiment.problem.build(validation)
    everyone = experiment.cohort in (None, problem.clients)
    if ranks.world.size > 1 and ranks.shard == "clients" and everyone and problem.clients >= ranks.world.size:
        problem = problem.only(ranks.world.mine(problem.clients))  # a rank always has the same clients
    return problem if device is None else problem.to(device)


def started(
    experiment: Experiment, label: str, algorithm: Algorithm, problem: Any, seeds: list[int],
    state: dict[str, Tensor] | None, ranks: Ranks, **how: Any,
) -> Run:  # fmt: skip
    """A run at its start or at its checkpoint; what is refused is said with the label."""
    wrappers = experiment.wrappers()
    kind = partial(Spread, ranks.world) if ranks.shard == "replicas" and ranks.world.size > 1 else Run
    try:
        return kind(
            algorithm, problem, experiment.cohort, seeds, weights=experiment.weights, aggregation=wrappers,
            budget=experiment.spending(), state=state, **how,
        )  # fmt: skip
    except (ValueError, Diverged) as why:
        raise ValueError(f"{experiment.name}: {label}: {why}") from None
    except KeyError as why:
        if state is None:
            raise
        raise ValueError(f"{experiment.name}: {label}: the checkpoint, of another version, has no {why}") from None


def environment(problem: Problem, engine: str, choices: Choices, world: SingleProcess) -> str:
    """What a reader needs to repeat the run, as JSON."""
    device = problem.device
    cpu = f"cpu, {choices.threads} threads"
    facts = {
        "command": shlex.join(["fedda", *sys.argv[1:]]),
        "fedda": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "engine": engine,
        "processes": world.size,
        **{word: value for word, value in asdict(choices).items() if value is not None},
        "clients": problem.clients,
        "parameters": problem.d,
        "samples": int(problem.sizes.sum()),
    }
    return json.dumps(facts, indent=1) + "\n"
