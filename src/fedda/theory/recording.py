"""An engine around another one that records a round: what was sent, which gradients were taken, and the replies."""

from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import Client, ClientTask, ClientWrapper, Problem
from ..engines import Engine
from ..engines.world import SingleProcess

Tensors = tuple[Tensor, ...]


class RecordedCall(NamedTuple):
    """One fresh mini-batch: points, and the gradients at these points, each [..., K, d]."""

    points: Tensors
    gradients: Tensors


class RecordedExchange(NamedTuple):
    """One `cohort.average`: everything that passed between server and clients."""

    down: Tensors
    calls: list[RecordedCall]
    replies: Tensors  # of every client, [..., K, d]


Part = tuple[list[RecordedCall], Tensors]  # of some clients


@dataclass
class Recording(Engine):
    """Runs the rounds on `engine` and records its exchanges; the algorithm does not notice it.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> recording = Recording(fedda.engines.Vectorised())
    >>> _ = fedda.Run(fedda.make("fedavg", lr=0.5, steps=2), problem, engine=recording).step()
    >>> [call.points[0].flatten().tolist() for call in recording.exchanges[0].calls]  # where gradients were taken
    [[0.0, 0.0], [0.0, 1.0]]
    """

    engine: Engine
    exchanges: list[RecordedExchange] = field(default_factory=list)
    graph = False  # a captured round would be recorded once only

    def average(self, cohort: Any, task: ClientTask, down: Tensors) -> Tensors:
        parts: list[Part] = []
        means = self.engine.average(cohort, recorded(task, parts), down)
        self.exchanges.append(exchange(down, parts))
        return means

    def replies(self, cohort: Any, task: ClientTask, down: Tensors) -> tuple[list[Tensor], Tensor]:
        parts: list[Part] = []
        replies, weights = self.engine.replies(cohort, recorded(task, parts), down)
        self.exchanges.append(exchange(down, parts))
        return replies, weights

    @property
    def world(self) -> SingleProcess:
        return self.engine.world

    def prepare(self, problem: Problem, clients: int) -> Problem:
        return self.engine.prepare(problem, clients)


def recorded(task: ClientTask, parts: list[Part]) -> ClientTask:
    """The task, which adds the calls and replies of its clients to `parts`. An engine may run several, in order."""

    @wraps(task)  # keeps its name and its mark
    def one(client: Client, *down: Tensor) -> Tensors:
        watched = RecordedClient(client)
        replies = task(watched, *down)
        parts.append((watched.calls, tuple(for_each(reply, client.count) for reply in replies)))
        return replies

    return one


def exchange(down: Tensors, parts: list[Part]) -> RecordedExchange:
    """One exchange from the parts of its clients."""
    calls = [
        RecordedCall(*(joined(*tensors) for tensors in zip(*same, strict=True)))
        for same in zip(*(calls for calls, _ in parts), strict=True)
    ]
    return RecordedExchange(down, calls, joined(*(replies for _, replies in parts)))


class RecordedClient(ClientWrapper):
    """A client whose gradients are recorded, with their points."""

    def __init__(self, client: Client):
        super().__init__(client)
        self.calls: list[RecordedCall] = []

    def gradients(self, *points: Tensor, active: Tensor | None = None) -> Tensors:
        gradients = super().gradients(*points, active=active)
        both = (tuple(for_each(v, self.count) for v in values) for values in (points, gradients))
        self.calls.append(RecordedCall(*both))
        return gradients


def for_each(value: Tensor, clients: int) -> Tensor:
    """[..., clients, d] from a value that all clients share, [..., 1, d]."""
    return value.expand(*value.shape[:-2], clients, value.shape[-1])


def joined(*parts: Tensors) -> Tensors:
    """The tensors of all clients, from those of each part."""
    return tuple(v[0] if len(v) == 1 else torch.cat(v, dim=-2) for v in zip(*parts, strict=True))
