"""The cohort over several processes: every rank runs the same program on its part, and all that travels is the sum of
the replies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core import ClientTask
from ..registry import engines
from .joining import join
from .simulated import SimulatedCohort, joined
from .vectorised import Vectorised
from .world import SingleProcess, World


@engines.register("distributed")
@dataclass(frozen=True)
class Distributed(Vectorised):
    """Each of the processes that `torchrun` has started takes a part of the cohort, by place, as `Vectorised` would;
    what a client remembers lies with the rank that owns it and travels when it takes part (docs/scaling.md)."""

    @property
    def world(self) -> World:
        return join()

    def average(self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        world, part = self.world, self.world.mine(cohort.size)
        with fetched_memory(cohort, world):
            totals, weights, dtypes = self.sums(cohort, part, task, down)
        # Few operations: after a wait each of them is slow, as another program has had the processor.
        message = torch.cat([*totals, weights, spoken(cohort.fine, part).unsqueeze(-2)], dim=-1)
        widths = [total.shape[-1] for total in totals]
        sums, weights, heard = world.sum([message])[0].split([sum(widths), 1, cohort.size], dim=-1)
        cohort.fine = heard.squeeze(-2) > 0.5  # everybody must know who has failed
        means = sums / weights
        parts = means.split(widths, dim=-1) if len(widths) > 1 else (means,)
        return tuple(mean.to(dtype) for mean, dtype in zip(parts, dtypes, strict=True))

    def replies(
        self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]
    ) -> tuple[list[Tensor], Tensor]:
        world, part = self.world, self.world.mine(cohort.size)
        with fetched_memory(cohort, world):
            replies, weights = joined(list(self.heard(cohort, part, task, down)))
        rows = [placed(v, part, -2, cohort.size) for v in (*replies, weights)]
        *found, weights, heard = world.sum([*rows, placed(cohort.fine[..., part], part, -1, cohort.size)])
        cohort.fine = heard > 0.5
        return [v.to(reply.dtype) for v, reply in zip(found, replies, strict=True)], weights


def spoken(fine: Tensor, part: slice) -> Tensor:
    """Who of its part a rank has heard, and zeros for the others."""
    if fine.device.type != "cpu":  # what is made while a graph is captured holds nothing yet, and cannot be kept
        return placed(fine[..., part], part, -1, fine.shape[-1])
    return fine * _ones(part.start, part.stop, fine.shape[-1])


@lru_cache(maxsize=8)
def _ones(start: int, stop: int, n: int) -> Tensor:
    return placed(torch.ones(stop - start), slice(start, stop), -1, n)


def placed(values: Tensor, part: slice, dim: int, n: int) -> Tensor:
    """A rank speaks for its part of the n clients, and says nothing of the others: zeros, for a sum over the ranks."""
    shape = list(values.shape)
    shape[dim] = n
    out = torch.zeros(shape, dtype=torch.float64, device=values.device)
    out.narrow(dim, part.start, part.stop - part.start).copy_(values)
    return out


@contextmanager
def fetched_memory(cohort: SimulatedCohort, world: SingleProcess) -> Iterator[None]:
    """The memory of this rank's part of the cohort, fetched from those who own it, and sent back at the end."""
    kept = cohort.kept
    if not kept:
        yield
        return
    own, journey = cohort.rows, MemoryRoute.of(cohort, world)
    widths = [v.shape[-1] for v in kept.values()]
    there = torch.cat([v[journey.given] for v in kept.values()], dim=-1)
    here = world.swap(there, journey.give, journey.take)[journey.back].view(*journey.shape, sum(widths))
    cohort.kept = {name: v.clone() for name, v in zip(kept, here.split(widths, dim=-1), strict=True)}
    first = world.mine(cohort.size).start
    cohort.rows = lambda part: (..., slice(part.start - first, part.stop - first), slice(None))  # type: ignore[method-assign]
    try:
        yield
        here = torch.cat(list(cohort.kept.values()), dim=-1).flatten(0, -2)[journey.order]
        there = world.swap(here, journey.take, journey.give)
        for v, rows in zip(kept.values(), there.split(widths, dim=-1), strict=True):
            v[journey.given] = rows
    finally:
        cohort.kept, cohort.rows = kept, own  # type: ignore[method-assign]


@dataclass(frozen=True)
class MemoryRoute:
    """Which rows of the memory go where in a round. Cohorts are ascending and owners are blocks, so few go far."""

    given: tuple[Any, ...]  # rows that this rank owns and others (or itself) need, in the order of those
    give: list[int]  # how many of them to each rank
    take: list[int]  # how many come from each rank
    order: Tensor  # this rank's part of the cohort, flat, in the order of owners
    back: Tensor  # and from that order back
    shape: tuple[int, ...]

    @classmethod
    def of(cls, cohort: SimulatedCohort, world: SingleProcess) -> MemoryRoute:
        ids = cohort.ids.cpu()  # who needs what decides how many rows travel: the host must know
        population = cohort.population
        starts = torch.tensor([part.start for part in world.parts(population)])
        replica = torch.arange(ids.shape[:-1].numel()).view(*ids.shape[:-1], 1).expand(ids.shape)
        rows, replicas, give = [], [], []
        for part in world.parts(cohort.size):
            wanted, of = ids[..., part].flatten(), replica[..., part].flatten()
            ours = torch.searchsorted(starts, wanted.contiguous(), right=True) - 1 == world.rank
            rows.append(wanted[ours] - int(starts[world.rank]))
            replicas.append(of[ours])
            give.append(int(ours.sum()))
        mine = ids[..., world.mine(cohort.size)]
        owner = torch.searchsorted(starts, mine.flatten().contiguous(), right=True) - 1
        order = torch.argsort(owner, stable=True)
        device = cohort.ids.device
        index = (torch.cat(rows).to(device),)
        given = index if ids.dim() == 1 else (torch.cat(replicas).to(device), *index)
        take = torch.bincount(owner, minlength=world.size).tolist()
        return cls(given, give, take, order.to(device), torch.argsort(order).to(device), tuple(mine.shape))
