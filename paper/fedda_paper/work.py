"""The parts one after the other until all are done or the time is over; the same command goes on.

Several processes may work in one folder at a time: each run and each sweep is somebody's, by a lock.
"""

from __future__ import annotations

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

from fedda.experiments.jobs import MEMORY, Progress
from fedda.experiments.runner import built, run
from fedda.experiments.sweep import search
from fedda.files import alone, write_whole
from fedda.processes import Stopped
from fedda.runs.folder import Folder

from .estimate import TIMES
from .parts import Part, PartList
from .pool import DONE, PoolRun, entries, experiments, winners

SAVE_SECONDS = 60.0
BEAT = 5.0  # seconds between two notes of how long a task has taken so far
WAIT = 1.0  # seconds before a process that has nothing to do looks again


class Clock:
    """Watches for another watcher, and stops the run as a signal would when the time is over: with a checkpoint."""

    def __init__(self, watch: Progress, limit: float):
        self.watch, self.limit, self.rang = watch, limit, False
        self.beat: Callable[[], None] = lambda: None  # called now and then

    def begin(self, label: str, done: int, rounds: int) -> None:
        self.watch.begin(label, done, rounds)

    def advance(self, label: str, done: int, rows: list[dict[str, Any]] | None) -> None:
        self.watch.advance(label, done, rows)
        self.beat()
        if self.over and not self.rang:
            self.rang = True
            if not callable(signal.getsignal(signal.SIGTERM)):  # ignored, or no thread that may listen
                raise Stopped(signal.SIGTERM, "at its last checkpoint")
            signal.raise_signal(signal.SIGTERM)  # the run's own way to stop: the round ends and is saved

    def end(self, label: str, word: str) -> None:
        self.watch.end(label, word)

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.limit


@dataclass(frozen=True)
class Task:
    """A run or a sweep that is not done yet."""

    kind: str
    name: str
    is_done: Callable[[], bool]
    do: Callable[[Clock], None]


@dataclass
class Reproduction:
    """What goes on, and with what."""

    plan: PartList
    work: Path
    watch: Progress
    device: str | None = None
    precision: str = "auto"
    seconds: float = float("inf")
    commit: str = ""
    say: Any = print
    problems: dict[str, Any] = field(default_factory=dict)  # the last one alone: data of others need not stay
    began: float = field(default_factory=time.monotonic)
    tried: set[Path] = field(default_factory=set)  # by this process: what failed for want of memory is not tried twice
    why: str = ""  # something is left

    def go(self, parts: Sequence[Part]) -> bool:
        """Run what is not done yet; whether all of it is done now, else `why` says what stands in the way."""
        self.work.mkdir(parents=True, exist_ok=True)
        write_whole(self.work / "parts.toml", self.plan.text)
        clock = Clock(self.watch, self.began + self.seconds)
        try:
            # Looked at anew after each: others may have done some of it, and figures wait for sweeps.
            while left := [task for part in parts for task in self.tasks(part)]:
                if clock.over:
                    self.why = "the time is over"
                    return False
                if any(self.done_here(task, clock) for task in left):
                    continue
                if all(self.locked(task.kind, task.name) in self.tried for task in left):
                    self.why = "there was too little memory for some"
                    return False
                if not any(self.waits(part) for part in parts):
                    self.why = "other processes are at the rest"
                    return False
                time.sleep(WAIT)
        except Stopped:
            if not clock.rang:
                raise
            self.why = "the time is over"
            return False
        for part in filter(self.waits, parts):
            self.say(f"{part.name}: waits for the sweep {part.sweep!r}")
        return True

    def done_here(self, task: Task, clock: Clock) -> bool:
        """Do a task, unless another process has it or it was tried before."""
        path = self.locked(task.kind, task.name)
        if path in self.tried:
            return False
        with alone(path) as ours:
            if ours and not task.is_done():
                self.tried.add(path)
                task.do(clock)
        return ours

    def locked(self, kind: str, name: str) -> Path:
        return self.work / "locks" / f"{kind}-{name}"

    def waits(self, part: Part) -> bool:
        """Whether the figures of a part have no tuned values yet."""
        return bool(part.sweep) and winners(self.work, part.sweep) is None

    def tasks(self, part: Part) -> Iterator[Task]:
        """What is left of a part; figures of tuned values wait for their sweep."""
        for name in part.sweeps:
            if winners(self.work, name) is None:
                yield Task("sweep", name, partial(self.swept, name), partial(self.sweep, part, name))
        for experiment, known in experiments(self.plan, part, self.work):
            for entry in entries(experiment, self.work) if known else ():
                if not entry.done:
                    yield Task("run", entry.place.name, partial(getattr, entry, "done"), partial(self.run, part, entry))

    def run(self, part: Part, entry: PoolRun, clock: Clock) -> None:
        problem = self.problem(entry.experiment, validation=False)
        begun = Folder(entry.place).holds_run
        with self.timed(part.name, entry.place.name, "run", clock):
            run(
                entry.experiment, entry.place, clock, device=self.device, resume=begun, overwrite=not begun, force=True,
                save_seconds=SAVE_SECONDS, problem=problem,
                precision="auto" if begun else part.precision or self.precision,  # it goes on as it began
            )  # fmt: skip
        if not entry.failure.startswith(MEMORY):  # there may be more of it the next time
            entry.finish()

    def sweep(self, part: Part, name: str, clock: Clock) -> None:
        wanted, place = self.plan.search(name), self.work / "sweeps" / name
        problem = self.problem(wanted.experiment, validation=True)
        begun = Folder(place).holds_run
        with self.timed(part.name, name, "sweep", clock):
            found = search(
                wanted, place, clock, device=self.device, resume=begun, overwrite=not begun, save_seconds=SAVE_SECONDS,
                precision="auto" if begun else part.precision or self.precision, problem=problem,
            )  # fmt: skip
        notes = [point["note"] for own in found["algorithms"].values() for point in own["points"]]
        if "out of memory" not in notes:  # as above
            (place / DONE).write_text("{}\n", encoding="utf-8")

    def swept(self, name: str) -> bool:
        return winners(self.work, name) is not None

    def problem(self, experiment: Any, validation: bool) -> Any:
        key = json.dumps([experiment.problem.model_dump(), validation])
        if key not in self.problems:
            self.problems.clear()
            self.problems[key] = built(experiment, self.device, validation)
        return self.problems[key]

    @contextmanager
    def timed(self, part: str, name: str, kind: str, clock: Clock) -> Iterator[None]:
        """Keep when it was and how long it took, evaluations and all, by which command of which commit.

        What a killed process took is in a note beside, which it left; whoever goes on with its task keeps that too.
        """
        note = self.work / "begun" / f"{kind}-{name}"
        note.parent.mkdir(exist_ok=True)
        if note.is_file():
            self.keep(note)
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
            self.keep(note)

    def keep(self, note: Path) -> None:
        with open(self.work / TIMES, "a", encoding="utf-8") as file:
            file.write(note.read_text(encoding="utf-8"))
        note.unlink()


def commit_here() -> str:
    """The commit of the checkout that this is run from, with a mark where files differ from it."""
    how: Any = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "check": False}
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], **how)
        changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **how)
    except OSError:
        return "unknown"
    if found.returncode:
        return "unknown"
    return found.stdout.strip() + (" with changes" if changed.stdout.strip() else "")
