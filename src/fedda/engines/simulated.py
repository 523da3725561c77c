"""All clients of a problem in one process: who takes part, what they remember, which batch each of them draws."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import rng
from ..core import ClientTask, Number, Problem, check_replies
from .world import SINGLE_PROCESS, SingleProcess

UNIFORM = -1  # folded into a client's key for its random numbers; batches fold in their number, from 0


class Engine(Protocol):
    """One way to run a task on the clients of a cohort and to average their replies."""

    def average(self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]) -> tuple[Tensor, ...]: ...

    def replies(
        self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]
    ) -> tuple[list[Tensor], Tensor]: ...


class Draws(Protocol):
    """Who takes part in a round, and the random key from which each of them draws its batches."""

    secret: bool  # whether nobody but the server can compute them

    def everyone(self, clients: int) -> tuple[Tensor, Tensor]:
        """All clients, for the start of a run: ids [..., clients] and keys of the same shape."""

    def cohort(self, tau: int | Tensor, clients: int, size: int) -> tuple[Tensor, Tensor]:
        """The clients of round tau, drawn without replacement, in ascending order."""


class CounterDraws:
    """Draws as a function of the seeds, [1] or [replicas, 1], and counters: every run of a comparison has the same."""

    secret = False

    def __init__(self, seeds: Tensor):
        self.keys = torch.stack([rng.key(seeds, purpose) for purpose in (rng.START, rng.COHORT, rng.BATCH)])

    def everyone(self, clients: int) -> tuple[Tensor, Tensor]:
        ids = rng.choose(self.keys[rng.START], clients, clients)
        return ids, rng.fold(self.keys[rng.START], ids)

    def cohort(self, tau: int | Tensor, clients: int, size: int) -> tuple[Tensor, Tensor]:
        who, what = rng.fold(self.keys[rng.COHORT :], tau)
        ids = rng.choose(who, clients, size)
        return ids, rng.fold(what, ids)


class Simulation:
    """The clients of one run; `seeds` is [1], or [replicas, 1] for several runs in one program."""

    def __init__(
        self, problem: Problem, engine: Engine, seeds: Tensor, weights: str, memory: tuple[str, ...],
        draws: Draws | None = None,
    ):  # fmt: skip
        self.problem, self.engine = problem, engine
        self.draws = CounterDraws(seeds) if draws is None else draws
        sizes = problem.sizes.to(torch.float64)
        self.weights = sizes if weights == "samples" else torch.ones_like(sizes)
        self.total = self.weights.sum()  # once: no round may take longer the more clients there are
        self.world: SingleProcess = getattr(engine, "world", SINGLE_PROCESS)
        self.owned = self.world.mine(problem.clients)  # whose memory is kept in this process
        rows = (*seeds.shape[:-1], self.owned.stop - self.owned.start)
        like = torch.zeros((), dtype=problem.dtype, device=problem.device)
        self.memory = {name: like.new_zeros(*rows, 1 if isinstance(name, Number) else problem.d) for name in memory}
        self.expected: dict[int, int] = {}  # batches that an exchange took last time, by those drawn before it

    def everyone(self) -> SimulatedCohort:
        """All clients, for the start of a run."""
        return SimulatedCohort(self, *self.draws.everyone(self.problem.clients))

    def cohort(self, tau: int | Tensor, size: int) -> SimulatedCohort:
        """The clients of round tau, drawn without replacement."""
        return SimulatedCohort(self, *self.draws.cohort(tau, self.problem.clients, size))


class SimulatedCohort:
    """A Cohort whose clients live in this process: ids [..., r] and their random keys."""

    def __init__(self, simulation: Simulation, ids: Tensor, key: Tensor):
        self.simulation, self.ids, self.key = simulation, ids, key
        self.size, self.population = ids.shape[-1], simulation.problem.clients
        self.drawn = self.draws = 0  # batches before and after an exchange: a second one goes on with fresh ones
        self.fine = torch.ones_like(ids, dtype=torch.bool)  # who has sent finite numbers only, so far in this round
        self.kept = simulation.memory  # where members find their memory, and leave it
        self.task: ClientTask | None = None  # of the exchange

    def rows(self, part: slice) -> tuple[Any, ...]:
        """Where the memory of the clients at these places is kept."""
        ids = self.ids[..., part]
        if ids.dim() == 1:
            return (ids,)
        return (torch.arange(len(ids), device=ids.device)[:, None], ids)

    @property
    def share(self) -> Tensor:
        heard = (self.simulation.weights[self.ids] * self.fine).sum(dim=-1) / self.simulation.total
        return heard[..., None, None].to(self.simulation.problem.dtype)

    def average(self, task: ClientTask, *down: Tensor) -> tuple[Tensor, ...]:
        self._begin(task)
        return self.simulation.engine.average(self, task, down)

    def replies(self, task: ClientTask, *down: Tensor) -> tuple[list[Tensor], Tensor]:
        self._begin(task)
        return self.simulation.engine.replies(self, task, down)

    def _begin(self, task: ClientTask) -> None:
        if not getattr(task, "on_client", False):
            raise ValueError(f"{getattr(task, '__qualname__', task)} is no task for clients: mark it with @on_client")
        self.drawn, self.task = self.draws, task

    def accept_replies(self, members: ClientStack, replies: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
        """What the server may use of the replies, each [..., c, m] with zeros for a client with a non-finite number in
        any reply, and the clients' weights [..., c, 1]: such a client is out for the rest of the round, is counted, and
        keeps its old memory."""
        ids = members.ids
        check_replies(self.task, replies, ids.shape)
        full = [reply.expand(*ids.shape, reply.shape[-1]) for reply in replies]
        finite = self.fine[..., members.part]  # a view: what is found here is remembered
        for reply in full:
            # The largest is finite only if all are; isfinite takes ten times as long on a CPU.
            finite &= reply.abs().amax(dim=-1) < math.inf
        self.draws = max(self.draws, members.draws)
        self.simulation.expected[self.drawn] = self.draws - self.drawn
        members.remember(finite[..., None])
        weight = (self.simulation.weights[ids] * finite)[..., None]
        if rng.on_cpu(ids) and bool(finite.all()):  # on a GPU the question would cost more than the answer
            return full, weight
        return [torch.where(finite[..., None], reply, 0) for reply in full], weight


class ClientStack:
    """Some clients of a cohort as one Client: [..., c, d] vectors, one call for all of them or a loop over each."""

    def __init__(self, cohort: SimulatedCohort, part: slice, stacked: bool):
        self.problem, self.part, self.stacked = cohort.simulation.problem, part, stacked
        self.ids, self.key, self.drawn = cohort.ids[..., part], cohort.key[..., part], cohort.drawn
        self.count = self.ids.shape[-1]
        self._next, self._uniforms = cohort.drawn, 0  # the next batch; random numbers drawn in this exchange
        self._kept, self._rows = cohort.kept, cohort.rows(part) if cohort.kept else ()
        self.memory = {name: kept[self._rows] for name, kept in self._kept.items()}
        self._ahead = max(1, cohort.simulation.expected.get(self.drawn, 1))
        self._batches: Iterator[Any] = iter(())

    @property
    def draws(self) -> int:
        """How many batches this round has drawn. An exchange that drew random numbers counts as one at least, so that
        the next exchange gets other numbers."""
        return max(self._next, self.drawn + bool(self._uniforms))

    @property
    def samples(self) -> Tensor:
        return self.problem.sizes[self.ids][..., None].to(self.problem.dtype)

    def uniform(self) -> Tensor:
        key = rng.fold(rng.fold(rng.fold(self.key, UNIFORM), self.drawn), self._uniforms)
        self._uniforms += 1
        # A number just below 1 would be rounded to 1 in float32.
        below_one = 1 - torch.finfo(self.problem.dtype).eps / 2
        return rng.uniform(key)[..., None].to(self.problem.dtype).clamp(max=below_one)

    def gradients(self, *points: Tensor, active: Tensor | None = None) -> tuple[Tensor, ...]:
        if active is None:
            return self._gradients(points)
        if self.count and rng.on_cpu(active) and not bool(active.any()):  # nobody works; the batch keeps its number
            self._batch()
            return tuple(torch.zeros_like(self._spread(x)) for x in points)
        return tuple(torch.where(active, g, 0.0) for g in self._gradients(points))

    def _gradients(self, points: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self.count:  # a process with no client in this round
            self._next += 1
            return tuple(self._spread(x) for x in points)
        batch = self._batch()
        if self.stacked:
            spread = [self._spread(x) for x in points]
            return self.problem.gradients(torch.stack(spread) if len(spread) > 1 else spread[0][None], batch).unbind()
        pick = self.problem.pick
        return tuple(self._each(x, lambda at, x: self.problem.gradient(x, pick(batch, at))) for x in points)

    def _batch(self) -> Any:
        """The next batch: as many as were needed last time are drawn in one go, one after the other beyond them."""
        batch = next(self._batches, None)
        if batch is None:
            draws = torch.arange(self._next, self._next + self._ahead, device=self.key.device)
            self._batches = batches(self.problem, self.ids, rng.fold(self.key, draws.view(-1, *[1] * self.key.dim())))
            self._ahead, batch = 1, next(self._batches)
        self._next += 1
        return batch

    def full_gradient(self, x: Tensor) -> Tensor:
        everything = self.problem.everything
        return self._each(x, lambda at, x: self.problem.gradient(x, everything(int(self.ids[at]))))

    def remember(self, finite: Tensor) -> None:
        for name, kept in self._kept.items():
            kept[self._rows] = torch.where(finite, self.memory[name], kept[self._rows])

    def _spread(self, x: Tensor) -> Tensor:
        return x.expand(*self.ids.shape, self.problem.d)

    def _each(self, x: Tensor, gradient) -> Tensor:  # type: ignore[no-untyped-def]
        """One client after the other, one replica after the other."""
        x = self._spread(x)
        if not self.count:
            return x
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for at in torch.cartesian_prod(*[torch.arange(n) for n in self.ids.shape]).view(-1, self.ids.dim()).tolist():
            out[tuple(at)] = gradient(tuple(at), x[tuple(at)])
        return out


def single_client(problem: Problem, memory: dict[str, Tensor], key: int, drawn: int) -> ClientStack:
    """The only client of a problem, outside a run: its memory [1, d], its random key, and the batches drawn before.
    `remember` writes into `memory`."""
    nothing: Any = None
    simulation = Simulation(problem, nothing, torch.tensor([0]), "uniform", ())
    simulation.memory = memory
    cohort = SimulatedCohort(simulation, torch.tensor([0]), torch.tensor([key]))
    cohort.drawn = drawn
    return ClientStack(cohort, slice(0, 1), stacked=False)


def batches(problem: Problem, ids: Tensor, keys: Tensor) -> Iterator[Any]:
    """A batch for each of keys [draws, ..., c]; a problem may draw them in one go."""
    if hasattr(problem, "batches"):
        return iter(problem.batches(ids, keys))
    return (problem.batch(ids, key) for key in keys)


def joined(heard: list[tuple[list[Tensor], Tensor]]) -> tuple[list[Tensor], Tensor]:
    """The replies and weights of some clients after those of others."""
    replies = [torch.cat(column, dim=-2) for column in zip(*(replies for replies, _ in heard), strict=True)]
    return replies, torch.cat([weight for _, weight in heard], dim=-2)
