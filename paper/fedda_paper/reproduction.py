"""Run the parts one after the other, until all are finished or the time is over. The same command resumes.

Several processes may work in one folder: each run and each sweep belongs to the process that holds its lock.
"""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedda.experiments.config import Experiment
from fedda.experiments.jobs import Watcher
from fedda.experiments.runner import build_problem, run
from fedda.experiments.sweep import search
from fedda.files import locked, write_whole
from fedda.processes import Stopped
from fedda.runs.folder import Folder
from fedda.runs.names import OUT_OF_MEMORY

from .parts import Part, PartList
from .pool import DONE, TIMES, PoolRun, experiments, pool_runs, winners

SAVE_SECONDS = 60.0
BEAT = 5.0  # seconds between two notes of how long a task has taken
WAIT = 1.0  # seconds before a process without a task looks for one again


class Clock:
    """A display that stops the run when the time is over, as a signal does: with a checkpoint."""

    def __init__(self, display: Watcher, limit: float):
        self.display, self.limit, self.rang = display, limit, False
        self.note, self.begin, self.end = display.note, display.begin, display.end
        self.beat: Callable[[], None] = lambda: None  # called after each round

    def advance(self, label: str, done: int, rows: list[dict[str, Any]] | None) -> None:
        self.display.advance(label, done, rows)
        self.beat()
        if self.over and not self.rang:
            self.rang = True
            if not callable(signal.getsignal(signal.SIGTERM)):  # the signal is ignored, or this is not the main thread
                raise Stopped(signal.SIGTERM, "at its last checkpoint")
            signal.raise_signal(signal.SIGTERM)  # the run finishes its round and saves

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.limit


@dataclass(frozen=True)
class Task:
    """A run or a sweep that is not finished."""

    kind: str
    name: str
    is_done: Callable[[], bool]
    do: Callable[[Clock], None]


