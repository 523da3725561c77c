"""What a terminal shows: bars during a run (plain lines without a terminal), the current work, and tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
    """Bars if the terminal can move its cursor, else lines."""
    console = Console(stderr=True)
    live = sys.stderr.isatty() and not console.is_dumb_terminal
    return Bars(labels, console) if live else Lines()


def headline(rows: list[dict[str, Any]]) -> str:
    """Loss and accuracy, means over the seeds; on the test set if there is one."""
    texts: dict[str, str] = {}
    for key, name in SHOWN.items():
        values = [row[key] for row in rows if row.get(key) is not None]
        if values and name not in texts:
            mean = sum(values) / len(values)
            texts[name] = f"{name} {mean:.1%}" if name == "accuracy" else f"{name} {mean:#.4g}"
    return "  ".join(texts.values())


class Silence:
    """Shows nothing."""

    def __enter__(self) -> Silence:
        return self

    def __exit__(self, *_: Any) -> None: ...
    def note(self, line: str) -> None: ...
    def begin(self, label: str, done: int, rounds: int) -> None: ...
    def advance(self, label: str, done: int, rows: list[dict[str, Any]] | None) -> None: ...
    def end(self, label: str, state: str) -> None: ...


class Lines:
    """One line when an algorithm starts and ends, and one every few seconds in between."""

    seconds_between = 5.0

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def note(self, line: str) -> None:
        print_line(line)

    def begin(self, label: str, done: int, rounds: int) -> None:
        self.first, self.rounds, self.began = done, rounds, time.monotonic()
        self.printed, self.headline = self.began, ""
        print_line(f"{label}: round {done} of {rounds}" + (" (resumed)" if done else ""))

    def advance(self, label: str, done: int, rows: list[dict[str, Any]] | None) -> None:
        self.headline = headline(rows) if rows else self.headline
        now = time.monotonic()
        if now - self.printed >= self.seconds_between:
            rate = (done - self.first) / (now - self.began)
            left = (self.rounds - done) / rate if rate else 0.0
            self.printed = now
            speed = f"{rate:.3g} rounds/s  {left:.0f} s left"
            print_line(f"{label}: round {done} of {self.rounds}  {self.headline}  {speed}")

    def end(self, label: str, state: str) -> None:
        done = f" in {time.monotonic() - self.began:.1f} s  {self.headline}" if state == "done" else ""
        print_line(f"{label}: {state}{done}")


class TimeLeftColumn(ProgressColumn):
    """The time left while an algorithm runs, then how it ended."""

    def render(self, task: Task) -> Text:
        if task.fields["ended"]:
            return Text(task.fields["ended"])
        if not task.started or not task.fields["rate"]:
            return Text("")
        minutes, seconds = divmod(round((task.remaining or 0) / task.fields["rate"]), 60)
        hours, minutes = divmod(minutes, 60)
        return Text(f"{hours}:{minutes:02d}:{seconds:02d} left")


class RateColumn(ProgressColumn):
    """Rounds per second since the algorithm started or resumed."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['rate']:.3g} rounds/s" if task.fields["rate"] else "")


class Bars:
    """One bar per algorithm: rounds, loss, accuracy, rounds per second, time left."""

    def __init__(self, labels: list[str], console: Console):
        # A narrow terminal shortens the label and the bar, not the numbers.
        short = Column(no_wrap=True, overflow="ellipsis", max_width=24)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=short),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            MofNCompleteColumn(table_column=Column(no_wrap=True, justify="right")),
            TextColumn("{task.fields[headline]}", markup=False, table_column=Column(no_wrap=True)),
            RateColumn(table_column=Column(no_wrap=True, justify="right")),
            TimeLeftColumn(table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
        )
        self.tasks = {name: self._task(name) for name in labels}

    def _task(self, name: str) -> TaskID:
        return self.progress.add_task(name, total=None, start=False, headline="", rate=0.0, ended="")

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        with suppress(OSError):  # the terminal may be closed
            self.progress.stop()

    def note(self, line: str) -> None:
        self.progress.console.print(line, markup=False, highlight=False, emoji=False)

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
            self.progress.update(self.tasks[label], headline=headline(rows))

    def end(self, label: str, state: str) -> None:
        short, _, reason = state.partition(": ")
        self.progress.update(self.tasks[label], ended=short)
        self.progress.stop_task(self.tasks[label])
        if reason:
            self.progress.console.print(f"{label}: {state}", markup=False, highlight=False, emoji=False)


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Gives a function that shows the current work: one changing line on a terminal, else one line for each call."""
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    if sys.stderr.isatty() and not console.is_dumb_terminal:
        with console.status("") as status:
            yield status.update
    else:
        yield print_line


def print_line(line: str) -> None:
    with suppress(OSError):  # a closed terminal must not end a run
        print(line, file=sys.stderr, flush=True)


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print a table as wide as the terminal, or 500 columns in a file; the first column is never shortened."""
    shown = Table(title=title, title_justify="left")
    for head in heads:
        shown.add_column(head, no_wrap=head == heads[0])
    for row in rows:
        shown.add_row(*row)
    # "[b]" in a label is not markup.
    Console(width=None if sys.stdout.isatty() else 500, markup=False, emoji=False, highlight=False).print(shown)
