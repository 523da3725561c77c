"""Metrics for TensorBoard, one stream for each algorithm and seed, beside whatever else watches the run."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from .jobs import Progress


class TensorBoard:
    """Watches a run for another watcher, and writes every evaluated row under `place`."""

    def __init__(self, watch: Progress, place: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("--tensorboard needs a package more: pip install 'fedda[tensorboard]'") from None
        self.watch, self.place, self.make = watch, place, SummaryWriter
        self.writers: dict[tuple[str, int], Any] = {}
        self.done = 0

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, at: TracebackType | None) -> None:
        for writer in self.writers.values():
            writer.close()

    def begin(self, label: str, done: int, rounds: int) -> None:
        self.done = done
        self.watch.begin(label, done, rounds)

    def advance(self, label: str, done: int, rows: list[dict[str, Any]] | None) -> None:
        for row in rows or []:
            writer = self.writer(label, row["seed"])
            for key, value in row.items():
                if isinstance(value, float):
                    writer.add_scalar(key, value, row["round"])
        self.watch.advance(label, done, rows)

    def end(self, label: str, word: str) -> None:
        self.watch.end(label, word)

    def writer(self, label: str, seed: int) -> Any:
        if (label, seed) not in self.writers:
            # What an interrupted run wrote after its checkpoint comes again, and must not show twice.
            purge = self.done + 1 if self.done else None
            name = label.replace("/", "-")
            self.writers[label, seed] = self.make(str(self.place / f"{name}, seed {seed}"), purge_step=purge)
        return self.writers[label, seed]
