"""What the ranks of a run do together: the first one reads and writes its folder, and all decide as one."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from ..engines import SINGLE_PROCESS, SingleProcess
from ..runs.folder import Folder, apart

BEAT = 1.0  # seconds between two questions whether to stop or to save: each of them is a message


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, and what is shared out among them: the clients of a round, or the replicas."""

    world: SingleProcess = SINGLE_PROCESS
    shard: str = "clients"

    def engine(self, name: str) -> str:
        if self.world.size == 1 or self.shard == "replicas":
            return name
        if name not in ("auto", "vectorised", "distributed"):
            raise ValueError(f"engine {name!r} is for one process: leave it out, or --shard replicas")
        return "distributed"


SINGLE = Ranks()


class ReadOnlyFolder(Folder):
    """The folder as the other ranks see it: the first one writes it."""

    def refuse_if_taken(self) -> None: ...
    def create(self, files: dict[str, str]) -> None: ...
    def open(self) -> None: ...
    def write(self, name: str, content: str | bytes) -> None: ...
    def append(self, name: str, rows: list[dict[str, Any]]) -> None: ...
    def save(self, label: str, tensors: dict[str, Tensor], **facts: Any) -> None: ...
    def fail(self, label: str, failure: str) -> None: ...
    def tidy(self, lasts: dict[str, int], every: int) -> None: ...
    def note_failures(self) -> None: ...


def folder_of(out: Path, world: SingleProcess) -> Folder:
    return ReadOnlyFolder(out) if world.rank else Folder(out)


def loaded(folder: Folder, label: str, world: SingleProcess) -> tuple[dict[str, Tensor] | None, dict[str, Any]]:
    """An algorithm's last checkpoint, from the first rank."""
    state, facts = folder.load(label)
    if world.size > 1:
        facts = json.loads(world.share(json.dumps([state is not None, facts]).encode()))
        there, facts = facts
        content = world.share(save(apart(state)) if state is not None else b"")
        state = load(content) if there else None
    return state, facts


class Pulse:
    """When the ranks ask each other whether to stop or to save: alone always, else about once a second."""

    def __init__(self, world: SingleProcess, save_seconds: float, round: int):
        self.beat = min(BEAT, save_seconds)
        self.world, self.round, self.next, self.began = world, round, round, time.monotonic()

    def __call__(self, round: int, stop: bool, save: bool) -> tuple[bool, bool]:
        """Whether somebody wants to stop, and whether the first rank wants to save."""
        if self.world.size == 1:
            return stop, save
        if round < self.next:
            return False, False
        now, first = time.monotonic(), float(self.world.rank == 0)
        speed = (round - self.round) / max(now - self.began, 1e-6)
        ahead = max(1.0, min(speed * self.beat, 1e6))  # rounds that take so long
        asked = torch.tensor([float(stop), first * save, first * ahead], dtype=torch.float64)
        stops, saves, rounds = self.world.sum([asked])[0].tolist()
        self.round, self.next, self.began = round, round + int(rounds), now
        return stops > 0, saves > 0
