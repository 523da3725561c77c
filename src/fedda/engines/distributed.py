"""The cohort over several processes: every rank runs the same program on its part, and one sum joins the replies."""

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
from .simulated import Memory, Replies, SimulatedCohort, concatenate
from .vectorised import Vectorised
from .world import SingleProcess, World, join


@engines.register("distributed")
@dataclass(frozen=True)
class Distributed(Vectorised):
    """Each process that `torchrun` started runs a slice of the cohort, as `Vectorised` would. A client's memory lies
    with the rank that owns the client, and travels when the client takes part (docs/scaling.md).

    Args:
        chunk: clients at a time; by default as many as the memory holds.
        memory_gb: the memory for their vectors and activations; by default 2 GB on a CPU, a quarter of what is free on
            a GPU.
        graph: on a GPU, capture a round as one CUDA graph and replay it.
        path: how the gradients of a stack of clients are computed (docs/performance.md); "auto" measures.
        precision: "float32", "tf32" or "bf16"; "auto" is the most precise of the fast ones.
    """

    @property
    def world(self) -> World:
        return join()

    def average(self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        world, part = self.world, self.world.mine(cohort.size)
        with fetched_memory(cohort, world):
            totals, weight, dtypes = self.sums(cohort, part, task, down)
        # One message and few operations: the first operations after a wait are slow.
        message = torch.cat([*totals, weight, only_ours(cohort.finite, part).unsqueeze(-2)], dim=-1)
        widths = [total.shape[-1] for total in totals]
        sums, weight, finite = world.sum([message])[0].split([sum(widths), 1, cohort.size], dim=-1)
        cohort.finite = finite.squeeze(-2) > 0.5  # every rank must know which clients failed
        means = sums / weight
        parts = means.split(widths, dim=-1) if len(widths) > 1 else (means,)
        return tuple(mean.to(dtype) for mean, dtype in zip(parts, dtypes, strict=True))

    def replies(self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]) -> Replies:
        world, part = self.world, self.world.mine(cohort.size)
        with fetched_memory(cohort, world):
            replies, weights = concatenate(self.chunks(cohort, part, task, down))
        rows = [padded(v, part, -2, cohort.size) for v in (*replies, weights)]
        finite = padded(cohort.finite[..., part], part, -1, cohort.size)
        *sums, weights, finite = world.sum([*rows, finite])
        cohort.finite = finite > 0.5
        return [v.to(reply.dtype) for v, reply in zip(sums, replies, strict=True)], weights


def only_ours(finite: Tensor, part: slice) -> Tensor:
    """This rank's slice of the flags, and zeros for the clients of other ranks."""
    if finite.device.type != "cpu":  # a cached tensor must not be created while a graph is captured
        return padded(finite[..., part], part, -1, finite.shape[-1])
    return finite * _mask(part.start, part.stop, finite.shape[-1])


@lru_cache(maxsize=8)
def _mask(start: int, stop: int, n: int) -> Tensor:
    return padded(torch.ones(stop - start), slice(start, stop), -1, n)


def padded(values: Tensor, part: slice, dim: int, n: int) -> Tensor:
    """This rank's slice of n clients, in float64, with zeros for the others: ready for a sum over the ranks."""
    shape = list(values.shape)
    shape[dim] = n
    out = torch.zeros(shape, dtype=torch.float64, device=values.device)
    out.narrow(dim, part.start, part.stop - part.start).copy_(values)
    return out


@dataclass(frozen=True)
class FetchedMemory(Memory):
    """Copies of the rows of one slice of the cohort, in its order. `first` is where the slice starts."""

    first: int

    def rows(self, part: slice) -> tuple[Any, ...]:
        return (..., slice(part.start - self.first, part.stop - self.first), slice(None))


@contextmanager
def fetched_memory(cohort: SimulatedCohort, world: SingleProcess) -> Iterator[None]:
    """Fetch the memory of this rank's slice of the cohort from the ranks that own it; at the end, send it back."""
    owned = cohort.memory
    if not owned.values:
        yield
        return
    route = MemoryRoute.of(cohort, world)
    widths = [v.shape[-1] for v in owned.values.values()]
    rows = torch.cat([v[route.sent] for v in owned.values.values()], dim=-1)
    rows = world.swap(rows, route.give, route.take)[route.back].view(*route.shape, sum(widths))
    copies = {name: v.clone() for name, v in zip(owned.values, rows.split(widths, dim=-1), strict=True)}
    cohort.memory = FetchedMemory(copies, cohort.ids, world.mine(cohort.size).start)
    try:
        yield
        rows = torch.cat(list(copies.values()), dim=-1).flatten(0, -2)[route.order]
        rows = world.swap(rows, route.take, route.give)
        for v, new in zip(owned.values.values(), rows.split(widths, dim=-1), strict=True):
            v[route.sent] = new
    finally:
        cohort.memory = owned


@dataclass(frozen=True)
class MemoryRoute:
    """Which rows of memory go to which rank in a round. Cohorts are sorted and owners are blocks, so few travel."""

    sent: tuple[Any, ...]  # the rows that this rank owns and that some rank needs, sorted by that rank
    give: list[int]  # how many rows go to each rank
    take: list[int]  # how many rows come from each rank
    order: Tensor  # this rank's slice of the cohort, flat, sorted by owner
    back: Tensor  # the inverse of `order`
    shape: tuple[int, ...]

    @classmethod
    def of(cls, cohort: SimulatedCohort, world: SingleProcess) -> MemoryRoute:
        ids = cohort.ids.cpu()  # the host must know how many rows travel
        starts = torch.tensor([part.start for part in world.parts(cohort.population)])
        replica = torch.arange(ids.shape[:-1].numel()).view(*ids.shape[:-1], 1).expand(ids.shape)
        rows, replicas, give = [], [], []
        for part in world.parts(cohort.size):
            needed = ids[..., part].flatten()
            ours = _owners(starts, needed) == world.rank
            rows.append(needed[ours] - int(starts[world.rank]))
            replicas.append(replica[..., part].flatten()[ours])
            give.append(int(ours.sum()))
        mine = ids[..., world.mine(cohort.size)]
        owner = _owners(starts, mine.flatten())
        order = torch.argsort(owner, stable=True)
        device = cohort.ids.device
        sent: tuple[Tensor, ...] = (torch.cat(rows).to(device),)
        if ids.dim() > 1:
            sent = (torch.cat(replicas).to(device), *sent)
        take = torch.bincount(owner, minlength=world.size).tolist()
        return cls(sent, give, take, order.to(device), torch.argsort(order).to(device), tuple(mine.shape))


def _owners(starts: Tensor, ids: Tensor) -> Tensor:
    """The rank that owns each client."""
    return torch.searchsorted(starts, ids.contiguous(), right=True) - 1
