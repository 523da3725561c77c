"""Run programs one after the other into a run folder: rows, checkpoints, failures, signals."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from .. import checks
from ..clients import FineTuning
from ..engines.world import SINGLE_PROCESS, SingleProcess
from ..files import json_lines
from ..processes import Stopped
from ..run import Diverged, Run
from ..runs.folder import Folder
from ..runs.names import CLIENTS, CONFIG, METRICS, OUT_OF_MEMORY, TIMINGS
from .config import Experiment
from .ranks import Pulse

MOST_CLIENT_ROWS = 100_000  # of an algorithm: with more, the run folder has no rows of clients


class Watcher(Protocol):
    """A watcher of a run: a live display, plain lines, or nothing."""

    def note(self, line: str) -> None: ...
    def begin(self, label: str, done: int, rounds: int) -> None: ...
    def advance(self, label: str, done: int, rows: list[dict[str, Any]] | None) -> None: ...
    def end(self, label: str, state: str) -> None: ...


@dataclass(frozen=True)
class Job:
    """One program: all seeds, or all points of a grid, as its replicas."""

    label: str
    start: Callable[[dict[str, Tensor] | None], Run]  # from the beginning, or from a checkpoint
    # the row to write, from a replica's index and its row
    row: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda replica, row: row


@dataclass(frozen=True)
class JobRunner:
    """Runs the jobs of an experiment one after the other, into its folder."""

    experiment: Experiment
    folder: Folder
    watch: Watcher
    save_seconds: float
    world: SingleProcess = SINGLE_PROCESS  # every rank does the same work; the first one writes
    clients: bool = False  # whether the rows of the clients are written at the end

    def try_out(self, jobs: Sequence[Job], inspect: Callable[[Job, Run], None] = lambda job, run: None) -> None:
        """Start and `inspect` every job once, so that a mistake in the last one is noticed before a file is written."""
        # With several ranks an error is not ignored: the others would continue without this one.
        ignore = ignore_out_of_memory if self.world.size == 1 else nullcontext
        for job in jobs:
            with ignore():
                inspect(job, job.start(None))

    def run(self, jobs: Sequence[Job], resume: bool, files: dict[str, str]) -> None:
        """Run all jobs from their checkpoints; a new folder begins with `files`."""
        try:
            with stop_signals() as stop:
                if resume:
                    self.folder.open()
                    self.folder.write(CONFIG, files[CONFIG])  # the rounds may have been raised
                else:
                    self.folder.create(files)
                self.world.mark()
                last_rounds = {job.label: self.experiment.rounds for job in jobs}
                client_rows: list[dict[str, Any]] = []
                for job in jobs:
                    state, facts = load_checkpoint(self.folder, job.label, self.world)
                    # There may be more memory now; an algorithm that diverged would diverge again.
                    if "failure" not in facts or facts["failure"].startswith(OUT_OF_MEMORY):
                        seconds = facts.get("seconds", 0.0)
                        last_rounds[job.label] = self._run_job(job, state, seconds, stop, client_rows)
                if self.clients:
                    self.folder.write(CLIENTS, json_lines(client_rows))
                if resume:
                    assert self.experiment.every is not None
                    self.folder.tidy(last_rounds, self.experiment.every)
        finally:
            self.folder.release()

    def _run_job(
        self, job: Job, state: dict[str, Tensor] | None, seconds: float, stop: list[int],
        client_rows: list[dict[str, Any]],
    ) -> int:  # fmt: skip
        """Run one job to its last round, and return that round; a failure is noted. The rows of its clients are added
        to `client_rows`."""
        last = self.experiment.rounds
        self.watch.begin(job.label, 0 if state is None else int(state["round"]), self.experiment.rounds)
        try:
            run = job.start(state if state is not None and "server.x" in state else None)
            last = run.last_round(self.experiment.rounds)
            try:
                for spent, stopped in self._rounds(job, run, last, seconds, stop):
                    seconds = spent
                    self._save(job.label, run, seconds=seconds)
                    if stopped:
                        raise Stopped(stop[0], "saved")
                reason = run.stop_reason(last, self.experiment.rounds)
                if run.round < last and run.patience is not None:
                    reason = run.patience.reason(run.round)
                if self.clients and run.problem.clients * len(self.experiment.seeds) <= MOST_CLIENT_ROWS:
                    rows = run.client_rows(FineTuning.of(self.experiment.personalise))
                    client_rows.extend({"algorithm": job.label, **row} for row in rows)
                self.watch.end(job.label, f"done: {reason}" if reason else "done")
                return run.round
            except Diverged as why:
                failure = str(why)
                self._save(job.label, run, seconds=seconds, failure=failure)
        except (MemoryError, RuntimeError) as why:
            if not is_out_of_memory(why) or self.world.size > 1:  # the other ranks are in the middle of a round
                raise
            reason = checks.one_line(why, 300)
            failure = f"{OUT_OF_MEMORY} ({reason}): take a smaller cohort, fewer seeds, or another device"
            # Half a round is not a state to resume from: the last checkpoint stays.
            self.folder.fail(job.label, failure, to_bytes({"round": torch.tensor(0)}))
        self.watch.end(job.label, f"failed: {failure}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return last

    def _save(self, label: str, run: Run, **facts: Any) -> None:
        state = run.state()  # on every rank, because ranks exchange their parts
        self.folder.save(label, run.round, b"" if self.world.rank else to_bytes(state), **facts)

    def _rounds(self, job: Job, run: Run, last: int, seconds: float, stop: list[int]) -> Iterator[tuple[float, bool]]:
        """Step to the last round. When a checkpoint is due, yield the seconds spent in rounds, and whether all ranks
        stop after it."""
        experiment, label = self.experiment, job.label
        samples = experiment.evaluate if isinstance(experiment.evaluate, int) else None
        everything = None if samples is None else run.problem.evaluated_samples(None)

        def write_rows(count: bool = True) -> None:
            """Evaluate; `count`: for the patience."""
            rows = run.evaluate(experiment.detail, everything if run.round == last else samples)
            if count and run.patience is not None and run.patience(rows) and run.round < last and samples is not None:
                rows = run.evaluate(experiment.detail, everything)  # the last evaluation takes all samples
            written = [{"algorithm": label, **job.row(i, row)} for i, row in enumerate(rows)]
            self.folder.append(METRICS, written)
            timing = {"algorithm": label, "round": run.round, "seconds": round(seconds, 6)}
            self.folder.append(TIMINGS, [timing])
            self.watch.advance(label, run.round, written)

        every = experiment.every or 1
        if run.round == 0:
            write_rows()
        elif samples is not None and run.round % every == 0 and run.round < last and not stopped_early(run):
            write_rows(count=False)  # the run may have ended here before it got more rounds
        saved, pause, pulse = time.monotonic(), self.save_seconds, Pulse(self.world, self.save_seconds, run.round)
        while run.round < last and not stopped_early(run):
            began = time.perf_counter()
            run.advance()
            due = run.round % every == 0 or run.round == last
            if due and run.problem.device.type == "cuda":
                torch.cuda.synchronize(run.problem.device)
            seconds += time.perf_counter() - began
            if due:
                write_rows()
            else:
                self.watch.advance(label, run.round, None)
            stopped, save = pulse(run.round, bool(stop), time.monotonic() - saved >= pause)
            if stopped or save or run.round == last or stopped_early(run):
                if stopped and not stop:  # another rank got a signal
                    stop.append(signal.SIGTERM)
                began_saving = time.monotonic()
                yield seconds, stopped
                saved = time.monotonic()
                pause = max(self.save_seconds, 10 * (saved - began_saving))  # saving takes at most a tenth of the time


def stopped_early(run: Run) -> bool:
    return run.patience is not None and run.patience.exhausted


def load_checkpoint(
    folder: Folder, label: str, world: SingleProcess
) -> tuple[dict[str, Tensor] | None, dict[str, Any]]:
    """An algorithm's last checkpoint, read by the first rank, and its facts."""
    content, facts = folder.load(label)
    if world.size > 1:
        exists, facts = json.loads(world.share(json.dumps([content is not None, facts]).encode()))
        content = world.share(content or b"")
        content = content if exists else None
    return (None if content is None else load(content)), facts


