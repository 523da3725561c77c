"""A watcher around another one that passes every evaluated row to trackers as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..track import in_folder
from .config import Experiment
from .jobs import Watcher


class Tracked:
    def __init__(self, watch: Watcher, names: list[str], folder: Path, experiment: Experiment):
        self.watch, self.experiment = watch, experiment
        self.trackers = [in_folder(name, folder, experiment.name) for name in names]

    def __enter__(self) -> Tracked:
        for tracker in self.trackers:
            tracker.begin(self.experiment.model_dump())
        return self

    def __exit__(self, *_: Any) -> None:
        for tracker in self.trackers:
            tracker.end()

    def note(self, line: str) -> None:
        self.watch.note(line)

    def begin(self, label: str, done: int, rounds: int) -> None:
        self.watch.begin(label, done, rounds)

    def advance(self, label: str, done: int, rows: list[dict[str, Any]] | None) -> None:
        for tracker in self.trackers:
            for row in rows or []:
                tracker.log(row)
        self.watch.advance(label, done, rows)

    def end(self, label: str, state: str) -> None:
        self.watch.end(label, state)
