"""The parts one after the other, in one process, until all are done or the time is over; the same command goes on."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..folder import Folder
from ..jobs import MEMORY, Progress, Stopped
from ..runner import built, run
from ..sweep import search
from .parts import Part, Plan
from .pool import DONE, Entry, entries

TIMES = "times.jsonl"
SAVE_SECONDS = 60.0


class Clock:
    """Watches for another watcher, and stops the run as a signal would when the time is over: with a checkpoint."""

    def __init__(self, watch: Progress, limit: float):
        self.watch, self.limit, self.rang = watch, limit, False

    def begin(self, label: str, done: int, rounds: int) -> None:
        self.watch.begin(label, done, rounds)

    def advance(self, label: str, done: int, rows: list[dict[str, Any]] | None) -> None:
        self.watch.advance(label, done, rows)
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


@dataclass
class Reproduction:
    """What goes on, and with what."""

    plan: Plan
    work: Path
    watch: Progress
    device: str | None = None
    precision: str = "auto"
    seconds: float = float("inf")
    commit: str = ""
    say: Any = print
    problems: dict[str, Any] = field(default_factory=dict)  # the last one alone: data of others need not stay
    began: float = field(default_factory=time.monotonic)

    def go(self, parts: Sequence[Part]) -> bool:
        """Run what is not done yet; whether all of it is done now."""
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / "parts.toml").write_text(self.plan.text, encoding="utf-8")
        clock = Clock(self.watch, self.began + self.seconds)
        try:
            for part in parts:
                for task in self.tasks(part):
                    if clock.over:
                        return False
                    task(clock)
        except Stopped:
            if not clock.rang:
                raise
            return False
        return True

    def tasks(self, part: Part) -> Iterator[Any]:
        """What is left of a part; figures of tuned values wait for their sweep."""
        for name in part.sweeps:
            if not (self.work / "sweeps" / name / DONE).is_file():
                yield lambda clock, name=name: self.sweep(part, name, clock)
        for experiment in self.experiments(part):
            for entry in entries(experiment, self.work):
                if not entry.done:
                    yield lambda clock, entry=entry: self.run(part, entry, clock)

    def experiments(self, part: Part) -> Iterator[Any]:
        for name in part.pilots:
            yield self.plan.pilot(name)
        for name in part.figures:
            best = self.work / "sweeps" / part.sweep / "best.toml" if part.sweep else None
            if best is not None and not best.is_file():
                self.say(f"{part.name}: {name} waits for the sweep {part.sweep!r}")
                continue
            yield self.plan.figure(part, name, best)

    def run(self, part: Part, entry: Entry, clock: Clock) -> None:
        problem = self.problem(entry.experiment, validation=False)
        begun = Folder(entry.place).holds_run
        with self.timed(part.name, entry.place.name, "run"):
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
        with self.timed(part.name, name, "sweep"):
            search(
                wanted, place, clock, device=self.device, resume=begun, overwrite=not begun, save_seconds=SAVE_SECONDS,
                precision="auto" if begun else part.precision or self.precision, problem=problem,
            )  # fmt: skip
        (place / DONE).write_text("{}\n", encoding="utf-8")

    def problem(self, experiment: Any, validation: bool) -> Any:
        key = json.dumps([experiment.problem.model_dump(), validation])
        if key not in self.problems:
            self.problems.clear()
            self.problems[key] = built(experiment, self.device, validation)
        return self.problems[key]

    @contextmanager
    def timed(self, part: str, name: str, kind: str) -> Iterator[None]:
        """Keep how long it took, evaluations and all, by which command of which commit."""
        began = time.monotonic()
        try:
            yield
        finally:
            row = {"part": part, "kind": kind, "name": name, "wall": round(time.monotonic() - began, 3)}
            row |= {"command": shlex.join(["fedda", *sys.argv[1:]]), "commit": self.commit}
            with open(self.work / TIMES, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


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
