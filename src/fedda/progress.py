"""What a terminal shows: bars while a run goes on (plain lines elsewhere), and tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

SHOWN = {
    "test_loss": "loss",
    "validation_loss": "loss",
    "train_loss": "loss",
    "test_accuracy": "accuracy",
    "validation_accuracy": "accuracy",
    "train_accuracy": "accuracy",
}


def watcher(labels: list[str]) -> Bars | Lines:
    """A live display where there is a terminal that can move its cursor, else lines."""
    console = Console(stderr=True)
    live = sys.stderr.isatty() and not console.is_dumb_terminal
    return Bars(labels, console) if live else Lines()


def headline(rows: list[dict[str, Any]]) -> str:
    """Loss and accuracy, means over the seeds; those of the test set where there is one."""
    words: dict[str, str] = {}
    for key, word in SHOWN.items():
        values = [row[key] for row in rows if row.get(key) is not None]
        if values and word not in words:
            mean = sum(values) / len(values)
            words[word] = f"{word} {mean:.1%}" if word == "accuracy" else f"{word} {mean:#.4g}"
    return "  ".join(words.values())


class Silence:
    """Nobody watches."""

    def __enter__(self) -> Silence:
        return self

    def __exit__(self, *_: Any) -> None: ...
    def begin(self, label: str, done: int, rounds: int) -> None: ...
    def advance(self, label: str, done: int, rows: list[dict[str, Any]] | None) -> None: ...
    def end(self, label: str, word: str) -> None: ...


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
            speed = f"{rate:.3g} rounds/s  {left:.0f} s left"
            self.say(f"{label}: round {done} of {self.rounds}  {self.words}  {speed}")

    def end(self, label: str, word: str) -> None:
        done = f" in {time.monotonic() - self.began:.1f} s  {self.words}" if word == "done" else ""
        self.say(f"{label}: {word}{done}")

    def say(self, line: str) -> None:
        with suppress(OSError):  # a reader that went away does not end a run
            print(line, file=sys.stderr, flush=True)


class Left(ProgressColumn):
    """The time left while an algorithm runs; how it ended after that."""

    def render(self, task: Task) -> Text:
        if task.fields["ended"]:
            return Text(task.fields["ended"])
        if not task.started or not task.fields["rate"]:
            return Text("")
        minutes, seconds = divmod(round((task.remaining or 0) / task.fields["rate"]), 60)
        hours, minutes = divmod(minutes, 60)
        return Text(f"{hours}:{minutes:02d}:{seconds:02d} left")


class Rate(ProgressColumn):
    """Rounds a second, since the algorithm began in this run."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['rate']:.3g} rounds/s" if task.fields["rate"] else "")


class Bars:
    """A bar for each algorithm: rounds, loss, accuracy, rounds a second, time left."""

    def __init__(self, labels: list[str], console: Console):
        # A narrow terminal shortens the label and the bar; the numbers stay whole.
        short = Column(no_wrap=True, overflow="ellipsis", max_width=24)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=short),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            MofNCompleteColumn(table_column=Column(no_wrap=True, justify="right")),
            TextColumn("{task.fields[words]}", markup=False, table_column=Column(no_wrap=True)),
            Rate(table_column=Column(no_wrap=True, justify="right")),
            Left(table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
        )
        self.tasks = {name: self._task(name) for name in labels}

    def _task(self, name: str) -> TaskID:
        return self.progress.add_task(name, total=None, start=False, words="", rate=0.0, ended="")

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        with suppress(OSError):  # the terminal may be gone
            self.progress.stop()

    def begin(self, label: str, done: int, rounds: int) -> None:
        self.first, self.began = done, time.monotonic()
        if label not in self.tasks:
            self.tasks[label] = self._task(label)
        self.progress.update(self.tasks[label], total=rounds, completed=done)
        self.progress.start_task(self.tasks[label])

    def advance(self, label: str, done: int, rows: list[dict[str, Any]] | None) -> None:
        rate = (done - self.first) / max(time.monotonic() - self.began, 1e-9)
        self.progress.update(self.tasks[label], completed=done, rate=rate)
        if rows:
            self.progress.update(self.tasks[label], words=headline(rows))

    def end(self, label: str, word: str) -> None:
        state, _, reason = word.partition(": ")
        self.progress.update(self.tasks[label], ended=state)
        self.progress.stop_task(self.tasks[label])
        if reason:
            self.progress.console.print(f"{label}: {word}", markup=False, highlight=False, emoji=False)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print a table, the first column whole; as wide as the terminal, in a file wide enough."""
    shown = Table(title=title, title_justify="left")
    for head in heads:
        shown.add_column(head, no_wrap=head == heads[0])
    for row in rows:
        shown.add_row(*row)
    # "[b]" in a label is no markup.
    Console(width=None if sys.stdout.isatty() else 500, markup=False, emoji=False, highlight=False).print(shown)
