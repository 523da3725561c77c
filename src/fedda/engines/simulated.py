"""Simulated clients: which of them take part in a round, what they remember, and which batches they draw."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import rng
from ..aggregation.means import mean
from ..core import Algorithm, ClientTask, Move, Number, Problem, both, check_replies, take_new
from .participation import CounterDraws, Draws, Participation
from .world import SINGLE_PROCESS, SingleProcess

PERSONAL = "personal parameters"  # the memory that holds them
UNIFORM = -1  # folded into a client's key for its random numbers; batches fold in their number, from 0
UNEQUAL = 1 << 18  # after steps of unequal work the next batch has a number that is this much higher, on every client
Rate = Callable[[int], Any]
Replies = tuple[list[Tensor], Tensor]  # the replies, each [..., clients, m], and the clients' weights [..., clients, 1]


class Engine(ABC):
    """One way to run a task on the clients of a cohort and to average their replies."""

    graph: bool = False  # whether a round on a GPU is captured as a CUDA graph
    remote: ClassVar[bool] = False  # whether clients keep their memory themselves, elsewhere

    @property
    def world(self) -> SingleProcess:
        """The processes that share the cohort."""
        return SINGLE_PROCESS

    def prepare(self, problem: Problem, clients: int) -> Problem:
        """The problem as this engine runs it.

        Args:
            problem: the user's.
            clients: clients per round.
        """
        return problem

    @abstractmethod
    def replies(self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]) -> Replies:
        """The replies and weights of all clients, in the order of the cohort.

        Args:
            cohort: the clients of the round.
            task: the task of the clients, with its name and mark.
            down: the tensors that are sent.
        """

    def average(self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The means of the replies, in float64 and rounded once.

        Args:
            cohort: the clients of the round.
            task: the task of the clients, with its name and mark.
            down: the tensors that are sent.
        """
        return mean(*self.replies(cohort, task, down))


class Simulation:
    """The clients of one run; `seeds` is [1], or [replicas, 1] for several runs in one program."""

    def __init__(
        self, problem: Problem, engine: Engine, seeds: Tensor, weights: str, memory: tuple[str, ...],
        draws: Draws | None = None, algorithm: Algorithm | None = None, participation: Participation | None = None,
    ):  # fmt: skip
        self.problem, self.engine, self.algorithm = problem, engine, algorithm
        sizes = problem.sizes.to(torch.float64)
        self.participation = (participation or Participation()).to(sizes.device)
        self.draws = CounterDraws(seeds, self.participation, sizes) if draws is None else draws
        self.weights = sizes if weights == "samples" else torch.ones_like(sizes)  # of replies
        # The weights of the clients in the objective, by which models are evaluated.
        self.objective = sizes if self.participation.sampling == "samples" else self.weights
        self.total = self.weights.sum()  # computed once: the time of a round must not grow with the population
        self.world = engine.world
        self.owned = self.world.mine(problem.clients)  # the clients whose memory is in this process
        rows = (*seeds.shape[:-1], self.owned.stop - self.owned.start)
        like = torch.zeros((), dtype=problem.dtype, device=problem.device)
        names = () if engine.remote else memory
        self.memory = {name: like.new_zeros(*rows, 1 if isinstance(name, Number) else problem.d) for name in names}
        # How many batches an exchange drew last time, by the number of batches drawn before it in the round.
        self.expected: dict[int, int] = {}

    def work(self, ids: Tensor, key: Tensor) -> Tensor | None:
        """The number of local steps of these clients, [..., clients, 1]; None if all take the same number."""
        if self.algorithm is None:
            return None
        return self.algorithm.steps_of_clients(
            self.algorithm.steps, self.problem.sizes[ids], self.problem.batch_size, key
        )

    @cached_property
    def most_work(self) -> int:
        """The largest number of local steps that a client may take."""
        assert self.algorithm is not None
        sizes, batch = self.problem.sizes, self.problem.batch_size
        return int(self.algorithm.full_work(self.algorithm.steps, sizes, batch).max())

    def personalised(self) -> Problem:
        """The problem as it is evaluated: with the clients' personal parameters, if there are any."""
        return self.problem.personalised(self.memory[PERSONAL]) if self.problem.d_personal else self.problem

    def everyone(self) -> SimulatedCohort:
        """All clients, for the start of a run."""
        return SimulatedCohort(self, *self.draws.everyone(self.problem.clients), training=False)

    def cohort(self, tau: int | Tensor, size: int) -> SimulatedCohort:
        """The clients of round tau, drawn without replacement."""
        ids, key = self.draws.cohort(tau, self.problem.clients, size)
        available = self.participation.available(tau)
        return SimulatedCohort(
            self, ids, key, None if available is None else available[ids], self.participation.arrives(key)
        )


