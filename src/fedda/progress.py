"""Who watches a run: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SHOWN = {"test_loss": "loss", "train_loss": "loss", "test_accuracy": "accuracy", "train_accuracy": "accuracy"}


def watcher(labels: list[str]) -> Bars | Lines:
    """A live display where there is a terminal, else lines."""
    return Bars(labels) if sys.stderr.isatty() else Lines()


def headline(rows: list[dict[str, Any]]) -> str:
    """Loss and accuracy, means over the seeds; those of the test set where there is one."""
    words: dict[str, str] = {}
    for key, word in SHOWN.items():
        values = [row[key] for row in rows if row.get(key) is not None]
        if values and word not in words:
            mean = sum(values) / len(values)
            words[word] = f"{word} {mean:.1%}" if word == "accuracy" else f"{word} {mean:.4g}"
    return "  ".join(words.values())


class Lines:
    """One line when an algorithm begins and ends, and one every few seconds between."""

    seconds_between = 5.0

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def begin(self, label: str, done: int, rounds: int) -> None:
        self.first, self.rounds, self.began = done, rounds, time.monotonic()
        self.said, self.words = self.began, ""
        self.say(f"{label}: round {done} of {rounds}" + (" (resumed)" if done else ""))

    def advance(self, label: str, done: int, rows: list[dict[str, Any]] | None) -> None:
        self.words = headline(rows) if rows else self.words
        now = time.monotonic()
        if now - self.said >= self.seconds_between:
            rate = (done - self.first) / (now - self.began)
            left = (self.rounds - done) / rate if rate else 0.0
            self.said = now
            self.say(f"{label}: round {done} of {self.rounds}  {self.words}  {rate:.3g} rounds/s  {left:.0f} s left")

    def end(self, label: str, word: str) -> None:
        self.say(f"{label}: {word} in {time.monotonic() - self.began:.1f} s  {self.words}")

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class Bars(AbstractContextManager["Bars"]):
    """A bar for each algorithm: rounds, loss, accuracy, rounds a second, time left."""

    def __init__(self, labels: list[str]):
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[words]}"),
            TextColumn("{task.fields[rate]}"), TimeRemainingColumn(), console=Console(stderr=True),
        )  # fmt: skip
        self.tasks = {
            label: self.progress.add_task(label, total=None, start=False, words="", rate="") for label in labels
        }

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def begin(self, label: str, done: int, rounds: int) -> None:
        self.first, self.began = done, time.monotonic()
        self.progress.update(self.tasks[label], total=rounds, completed=done)
        self.progress.start_task(self.tasks[label])

    def advance(self, label: str, done: int, rows: list[dict[str, Any]] | None) -> None:
        rate = (done - self.first) / max(time.monotonic() - self.began, 1e-9)
        self.progress.update(self.tasks[label], completed=done, rate=f"{rate:.3g} rounds/s")
        if rows:
            self.progress.update(self.tasks[label], words=headline(rows))

    def end(self, label: str, word: str) -> None:
        self.progress.update(self.tasks[label], rate=word)
        self.progress.stop_task(self.tasks[label])