@dataclass
class Reproduction:
    """Runs the parts of a plan in the folder `work`."""

    plan: PartList
    work: Path
    display: Watcher
    device: str | None = None
    precision: str = "auto"
    seconds: float = float("inf")
    commit: str = ""
    say: Any = print
    problem: tuple[str, Any] = ("", None)  # the last one, with its key
    began: float = field(default_factory=time.monotonic)
    tried: set[Path] = field(default_factory=set)  # locks of tasks: one that ran out of memory is not tried again
    why: str = ""  # why something is left

    def go(self, parts: Sequence[Part]) -> bool:
        """Run what is left of the parts; True if all is finished, otherwise `why` gives the reason."""
        self.work.mkdir(parents=True, exist_ok=True)
        write_whole(self.work / "parts.toml", self.plan.text)
        clock = Clock(self.display, self.began + self.seconds)
        try:
            # Listed again after each task: other processes finish tasks, and figures wait for sweeps.
            while left := [task for part in parts for task in self.tasks(part)]:
                if clock.over:
                    self.why = "the time is over"
                elif any(self.attempt(task, clock) for task in left):
                    continue
                elif all(self.lock(task.kind, task.name) in self.tried for task in left):
                    self.why = "some ran out of memory"
                elif not any(self.waits(part) for part in parts):
                    self.why = "other processes run the rest"
                else:
                    time.sleep(WAIT)
                    continue
                return False
        except Stopped:
            if not clock.rang:
                raise
            self.why = "the time is over"
            return False
        for part in filter(self.waits, parts):
            self.say(f"{part.name}: waits for the sweep {part.sweep!r}")
        return True

    def attempt(self, task: Task, clock: Clock) -> bool:
        """Do a task, unless another process has it or it was tried before."""
        path = self.lock(task.kind, task.name)
        if path in self.tried:
            return False
        with locked(path) as ours:
            if ours and not task.is_done():
                self.tried.add(path)
                task.do(clock)
        return ours

    def lock(self, kind: str, name: str) -> Path:
        return self.work / "locks" / f"{kind}-{name}"

    def waits(self, part: Part) -> bool:
        """Whether the figures of a part have no tuned values yet."""
        return bool(part.sweep) and not self.swept(part.sweep)

    def swept(self, name: str) -> bool:
        return winners(self.work, name) is not None

    def tasks(self, part: Part) -> Iterator[Task]:
        """What is left of a part; figures with tuned values wait for their sweep."""
        for name in part.sweeps:
            if not self.swept(name):
                yield Task("sweep", name, partial(self.swept, name), partial(self.sweep, part, name))
        for experiment, known in experiments(self.plan, part, self.work):
            for one in pool_runs(experiment, self.work) if known else ():
                if not one.done:
                    yield Task("run", one.name, partial(getattr, one, "done"), partial(self.run, part, one))

    def run(self, part: Part, one: PoolRun, clock: Clock) -> None:
        options = self.options(part, one.folder, one.experiment)
        with self.timed(part.name, one.name, "run", clock):
            run(one.experiment, one.folder, clock, force=True, **options)
        if not one.failure.startswith(OUT_OF_MEMORY):  # the next attempt may have more memory
            one.finish(one.experiment.rounds)

    def sweep(self, part: Part, name: str, clock: Clock) -> None:
        sweep, folder = self.plan.search(name), self.work / "sweeps" / name
        options = self.options(part, folder, sweep.experiment, tuning=True)
        with self.timed(part.name, name, "sweep", clock):
            record = search(sweep, folder, clock, **options)
        notes = [point["note"] for method in record["algorithms"].values() for point in method["points"]]
        if OUT_OF_MEMORY not in notes:  # as above
            (folder / DONE).write_text("{}\n", encoding="utf-8")

    def options(self, part: Part, folder: Path, experiment: Experiment, tuning: bool = False) -> dict[str, Any]:
        """How a run or a sweep is run: a new one, or one that is resumed with the precision it began with."""
        key = json.dumps([experiment.problem.model_dump(), tuning])
        if key != self.problem[0]:
            self.problem = "", None  # frees the memory before the next one is built
            self.problem = key, build_problem(experiment, self.device, tuning)
        begun = Folder(folder).holds_run
        precision = "auto" if begun else part.precision or self.precision
        how = {"device": self.device, "resume": begun, "overwrite": not begun, "save_seconds": SAVE_SECONDS}
        return how | {"precision": precision, "problem": self.problem[1]}

    @contextmanager
    def timed(self, part: str, name: str, kind: str, clock: Clock) -> Iterator[None]:
        """Record when a task ran and how long it took, with its command and commit.

        The time is noted every few seconds: if the process is killed, the next one records the note that it left.
        """
        note = self.work / "begun" / f"{kind}-{name}"
        note.parent.mkdir(exist_ok=True)
        if note.is_file():
            self.record(note)
        row: dict[str, Any] = {"part": part, "kind": kind, "name": name, "began": round(time.time(), 3), "wall": 0.0}
        row |= {"command": shlex.join(["fedda", *sys.argv[1:]]), "commit": self.commit}
        began = time.monotonic()

        def beat(least: float = BEAT) -> None:
            wall = round(time.monotonic() - began, 3)
            if wall >= row["wall"] + least:
                row["wall"] = wall
                write_whole(note, json.dumps(row) + "\n")

        clock.beat = beat
        try:
            yield
        finally:
            clock.beat = lambda: None
            beat(0.0)
            self.record(note)

    def record(self, note: Path) -> None:
        with open(self.work / TIMES, "a", encoding="utf-8") as file:
            file.write(note.read_text(encoding="utf-8"))
        note.unlink()


def current_commit() -> str:
    """The commit of this checkout, with a mark if files differ from it."""
    options: Any = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "check": False}
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], **options)
        changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **options)
    except OSError:
        return "unknown"
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + (" with changes" if changed.stdout.strip() else "")
