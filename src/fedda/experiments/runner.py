"""From an experiment to a run folder: every algorithm in turn, all seeds as replicas of one program."""

from __future__ import annotations

import platform
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from .. import __version__
from ..core import Problem
from ..training import Diverged, Run
from .config import Experiment, owned
from .folder import Folder

# Below so many numbers in a stack of vectors a second thread only waits, and stalls when the machine is busy. A fixed
# rule and not a measurement: the number of threads changes the rounding, and a run must repeat to the bit.
SMALL = 500_000


class Progress(Protocol):
    """Who watches: a live display, plain lines, or nobody."""

    def begin(self, label: str, done: int, rounds: int) -> None: ...
    def advance(self, label: str, done: int, rows: list[dict[str, Any]] | None) -> None: ...
    def end(self, label: str, word: str) -> None: ...


class Stopped(Exception):
    """Somebody stopped the run (Ctrl-C, SIGTERM, a closed terminal); it can go on from its checkpoint."""

    def __init__(self, signal_number: int, words: str):
        super().__init__(f"stopped by {signal.Signals(signal_number).name}, {words}")
        self.signal = signal_number


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
) -> Folder:
    """Run every algorithm of the experiment into the folder `out`.

    A mistake in the experiment (ValueError) is found before anything is written. With `resume`, the run goes
    on from the folder's last checkpoint.
    """
    folder = Folder(out)
    if not resume and not overwrite:
        folder.refuse_if_taken()
    experiment = experiment.completed()
    assert experiment.every is not None
    with owned(experiment.name):
        problem: Any = experiment.problem.build()
    problem = problem if device is None else problem.to(device)
    if problem.d * (experiment.cohort or 1) * len(experiment.seeds) < SMALL:
        torch.set_num_threads(1)

    def start(label: str, state: dict[str, Any] | None = None) -> Run:
        with owned(experiment.name):
            algorithm = experiment.build(label)
        try:
            return Run(
                algorithm, problem, experiment.cohort, experiment.seeds, engine=engine,
                weights=experiment.weights, force=force, state=state,
            )  # fmt: skip
        except (ValueError, Diverged) as why:
            raise ValueError(f"{experiment.name}: {label}: {why}") from None
        except KeyError as why:
            if state is None:
                raise
            raise ValueError(f"{out}: {label}: the checkpoint, of another version, has no {why}") from None

    if not resume:
        for label in experiment.algorithms:
            start(label)
    try:
        with stop_signals() as stop:
            if resume:
                folder.open()
                folder.write("config.toml", experiment.toml())  # it may be asked for more rounds now
            else:
                folder.create(experiment.toml(), environment(problem, engine))
            for label in experiment.algorithms:
                state, facts = folder.load(label)
                if "failure" not in facts:
                    seconds = facts.get("seconds", 0.0)
                    _one(experiment, label, start(label, state), seconds, folder, watch, stop, save_seconds)
            if resume:
                folder.tidy(list(experiment.algorithms), experiment.every, experiment.rounds)
    finally:
        folder.release()
    return folder


def _one(
    experiment: Experiment, label: str, run: Run, seconds: float, folder: Folder, watch: Progress,
    stop: list[int], save_seconds: float,
) -> None:  # fmt: skip
    """One algorithm, from where it stands to its last round."""
    watch.begin(label, run.round, experiment.rounds)

    def note() -> None:
        rows = run.evaluate(experiment.detail)
        folder.append("metrics.jsonl", [{"algorithm": label, **row} for row in rows])
        folder.append("timings.jsonl", [{"algorithm": label, "round": run.round, "seconds": round(seconds, 6)}])
        watch.advance(label, run.round, rows)

    if run.round == 0:
        note()
    saved = time.monotonic()
    while run.round < experiment.rounds:
        began = time.perf_counter()
        try:
            run.step()
        except Diverged as why:
            folder.save(label, run.state(), seconds=seconds, failure=str(why))
            return watch.end(label, f"failed: {why}")
        due = run.round % (experiment.every or 1) == 0 or run.round == experiment.rounds
        if due and run.problem.device.type == "cuda":
            torch.cuda.synchronize(run.problem.device)
        seconds += time.perf_counter() - began
        if due:
            note()
        else:
            watch.advance(label, run.round, None)
        if stop or run.round == experiment.rounds or time.monotonic() - saved >= save_seconds:
            folder.save(label, run.state(), seconds=seconds)
            saved = time.monotonic()
        if stop:
            raise Stopped(stop[0], "saved")
    watch.end(label, "done")


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The first signal is noted, so that the round can end and be saved; a second has its usual effect."""
    seen: list[int] = []
    usual: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
        usual = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    # What the caller ignores (nohup, a shell's background job) or has not set through Python stays as it is.
    usual = {s: handler for s, handler in usual.items() if handler not in (signal.SIG_IGN, None)}

    def back() -> None:
        for s, handler in usual.items():
            signal.signal(s, handler)

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        back()

    for s in usual:
        signal.signal(s, note)
    try:
        yield seen
    except KeyboardInterrupt:
        raise Stopped(signal.SIGINT, "at once") from None
    finally:
        back()


def environment(problem: Problem, engine: str) -> dict[str, Any]:
    """What a reader needs to repeat the run."""
    device = problem.device
    cpu = f"cpu, {torch.get_num_threads()} threads"
    return {
        "command": shlex.join(["fedda", *sys.argv[1:]]),
        "fedda": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "engine": engine,
        "clients": problem.clients,
        "parameters": problem.d,
        "samples": int(problem.sizes.sum()),
    }
