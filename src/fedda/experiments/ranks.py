"""The ranks of a run: the first one reads and writes the folder, and all decide together."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..engines import SINGLE_PROCESS, SingleProcess
from ..runs.folder import Folder

BEAT = 1.0  # seconds between two messages about stopping and saving


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, and what they share: the clients of a round, or the replicas."""

    world: SingleProcess = SINGLE_PROCESS
    shard: str = "clients"

    def engine(self, name: str) -> str:
        if self.world.size == 1 or self.shard == "replicas":
            return name
        if name not in ("auto", "vectorised", "distributed"):
            raise ValueError(f"engine {name!r} is for one process: leave out --engine, or give --shard replicas")
        return "distributed"


SINGLE = Ranks()


class ReadOnlyFolder(Folder):
    """The folder on ranks other than the first, which alone writes."""

    def refuse_if_taken(self) -> None: ...
    def create(self, files: dict[str, str]) -> None: ...
    def open(self) -> None: ...
    def write(self, name: str, content: str | bytes) -> None: ...
    def append(self, name: str, rows: list[dict[str, Any]]) -> None: ...
    def save(self, label: str, round: int, content: bytes, **facts: Any) -> None: ...
    def fail(self, label: str, failure: str, empty: bytes) -> None: ...
    def tidy(self, last_rounds: dict[str, int], every: int) -> None: ...
    def note_failures(self) -> None: ...


def folder_of(out: Path, world: SingleProcess) -> Folder:
    return ReadOnlyFolder(out) if world.rank else Folder(out)


class Pulse:
    """When the ranks agree on stopping and saving: in every round if alone, else about once a second."""

    def __init__(self, world: SingleProcess, save_seconds: float, round: int):
        self.beat = min(BEAT, save_seconds)
        self.world, self.round, self.next, self.began = world, round, round, time.monotonic()

    def __call__(self, round: int, stop: bool, save: bool) -> tuple[bool, bool]:
        """Whether any rank wants to stop, and whether the first rank wants to save."""
        if self.world.size == 1:
            return stop, save
        if round < self.next:
            return False, False
        now, first = time.monotonic(), float(self.world.rank == 0)
        speed = (round - self.round) / max(now - self.began, 1e-6)
        ahead = max(1.0, min(speed * self.beat, 1e6))  # rounds until the next message
        wishes = torch.tensor([float(stop), first * save, first * ahead], dtype=torch.float64)
        stops, saves, rounds = self.world.sum([wishes])[0].tolist()
        self.round, self.next, self.began = round, round + int(rounds), now
        return stops > 0, saves > 0
