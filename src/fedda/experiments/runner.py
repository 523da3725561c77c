"""From an experiment to a run folder: every algorithm in turn, all seeds as replicas of one program."""

import json
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import __version__
from ..checks import warn
from ..core import Algorithm
from ..engines.participation import cohort_size
from ..evaluations import Patience, plan_evaluations, warn_of_few
from ..problems.gradients.tuning import threads
from ..run import Diverged, Run, warn_of_sizes
from ..runs.folder import Folder
from ..runs.names import CONFIG, ENVIRONMENT
from ..training import for_rounds
from .config import Experiment, changed_keys, errors_named
from .execution import agree_on_execution
from .jobs import Job, JobRunner, Watcher
from .ranks import SINGLE, Ranks, ShardedRun, folder_of
from .saved_models import refuse_other_data


@dataclass(frozen=True)
class RunOptions:
    """How an experiment is run; the experiment itself does not depend on it."""

    engine: str = "auto"
    device: str | None = None
    resume: bool = False  # from the folder's last checkpoint
    overwrite: bool = False
    force: bool = False  # run even if the first step is refused as too long
    save_seconds: float = 5.0  # between checkpoints
    threads: int | None = None  # measured if None
    precision: str = "auto"
    problem: Any = None  # the experiment's problem, if it is built already
    note: str = ""  # a warning, given once the problem is built: an error before it stays one line
    ranks: Ranks = SINGLE

    def folder(self, out: Path) -> Folder:
        """The folder `out`, if it may be written."""
        folder = folder_of(out, self.ranks.world)
        if not self.resume and not self.overwrite:
            folder.refuse_if_taken()
        return folder


def run(experiment: Experiment, out: Path, watch: Watcher, **options: Any) -> Folder:
    """Run every algorithm of the experiment into the folder `out`; the options are those of `RunOptions`.

    A mistake in the experiment raises a ValueError before a file is written.
    """
    run_options = RunOptions(**options)
    folder = run_options.folder(out)
    program = Program(experiment.completed(), folder, run_options, replicas=len(experiment.seeds))
    if experiment.weights is None and experiment.sampling is None:
        warn_of_sizes(program.problem.sizes)
    experiment = program.plan_evaluations(experiment.every, fixed=run_options.resume)

    def start(label: str, state: dict[str, Tensor] | None) -> Run:
        with errors_named(experiment.name):
            algorithm = experiment.build(label)
        run = program.start(label, algorithm, experiment.seeds, state, run_options.force)
        with errors_named(f"{experiment.name}: {label}"):
            run.set_patience(experiment.patience, experiment.metric, len(experiment.seeds), state)
        return run

    jobs = [Job(label, partial(start, label)) for label in experiment.algorithms]
    program.run(jobs, watch, {CONFIG: experiment.toml()}, try_out=not run_options.resume, clients=True)
    return folder


