"""A run whose replicas (seeds, points of a grid) are divided among ranks. A round sends nothing between them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import Algorithm, Problem
from ..engines import SingleProcess
from ..run import Run

REPLICATED = ("counts.", "round")  # names of tensors that all replicas share


class ShardedRun(Run):
    """Runs the replicas of this rank; rows and state are those of all replicas."""

    def __init__(
        self, world: SingleProcess, algorithm: Algorithm, problem: Problem, cohort: int | None, seeds: Sequence[int],
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

    def evaluate(self, detail: bool = False) -> list[dict[str, Any]]:
        (alive,) = self.replica_world.sum([(~self.ended).sum().cpu()])
        if not bool(alive):
            super().raise_if_diverged()
        parts = self.replica_world.collect(json.dumps(super().evaluate(detail)).encode())
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
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        old = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing) if f.init}
        new = {name: cut(value, mine, replicas) for name, value in old.items()}
        if any(new[name] is not old[name] for name in old):
            return dataclasses.replace(thing, **new)
    return thing