@dataclass(frozen=True)
class Memory:
    """The memory of all clients that this process owns, by name: [..., clients, m]."""

    values: dict[str, Tensor]
    ids: Tensor  # the clients of the cohort

    def rows(self, part: slice) -> tuple[Any, ...]:
        """The index of the rows that belong to a slice of the cohort."""
        ids = self.ids[..., part]
        if ids.dim() == 1:
            return (ids,)
        return (torch.arange(len(ids), device=ids.device)[:, None], ids)


class SimulatedCohort:
    """A Cohort whose clients live in this process: ids [..., r] and their random keys."""

    def __init__(
        self, simulation: Simulation, ids: Tensor, key: Tensor, available: Tensor | None = None,
        arrives: Tensor | None = None, training: bool = True,
    ):  # fmt: skip
        self.simulation, self.ids, self.key, self.training = simulation, ids, key, training
        self.personal_rate: Rate | None = None  # of the current exchange
        self.size, self.population = ids.shape[-1], simulation.problem.clients
        # Batches drawn in this round: by earlier exchanges, and by all. A second exchange draws fresh ones.
        self.drawn_before = self.drawn_so_far = 0
        self.available = available  # the clients that take part, as [..., r]; None if all do
        replying = both(available, arrives)
        self.replying = torch.ones_like(ids, dtype=torch.bool) if replying is None else replying
        self.finite = self.replying.clone()  # the clients whose replies all arrived and were finite, so far this round
        self.memory = Memory(simulation.memory, ids)
        self.task: ClientTask | None = None  # the task of the current exchange
        self.work = simulation.work(ids, key)  # local steps of each client, [..., r, 1]; None if all take the same

    @property
    def share(self) -> Tensor:
        weight = (self.simulation.weights[self.ids] * self.finite).sum(dim=-1) / self.simulation.total
        return weight[..., None, None].to(self.simulation.problem.dtype)

    def average(self, task: ClientTask, *down: Tensor) -> tuple[Tensor, ...]:
        self._begin(task, down)
        return self.simulation.engine.average(self, task, down)

    def replies(self, task: ClientTask, *down: Tensor) -> Replies:
        self._begin(task, down)
        return self.simulation.engine.replies(self, task, down)

    def _begin(self, task: ClientTask, down: tuple[Tensor, ...]) -> None:
        if not getattr(task, "on_client", False):
            raise ValueError(
                f"{getattr(task, '__qualname__', task)} is not a task for clients: mark it with @on_client"
            )
        self.drawn_before, self.task = self.drawn_so_far, task
        if self.training and self.simulation.problem.d_personal:
            self.personal_rate = personal_rate(self.simulation.problem, task, down)

    def accept_replies(self, clients: ClientStack, replies: tuple[Tensor, ...]) -> Replies:
        """The replies that the server uses, and the clients' weights.

        A client with a non-finite number in any reply gets zeros and weight 0 for the rest of the round. It is counted
        and keeps its old memory.
        """
        ids = clients.ids
        check_replies(self.task, replies, ids.shape)
        full = [reply.expand(*ids.shape, reply.shape[-1]) for reply in replies]
        finite = self.finite[..., clients.part]  # a view: the next lines change self.finite
        for reply in full:
            # The largest entry is finite only if all are. On a CPU this is ten times faster than isfinite.
            finite &= reply.abs().amax(dim=-1) < math.inf
        self.drawn_so_far = max(self.drawn_so_far, clients.drawn_so_far)
        self.simulation.expected[self.drawn_before] = clients.batches_drawn
        clients.remember(finite[..., None])
        weight = (self.simulation.weights[ids] * finite)[..., None]
        if rng.on_cpu(ids) and bool(finite.all()):  # on a GPU this test would wait for the device
            return full, weight
        return [torch.where(finite[..., None], reply, 0) for reply in full], weight


