"""Metrics for TensorBoard: one stream per algorithm and seed, written by a watcher around another one."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from .jobs import Watcher


class TensorBoard:
    """Passes everything on to `watch`, and writes every evaluated row below `folder`."""

    def __init__(self, watch: Watcher, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("--tensorboard needs another package: pip install 'fedda[tensorboard]'") from None
        self.watch, self.folder, self.make = watch, folder, SummaryWriter
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

    def end(self, label: str, state: str) -> None:
        self.watch.end(label, state)

    def writer(self, label: str, seed: int) -> Any:
        if (label, seed) not in self.writers:
            # Rows after the checkpoint of an interrupted run are written again; drop the old ones.
            purge = self.done + 1 if self.done else None
            name = label.replace("/", "-")
            self.writers[label, seed] = self.make(str(self.folder / f"{name}, seed {seed}"), purge_step=purge)
        return self.writers[label, seed]
