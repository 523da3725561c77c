"""A wrapper round a cohort that writes down all that passes: what was sent, asked of the data, and answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import wraps
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import Client, ClientTask, ClientWrapper, CohortWrapper

Tensors = tuple[Tensor, ...]


class RecordedCall(NamedTuple):
    """One fresh mini-batch: the points that were asked about and the gradients there, each [..., K, d]."""

    points: Tensors
    gradients: Tensors


@dataclass
class RecordedExchange:
    """One `cohort.average`: everything that an algorithm let pass between server and clients."""

    down: Tensors
    calls: list[RecordedCall]
    replies: Tensors  # of every client, [..., K, d]
    means: Tensors = ()  # what the server got, where it asked for means


Part = tuple[list[RecordedCall], Tensors]  # of some clients


@dataclass
class Recording(CohortWrapper):
    """Records the exchanges of a round; the algorithm and the engine know nothing of it.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> run = fedda.Run(fedda.make("fedavg", lr=0.5, steps=2), problem)
    >>> cohort = Recording(run.simulation.cohort(0, 2))
    >>> _ = run.algorithm.round(run.server, cohort)
    >>> [call.points[0].flatten().tolist() for call in cohort.exchanges[0].calls]  # where gradients were taken
    [[0.0, 0.0], [0.0, 1.0]]
    """

    exchanges: list[RecordedExchange] = field(default_factory=list)

    def average(self, task: ClientTask, *down: Tensor) -> Tensors:
        parts: list[Part] = []
        means = self.cohort.average(recorded(task, parts), *down)
        self.exchanges.append(exchange(down, parts, means))
        return means

    def replies(self, task: ClientTask, *down: Tensor) -> tuple[list[Tensor], Tensor]:
        parts: list[Part] = []
        replies, weights = self.cohort.replies(recorded(task, parts), *down)
        self.exchanges.append(exchange(down, parts))
        return replies, weights


def recorded(task: ClientTask, parts: list[Part]) -> ClientTask:
    """The task, with what its clients ask and answer put into `parts`: an engine may run them in several, in order."""

    @wraps(task)  # keeps its name and its mark
    def one(client: Client, *down: Tensor) -> Tensors:
        heard = RecordedClient(client)
        replies = task(heard, *down)
        parts.append((heard.calls, tuple(spread(r, client.count) for r in replies)))
        return replies

    return one


def exchange(down: Tensors, parts: list[Part], means: Tensors = ()) -> RecordedExchange:
    """The parts of one exchange put together, client behind client."""
    calls = [
        RecordedCall(*(tuple(map(joined, zip(*column, strict=True))) for column in zip(*same, strict=True)))
        for same in zip(*(calls for calls, _ in parts), strict=True)
    ]
    return RecordedExchange(
        down, calls, tuple(map(joined, zip(*(replies for _, replies in parts), strict=True))), means
    )


class RecordedClient(ClientWrapper):
    """A client whose gradients are written down, with the points they are of."""

    def __init__(self, client: Client):
        super().__init__(client)
        self.calls: list[RecordedCall] = []

    def gradients(self, *points: Tensor, active: Tensor | None = None) -> Tensors:
        found = super().gradients(*points, active=active)
        self.calls.append(RecordedCall(*(tuple(spread(v, self.count) for v in own) for own in (points, found))))
        return found


def spread(value: Tensor, clients: int) -> Tensor:
    """What is the same for all clients, [..., 1, d], given to each of them."""
    return value.expand(*value.shape[:-2], clients, value.shape[-1])


def joined(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
