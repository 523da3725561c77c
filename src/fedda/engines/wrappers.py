"""Wrappers round a Cohort: what they add, no algorithm and no engine knows of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from functools import wraps
from typing import Any

from torch import Tensor

from ..core import Client, ClientTask, ClientWrapper, CohortWrapper


@dataclass
class Counts:
    """What has travelled and what was computed, summed over clients (for each replica)."""

    bytes_down: int = 0
    bytes_up: int = 0
    gradients: int = 0  # mini-batch gradient evaluations
    full_gradients: int = 0  # passes over all of a client's data

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass
class Counting(CohortWrapper):
    """Counts bytes and gradients from what really passes.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0, 1.0]], b=[[0.0, 0.0]])
    >>> row = fedda.train(fedda.make("fedavg", steps=3), problem, rounds=1).history[-1]
    >>> row["gradients"], row["bytes_up"], row["bytes_down"]  # x up; x and the step counter down
    (3, 16, 24)
    """

    counts: Counts
    sent: list[Tensor] = field(default_factory=list)  # in this round
    bytes_of: Callable[[Tensor, Sequence[Tensor]], int] | None = None  # a reply's, packed, from what was sent down
    idle: Any = 0  # gradients in `counts` that nobody computed, of clients that were not active; one for each replica

    def average(self, task: ClientTask, *down: Tensor) -> tuple[Tensor, ...]:
        means = self.cohort.average(self._counted(task), *down)
        self._sent(down, means)
        return means

    def replies(self, task: ClientTask, *down: Tensor) -> tuple[list[Tensor], Tensor]:
        replies, weights = self.cohort.replies(self._counted(task), *down)
        self._sent(down, replies)
        return replies, weights

    def _counted(self, task: ClientTask) -> ClientTask:
        @wraps(task)  # keeps its name and its mark
        def counted(client: Client, *down: Tensor) -> tuple[Tensor, ...]:
            watched = CountedClient(client, self.counts)
            replies = task(watched, *down)
            self.idle = self.idle + watched.idle
            return replies

        return counted

    def _sent(self, down: Sequence[Tensor], up: Sequence[Tensor]) -> None:
        # A client keeps what it got in the round: in a second exchange (Mime's) the same tensor is not sent again.
        news = [tensor for tensor in down if not any(tensor is old for old in self.sent)]
        self.sent.extend(news)
        self.counts.bytes_down += self.size * sum(map(message_bytes, news))
        weigh = self.bytes_of or (lambda reply, _: message_bytes(reply))
        self.counts.bytes_up += self.size * sum(weigh(reply, down) for reply in up)


class CountedClient(ClientWrapper):
    """A client whose gradient evaluations are counted: all that were asked for in `counts`, and in `idle` those of
    clients that were not active, for each replica."""

    def __init__(self, client: Client, counts: Counts):
        super().__init__(client)
        self._counts = counts
        self.idle: Any = 0

    def gradients(self, *points: Tensor, active: Tensor | None = None) -> tuple[Tensor, ...]:
        self._counts.gradients += len(points) * self.count
        if active is not None:  # how many are active may differ from round to round: no number for the host
            inactive = (~active).expand(*active.shape[:-2], self.count, 1)
            self.idle = self.idle + len(points) * inactive.sum(dim=(-2, -1))
        return super().gradients(*points, active=active)

    def full_gradient(self, x: Tensor) -> Tensor:
        self._counts.full_gradients += self.count
        return super().full_gradient(x)


def message_bytes(message: Tensor) -> int:
    """Bytes of one client's message: the last axis, or a scalar; clients and replicas are other messages."""
    return message.element_size() * (message.shape[-1] if message.dim() else 1)
