"""Which rows of the clients' memory travel: from the draws of real rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..engines import Simulation, SingleProcess

ROUNDS, DRAWS = 20, 10**7  # rounds that are drawn; fewer, where they would be more clients than this


def rounds_of(clients: int, cohort: int, seeds: list[int], rounds: int = ROUNDS) -> list[Tensor]:
    """Who takes part in the first rounds, [replicas, cohort] each: what a run of these seeds draws."""
    sizes = torch.ones(1, dtype=torch.float64).expand(clients)
    problem: Any = SimpleNamespace(clients=clients, sizes=sizes, d=0, dtype=torch.float32, device=torch.device("cpu"))
    nobody: Any = None
    simulation = Simulation(problem, nobody, torch.tensor(seeds)[:, None], "samples", ())
    affordable = max(1, DRAWS // (len(seeds) * max(cohort, clients if cohort > clients // 4 else 0)))
    return [simulation.cohort(tau, cohort).ids for tau in range(min(rounds, affordable))]


def travels(drawn: list[Tensor], clients: int, world: int) -> Tensor:
    """How many rows each rank has of what each rank reads, [rounds, owners, readers].

    >>> travels([torch.tensor([[0, 1, 2, 9]])], clients=10, world=2)[0]  # 2 is the first rank's, and read by the second
    tensor([[2, 1],
            [0, 1]])
    """
    ranks = SingleProcess()
    ranks.size = world
    starts = torch.tensor([part.start for part in ranks.parts(clients)])
    found = []
    for ids in drawn:
        owner = torch.searchsorted(starts, ids.contiguous(), right=True) - 1
        reader = torch.cat(
            [torch.full((part.stop - part.start,), p) for p, part in enumerate(ranks.parts(ids.shape[-1]))]
        )
        pairs = owner * world + reader
        found.append(torch.bincount(pairs.flatten(), minlength=world * world).view(world, world))
    return torch.stack(found)