class ClientStack:
    """A slice of a cohort as one Client, with vectors [..., c, d]: one call for all clients, or a loop over them."""

    def __init__(self, cohort: SimulatedCohort, part: slice, stacked: bool):
        self.problem, self.part, self.stacked = cohort.simulation.problem, part, stacked
        self.ids, self.key, self.drawn_before = cohort.ids[..., part], cohort.key[..., part], cohort.drawn_before
        self.count, self._rate = self.ids.shape[-1], cohort.personal_rate
        self._next, self._uniforms = cohort.drawn_before, 0  # the next batch; random numbers drawn in this exchange
        self.batches_drawn = 0  # in this exchange
        self._kept = cohort.memory.values
        self._rows = cohort.memory.rows(part) if self._kept else ()
        self.memory = {name: kept[self._rows] for name, kept in self._kept.items()}
        self._ahead = max(1, cohort.simulation.expected.get(self.drawn_before, 1))
        self._batches: Iterator[Any] = iter(())
        self._algorithm = cohort.simulation.algorithm
        self._work = None if cohort.work is None else cohort.work[..., part, :]
        self._most_work = 0 if self._work is None else cohort.simulation.most_work
        self._available = None if cohort.available is None else cohort.available[..., part, None]
        self.active = self._available  # the clients that take the current step

    @property
    def drawn_so_far(self) -> int:
        """How many batches this round has drawn. An exchange that drew random numbers counts as at least one, so that
        the next exchange draws different numbers."""
        return max(self._next, self.drawn_before + bool(self._uniforms))

    @property
    def samples(self) -> Tensor:
        return self.problem.sizes[self.ids][..., None].to(self.problem.dtype)

    def uniform(self) -> Tensor:
        key = rng.fold(rng.fold(rng.fold(self.key, UNIFORM), self.drawn_before), self._uniforms)
        self._uniforms += 1
        # A number just below 1 would be rounded to 1 in float32.
        below_one = 1 - torch.finfo(self.problem.dtype).eps / 2
        return rng.uniform(key)[..., None].to(self.problem.dtype).clamp(max=below_one)

    def steps(self, number: int) -> Iterator[tuple[int, Move]]:
        if self._work is None:
            for i in range(number):
                yield i, take_new
            return
        most = self._most_work
        if rng.on_cpu(self.ids):  # on a GPU the round is recorded, and the host must not read its work
            most = int(self._work.max()) if self.count else 1
        before = self._next
        for i in range(most):
            active = both(self._available, self._work > i)
            assert active is not None
            self.active = active
            yield i, partial(self._move, active)
        self.active = self._available
        self._next, self._batches = before + UNEQUAL, iter(())

    def _move(self, active: Tensor, old: Any, new: Any) -> Tensor:
        """`new` for the active clients, `old` for the others."""
        like = torch.zeros((), dtype=self.problem.dtype, device=self.key.device)
        old, new = (v if isinstance(v, Tensor) else like + v for v in (old, new))
        return torch.where(active, new, old)

    def gradients(self, *points: Tensor, active: Tensor | None = None) -> tuple[Tensor, ...]:
        active = both(self.active, active)
        if self.problem.d_personal:
            return self._personal_gradients(points, active)
        return self._active_gradients(points, active)

    def _personal_gradients(self, points: tuple[Tensor, ...], active: Tensor | None) -> tuple[Tensor, ...]:
        """The gradients of the shared parameters. The personal ones take a gradient step at the first point."""
        batch, personal = self._next - self.drawn_before, self.memory[PERSONAL]
        full = self._active_gradients(tuple(map(self._with_personal, points)), active)
        if self._rate is not None:
            assert self._algorithm is not None
            rate = self._rate(batch)
            new = self._algorithm.decayed(personal, rate) - rate * full[0][..., self.problem.d :]
            self.memory[PERSONAL] = new if active is None else torch.where(active, new, personal)
        return tuple(g[..., : self.problem.d] for g in full)

    def _with_personal(self, x: Tensor) -> Tensor:
        """The full point of each client: shared parameters, then personal ones."""
        return torch.cat([self._expand(x), self.memory[PERSONAL]], dim=-1) if self.problem.d_personal else x

    def _active_gradients(self, points: tuple[Tensor, ...], active: Tensor | None) -> tuple[Tensor, ...]:
        if active is None:
            return self._clipped(self._gradients(points))
        if self.count and rng.on_cpu(active) and not bool(active.any()):
            self._batch()  # no client works, but the batch is still numbered
            return tuple(torch.zeros_like(self._expand(x)) for x in points)
        return self._clipped(tuple(torch.where(active, g, 0.0) for g in self._gradients(points)))

    def _clipped(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The gradients of one batch, all scaled by the factor that shortens the first to `max_grad_norm`."""
        longest = None if self._algorithm is None else self._algorithm.max_grad_norm
        if longest is None:
            return gradients
        norm = gradients[0].norm(dim=-1, keepdim=True)
        factor = (longest / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1)
        return tuple(factor * g for g in gradients)

    def _gradients(self, points: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self.count:  # a process with no client in this round
            self._next += 1
            return tuple(self._expand(x) for x in points)
        batch = self._batch()
        if self.stacked:
            full = [self._expand(x) for x in points]
            return self.problem.gradients(torch.stack(full) if len(full) > 1 else full[0][None], batch).unbind()
        pick = self.problem.pick
        return tuple(self._each(x, lambda at, x: self.problem.gradient(x, pick(batch, at))) for x in points)

    def _batch(self) -> Any:
        """The next batch. The first call draws as many batches as the same exchange needed last time."""
        batch = next(self._batches, None)
        if batch is None:
            draws = torch.arange(self._next, self._next + self._ahead, device=self.key.device)
            if self._algorithm is not None and self._algorithm.epochs is not None:
                self._batches = self.problem.shuffled(self.ids, self.key, draws)
            else:
                keys = rng.fold(self.key, draws.view(-1, *[1] * self.key.dim()))
                self._batches = iter(self.problem.batches(self.ids, keys))
            self._ahead, batch = 1, next(self._batches)
        self._next, self.batches_drawn = self._next + 1, self.batches_drawn + 1
        return batch

    def full_gradient(self, x: Tensor) -> Tensor:
        everything = self.problem.everything
        gradient = self._each(
            self._with_personal(x), lambda at, x: self.problem.gradient(x, everything(int(self.ids[at])))
        )
        return self._clipped((gradient[..., : self.problem.d],))[0]

    def remember(self, finite: Tensor) -> None:
        """Write the memory of the clients whose replies were finite back into that of all clients."""
        for name, kept in self._kept.items():
            kept[self._rows] = torch.where(finite, self.memory[name], kept[self._rows])

    def _expand(self, x: Tensor) -> Tensor:
        return x.expand(*self.ids.shape, x.shape[-1])

    def _each(self, x: Tensor, gradient: Callable[[tuple[int, ...], Tensor], Tensor]) -> Tensor:
        """A loop over the clients of every replica."""
        x = self._expand(x)
        if not self.count:
            return x
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for at in torch.cartesian_prod(*[torch.arange(n) for n in self.ids.shape]).view(-1, self.ids.dim()).tolist():
            out[tuple(at)] = gradient(tuple(at), x[tuple(at)])
        return out


def personal_rate(problem: Problem, task: ClientTask, down: tuple[Tensor, ...]) -> Rate:
    """The rate of personal parameters at batch i of an exchange: that of the problem, or else of the algorithm. The
    step counter is the task's argument `t`; without one, the rate is that of the first steps."""
    bound = inspect.unwrap(task)
    algorithm = getattr(bound, "__self__", None)
    rate = problem.personal_lr
    if rate is None:
        rate = getattr(algorithm, "rate", getattr(algorithm, "lr", None))
    if rate is None:
        raise ValueError(f"personal: {type(algorithm).__name__} has no lr; give personal_lr")
    names = list(inspect.signature(bound).parameters)[1:]  # without the client
    t: Any = down[names.index("t")] if "t" in names else 0
    return (lambda i: rate(torch.as_tensor(t + i))) if callable(rate) else (lambda i: rate)


def concatenate(chunks: Iterator[Replies]) -> Replies:
    """The replies and weights of all chunks, in their order."""
    replies, weights = zip(*chunks, strict=True)
    return [torch.cat(column, dim=-2) for column in zip(*replies, strict=True)], torch.cat(weights, dim=-2)