class Program:
    """An experiment with its problem, its engine and its folder: what a run and a sweep have in common."""

    def __init__(
        self, experiment: Experiment, folder: Folder, options: RunOptions, replicas: int, tuning: bool = False
    ):
        self.experiment, self.folder, self.options, self.ranks = experiment, folder, options, options.ranks
        self.problem = options.problem
        if self.problem is None:
            self.problem = build_problem(experiment, options.device, tuning, self.ranks)
        if options.note:
            warn(options.note)
        if options.resume and not self.ranks.world.rank:
            refuse_other_data(self.problem, folder.path)
        self.engine_name = self.ranks.engine_name(options.engine)
        taking_part = cohort_size(experiment.cohort, self.problem.clients)
        self.execution = agree_on_execution(
            self.ranks.world, self.problem, self.engine_name, taking_part, replicas,
            options.threads, options.precision, folder.path if options.resume else None,
        )  # fmt: skip

    def plan_evaluations(self, every: int | None, fixed: bool = False) -> Experiment:
        """The experiment with its plan of evaluations, by the fewest local steps of its algorithms; `every` is the
        user's. A resumed run (`fixed`) keeps the plan that it began with."""
        experiment = self.experiment
        if not (fixed and experiment.evaluate is None):
            algorithms = [experiment.build(label).with_steps_of(self.problem) for label in experiment.algorithms]
            steps = min(getattr(algorithm, "steps", 1) for algorithm in algorithms)
            cohort = cohort_size(experiment.cohort, self.problem.clients)
            with errors_named(experiment.name):
                Patience.of(experiment.patience, experiment.metric, self.problem, len(experiment.seeds), None)
                plan = plan_evaluations(
                    self.problem, experiment.rounds, cohort, steps, experiment.every if fixed else every,
                    experiment.evaluate,
                )  # fmt: skip
            update = {"every": plan.every, "evaluate": experiment.evaluate if plan.samples is None else plan.samples}
            self.experiment = experiment.model_copy(update=update)
            warn_of_few(plan, experiment.rounds, experiment.patience)
        return self.experiment

    def start(
        self, label: str, algorithm: Algorithm, seeds: list[int], state: dict[str, Tensor] | None, force: bool
    ) -> Run:
        """A run at its start or at its checkpoint; an error names the label."""
        experiment, world = self.experiment, self.ranks.world
        make_run = partial(ShardedRun, world) if self.ranks.shard == "replicas" and world.size > 1 else Run
        try:
            return make_run(
                for_rounds(algorithm, self.problem, experiment.rounds), self.problem, experiment.cohort, seeds,
                weights=experiment.weights, sampling=experiment.sampling or "uniform", drop=experiment.drop or 0.0,
                availability=experiment.availability, aggregation=experiment.wrappers(),
                budget=experiment.privacy_budget(), state=state,
                engine=self.execution.engine(self.engine_name), force=force,
            )  # fmt: skip
        except (ValueError, Diverged) as why:
            raise ValueError(f"{experiment.name}: {label}: {why}") from None
        except KeyError as why:
            if state is None:
                raise
            raise ValueError(f"{experiment.name}: {label}: the checkpoint, of another version, has no {why}") from None

    def run(
        self, jobs: Sequence[Job], watch: Watcher, files: dict[str, str], try_out: bool = True,
        inspect: Callable[[Job, Run], None] = lambda job, run: None, clients: bool = False,
    ) -> None:  # fmt: skip
        """Run the jobs into the folder, which begins with these files and `environment.json`. With `try_out` every job
        is started once before, and `inspect` may refuse it. `clients`: with the rows of the clients at the end."""
        runner = JobRunner(self.experiment, self.folder, watch, self.options.save_seconds, self.ranks.world, clients)
        if self.execution.choice:
            watch.note(self.execution.choice)
        with threads(self.execution.threads):
            if try_out:
                runner.try_out(jobs, inspect)
            runner.run(jobs, self.options.resume, files | {ENVIRONMENT: self.environment()})

    def environment(self) -> str:
        """The versions, the machine and the command, with which the run can be repeated, as JSON."""
        device = self.problem.device
        cpu = f"cpu, {self.execution.threads} threads"
        facts = {
            "command": shlex.join(["fedda", *sys.argv[1:]]),
            "fedda": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "system": platform.platform(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
            "engine": self.engine_name,
            "processes": self.ranks.world.size,
            **{key: value for key, value in asdict(self.execution).items() if value is not None and key != "choice"},
            "clients": self.problem.clients,
            "parameters": self.problem.d,
            "samples": int(self.problem.sizes.sum()),
            "data_sha256": self.problem.fingerprint,
            "changed": changed_keys(self.experiment),
        }
        if counts := self.problem.class_counts():
            facts["partition"] = [" ".join(map(str, row)) for row in counts]
            if self.problem.class_names:
                facts["classes"] = list(self.problem.class_names)
        if self.experiment.problem.metrics:
            facts["metrics"] = self.problem.directions
        return json.dumps(facts, indent=1) + "\n"


def build_problem(experiment: Experiment, device: str | None, tuning: bool = False, ranks: Ranks = SINGLE) -> Any:
    """The experiment's problem, on its device; for `tuning` it has no test set (`ProblemTable.build`)."""
    with errors_named(experiment.name):
        problem: Any = experiment.problem.build(tuning)
    _ = problem.fingerprint  # of all clients, before each rank takes its own
    everyone = cohort_size(experiment.cohort, problem.clients) == problem.clients
    if ranks.world.size > 1 and ranks.shard == "clients" and everyone and problem.clients >= ranks.world.size:
        problem = problem.only(ranks.world.mine(problem.clients))  # a rank always has the same clients
    return problem if device is None else problem.to(device)
