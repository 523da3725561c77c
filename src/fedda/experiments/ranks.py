"""The ranks of a run: the first one reads and writes the folder, all decide together, and they share the clients of a
round or the replicas (seeds, points of a grid)."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..clients import FineTuning
from ..core import Algorithm, Problem, map_fields
from ..engines.world import SINGLE_PROCESS, SingleProcess
from ..run import Run
from ..runs.folder import Folder

BEAT = 1.0  # seconds between two messages about stopping and saving
REPLICATED = ("counts.", "patience.", "round")  # names of tensors that all replicas share


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, and what they share: the clients of a round, or the replicas."""

    world: SingleProcess = SINGLE_PROCESS
    shard: str = "clients"

    def engine_name(self, name: str) -> str:
        """The name of the engine that these ranks use if the user gave `name`."""
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


class ShardedRun(Run):
    """Runs the replicas of this rank, without messages in a round; rows and state are those of all replicas."""

    def __init__(
        self, world: SingleProcess, algorithm: Algorithm, problem: Problem, cohort: float | None, seeds: Sequence[int],
        state: dict[str, Tensor] | None = None, **options: Any,
    ):  # fmt: skip
        if len(seeds) < world.size:
            raise ValueError(f"{world.size} ranks cannot share {len(seeds)} replicas: use fewer, or --shard clients")
        self.replica_world = world  # `self.world`, which shares clients, is this process alone
        mine = world.mine(len(seeds))
        if state is not None:
            state = {k: v if k.startswith(REPLICATED) else v[mine] for k, v in state.items()}
        algorithm = cut(algorithm, mine, len(seeds))
        super().__init__(algorithm, problem, cohort, list(seeds[mine]), state=state, **options)

    def raise_if_diverged(self) -> None:
        """Nothing here: replicas of other ranks may be alive. `evaluate` asks all ranks."""

    def evaluate(self, detail: bool = False, samples: int | None = None) -> list[dict[str, Any]]:
        (alive,) = self.replica_world.sum([(~self.ended).sum().cpu()])
        if not bool(alive):
            super().raise_if_diverged()
        parts = self.replica_world.collect(json.dumps(super().evaluate(detail, samples)).encode())
        return [row for part in parts for row in json.loads(part)]

    def client_rows(self, tuning: FineTuning | None = None) -> list[dict[str, Any]]:
        parts = self.replica_world.collect(json.dumps(super().client_rows(tuning)).encode())
        return [row for part in parts for row in json.loads(part)]

    @property
    def absurd(self) -> Tensor:
        parts = self.replica_world.collect(json.dumps(super().absurd.tolist()).encode())
        return torch.tensor([one for part in parts for one in json.loads(part)])

    def state(self) -> dict[str, Tensor]:
        return {
            name: value if name.startswith(REPLICATED) else self.replica_world.gather(value, 0)
            for name, value in super().state().items()
        }


def cut(thing: Any, mine: slice, replicas: int) -> Any:
    """An algorithm for some of the replicas: slices tensors [replicas, 1, 1] among its (nested) hyper-parameters."""
    if isinstance(thing, Tensor):
        return thing[mine] if thing.dim() == 3 and thing.shape[0] == replicas else thing
    return map_fields(thing, lambda value: cut(value, mine, replicas))