def to_bytes(state: dict[str, Tensor]) -> bytes:
    """A state as safetensors; these refuse two names for one tensor, so the second gets a copy."""
    seen: set[int] = set()
    distinct = {}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        address = tensor.untyped_storage().data_ptr()
        distinct[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return save(distinct)


def is_out_of_memory(why: BaseException) -> bool:
    """Whether memory ran out; on a CPU torch raises an ordinary RuntimeError."""
    if isinstance(why, MemoryError | torch.OutOfMemoryError):
        return True
    return any(text in str(why).lower() for text in ("out of memory", "not enough memory", "can't allocate memory"))


@contextmanager
def ignore_out_of_memory() -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as why:
        if not is_out_of_memory(why):
            raise


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The first signal is noted, so that the round can end and be saved; a second one has its usual effect."""
    seen: list[int] = []
    usual: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
        names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has no SIGHUP
        usual = {s: signal.getsignal(s) for s in (getattr(signal, name) for name in names)}
    # Signals that the caller ignores (nohup, a background job) or that Python did not set stay as they are.
    usual = {s: handler for s, handler in usual.items() if handler not in (signal.SIG_IGN, None)}

    def restore() -> None:
        for s, handler in usual.items():
            signal.signal(s, handler)

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        restore()

    for s in usual:
        signal.signal(s, note)
    try:
        yield seen
    except KeyboardInterrupt:
        raise Stopped(signal.SIGINT, "at once") from None
    finally:
        restore()
