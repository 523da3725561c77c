"""From an experiment to a run folder: every algorithm in turn, all seeds as replicas of one program."""

from __future__ import annotations

import json
import platform
import shlex
import signal
import sys
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
from .config import Experiment
from .folder import Folder


class Progress(Protocol):
    """Who watches: a live display, plain lines, or nobody."""

    def begin(self, label: str, done: int, rounds: int) -> None: ...
    def advance(self, label: str, done: int, rows: list[dict[str, Any]] | None) -> None: ...
    def end(self, label: str, word: str) -> None: ...


class Stopped(Exception):
    """The run was asked to stop (Ctrl-C, SIGTERM) and has saved where it was."""

    def __init__(self, signal_number: int):
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
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

    A mistake in the experiment (ValueError) is found before anything is written. With `resume`, the run goes on from the
    folder's last checkpoint.
    """
    folder = Folder(out)
    experiment = experiment.completed()
    problem: Problem = experiment.problem.build()
    problem = problem if device is None else problem.to(device)

    def start(label: str, state: dict[str, Any] | None = None) -> Run:
        try:
            return Run(
                experiment.build(label), problem, experiment.cohort, experiment.seeds, engine=engine,
                weights=experiment.weights, force=force, state=state,
            )  # fmt: skip
        except (ValueError, Diverged) as why:
            raise ValueError(f"{experiment.name}: {label}: {why}") from None

    if resume:
        folder.open()
    else:
        if folder.holds_run and not overwrite:
            raise ValueError(f"{out} holds a run: --resume goes on with it, --overwrite begins again, or give another --out")
        for label in experiment.algorithms:
            start(label)
        if overwrite:
            folder.clear()
        folder.create(experiment.toml(), environment(problem, engine))
    with stop_signals() as stop:
        for label in experiment.algorithms:
            state, facts = folder.load(label)
            if "failure" in facts:
                continue
            _one(experiment, label, start(label, state), facts.get("seconds", 0.0), folder, watch, stop, save_seconds)
    return folder


def _one(
    experiment: Experiment, label: str, run: Run, seconds: float, folder: Folder, watch: Progress,
    stop: list[int], save_seconds: float,
) -> None:  # fmt: skip
    """One algorithm, from where it stands to its last round."""
    assert experiment.every is not None
    watch.begin(label, run.round, experiment.rounds)

    def note() -> None:
        rows = run.evaluate()
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
            failures = {k: v["failure"] for k, v in folder.state["algorithms"].items() if "failure" in v}
            folder.write("failures.json", json.dumps(failures, indent=1) + "\n")
            return watch.end(label, f"failed: {why}")
        due = run.round % experiment.every == 0 or run.round == experiment.rounds
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
            raise Stopped(stop[0])
    watch.end(label, "done")


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The first Ctrl-C or SIGTERM is noted, so that the round can end and be saved; a second one has its usual effect."""
    seen: list[int] = []
    usual = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        for s, handler in usual.items():
            signal.signal(s, handler)

    for s in usual:
        signal.signal(s, note)
    try:
        yield seen
    finally:
        for s, handler in usual.items():
            signal.signal(s, handler)


def environment(problem: Problem, engine: str) -> dict[str, Any]:
    """What a reader needs to repeat the run."""
    device = problem.device
    return {
        "command": shlex.join(["fedda", *sys.argv[1:]]),
        "fedda": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "engine": engine,
        "clients": problem.clients,
        "parameters": problem.d,
        "samples": int(problem.sizes.sum()),
    }
