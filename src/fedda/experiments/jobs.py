"""Programs run one after the other into a run folder: rows, checkpoints, failures, signals."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..engines import SINGLE_PROCESS, SingleProcess
from ..processes import Stopped
from ..run import Diverged, Run
from ..runs.folder import Folder
from .config import Experiment, one_line
from .ranks import Pulse, loaded

MEMORY = "out of memory"


class Progress(Protocol):
    """Who watches: a live display, plain lines, or nobody."""

    def begin(self, label: str, done: int, rounds: int) -> None: ...
    def advance(self, label: str, done: int, rows: list[dict[str, Any]] | None) -> None: ...
    def end(self, label: str, word: str) -> None: ...


@dataclass(frozen=True)
class Job:
    """One program: all seeds, or all points of a grid, as its replicas."""

    label: str
    start: Callable[[dict[str, Tensor] | None], Run]  # from nothing, or from a checkpoint
    # what is written of a replica's row
    row: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda replica, row: row


@dataclass(frozen=True)
class Work:
    """How the jobs of an experiment are run."""

    experiment: Experiment
    folder: Folder
    watch: Progress
    save_seconds: float
    world: SingleProcess = SINGLE_PROCESS  # every rank does the same work, and the folder is the first one's

    def try_out(self, jobs: Sequence[Job], look: Callable[[Job, Run], None] = lambda job, run: None) -> None:
        """Start every job once, so that a mistake in the last is found before anything is written."""
        for job in jobs:
            with suppressed_memory() if self.world.size == 1 else nullcontext():  # the others would go on alone
                look(job, job.start(None))

    def do(self, jobs: Sequence[Job], resume: bool, files: dict[str, str]) -> None:
        """All jobs into the folder, from where they stand; `files` are what the folder holds from the start on."""
        try:
            with stop_signals() as stop:
                if resume:
                    self.folder.open()
                    self.folder.write("config.toml", files["config.toml"])  # it may be asked for more rounds now
                else:
                    self.folder.create(files)
                self.world.mark()
                lasts = {job.label: self.experiment.rounds for job in jobs}
                for job in jobs:
                    state, facts = loaded(self.folder, job.label, self.world)
                    # Memory may be free again, or there may be more of it now; what diverged would diverge again.
                    if "failure" not in facts or facts["failure"].startswith(MEMORY):
                        lasts[job.label] = self._one(job, state, facts.get("seconds", 0.0), stop)
                if resume:
                    assert self.experiment.every is not None
                    self.folder.tidy(lasts, self.experiment.every)
        finally:
            self.folder.release()

    def _one(self, job: Job, state: dict[str, Tensor] | None, seconds: float, stop: list[int]) -> int:
        """One job, from where it stands to its last round, which is given back; a failure is noted."""
        last = self.experiment.rounds
        self.watch.begin(job.label, 0 if state is None else int(state["round"]), self.experiment.rounds)
        try:
            run = job.start(state if state is not None and "server.x" in state else None)
            last = run.last(self.experiment.rounds)
            try:
                for spent, stopped in self._rounds(job, run, last, seconds, stop):
                    seconds = spent
                    self.folder.save(job.label, run.state(), seconds=seconds)
                    if stopped:
                        raise Stopped(stop[0], "saved")
                early = run.stopped(last, self.experiment.rounds)
                self.watch.end(job.label, f"done: {early}" if early else "done")
                return last
            except Diverged as why:
                failure = str(why)
                self.folder.save(job.label, run.state(), seconds=seconds, failure=failure)
        except (MemoryError, RuntimeError) as why:
            if not no_memory(why) or self.world.size > 1:  # the others are in the middle of a round
                raise
            failure = f"{MEMORY} ({one_line(why)}): take a smaller cohort, fewer seeds, or another device"
            self.folder.fail(job.label, failure)  # half a round is no state to go on from: the last checkpoint is
        self.watch.end(job.label, f"failed: {failure}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return last

    def _rounds(self, job: Job, run: Run, last: int, seconds: float, stop: list[int]) -> Iterator[tuple[float, bool]]:
        """Step to the last round; yields the seconds spent in rounds whenever a checkpoint is due, and whether all
        ranks have agreed to stop after it."""
        experiment, label = self.experiment, job.label

        def note() -> None:
            rows = run.evaluate(experiment.detail)
            written = [{"algorithm": label, **job.row(i, row)} for i, row in enumerate(rows)]
            self.folder.append("metrics.jsonl", written)
            timing = {"algorithm": label, "round": run.round, "seconds": round(seconds, 6)}
            self.folder.append("timings.jsonl", [timing])
            self.watch.advance(label, run.round, written)

        if run.round == 0:
            note()
        saved, pause, pulse = time.monotonic(), self.save_seconds, Pulse(self.world, self.save_seconds, run.round)
        while run.round < last:
            began = time.perf_counter()
            run.advance()
            due = run.round % (experiment.every or 1) == 0 or run.round == last
            if due and run.problem.device.type == "cuda":
                torch.cuda.synchronize(run.problem.device)
            seconds += time.perf_counter() - began
            if due:
                note()
            else:
                self.watch.advance(label, run.round, None)
            stopped, save = pulse(run.round, bool(stop), time.monotonic() - saved >= pause)
            if stopped or save or run.round == last:
                if stopped and not stop:  # another rank was told to
                    stop.append(signal.SIGTERM)
                began_saving = time.monotonic()
                yield seconds, stopped
                saved = time.monotonic()
                pause = max(self.save_seconds, 10 * (saved - began_saving))  # a large state is not saved all the time


def no_memory(why: BaseException) -> bool:
    """Whether it is the memory that is short; on CPU torch says so with an ordinary RuntimeError."""
    if isinstance(why, MemoryError | torch.OutOfMemoryError):
        return True
    return any(words in str(why).lower() for words in ("out of memory", "not enough memory", "can't allocate memory"))


@contextmanager
def suppressed_memory() -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as why:
        if not no_memory(why):
            raise


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The first signal is noted, so that the round can end and be saved; a second has its usual effect."""
    seen: list[int] = []
    usual: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
        names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has no SIGHUP
        usual = {s: signal.getsignal(s) for s in (getattr(signal, name) for name in names)}
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
