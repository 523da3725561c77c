"""The cohort that counts the bytes sent and the gradients computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from functools import wraps
from typing import Any

from torch import Tensor

from ..core import Client, ClientTask, ClientWrapper, CohortWrapper


@dataclass
class Counts:
    """Bytes and gradients, summed over clients, per replica."""

    bytes_down: int = 0
    bytes_up: int = 0
    gradients: int = 0  # mini-batch gradient evaluations
    full_gradients: int = 0  # passes over all of a client's data

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass
class Counting(CohortWrapper):
    """A cohort that counts the bytes of the tensors that pass, and the gradients that clients compute.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0, 1.0]], b=[[0.0, 0.0]])
    >>> row = fedda.train(fedda.make("fedavg", steps=3), problem, rounds=1).history[-1]
    >>> row["gradients"], row["bytes_up"], row["bytes_down"]  # x up; x and the step counter down
    (3, 16, 24)
    """

    counts: Counts
    sent: list[Tensor] = field(default_factory=list)  # the tensors sent down in this round
    bytes_of: Callable[[Tensor, Sequence[Tensor]], int] | None = None  # the bytes of a compressed reply
    idle: Any = 0  # gradients in `counts` of clients that were not active, so that none was computed; per replica

    def average(self, task: ClientTask, *down: Tensor) -> tuple[Tensor, ...]:
        means = self.cohort.average(self._count_gradients(task), *down)
        self._count_bytes(down, means)
        return means

    def replies(self, task: ClientTask, *down: Tensor) -> tuple[list[Tensor], Tensor]:
        replies, weights = self.cohort.replies(self._count_gradients(task), *down)
        self._count_bytes(down, replies)
        return replies, weights

    def _count_gradients(self, task: ClientTask) -> ClientTask:
        @wraps(task)  # keeps its name and its mark
        def counted(client: Client, *down: Tensor) -> tuple[Tensor, ...]:
            counted_client = CountedClient(client, self.counts)
            replies = task(counted_client, *down)
            self.idle = self.idle + counted_client.idle
            return replies

        return counted

    def _count_bytes(self, down: Sequence[Tensor], up: Sequence[Tensor]) -> None:
        # A client keeps what it got in the round: a second exchange (Mime's) does not send the same tensor again.
        new = [tensor for tensor in down if not any(tensor is old for old in self.sent)]
        self.sent.extend(new)
        self.counts.bytes_down += self.size * sum(map(message_bytes, new))
        bytes_of = self.bytes_of or (lambda reply, _: message_bytes(reply))
        self.counts.bytes_up += self.size * sum(bytes_of(reply, down) for reply in up)


class CountedClient(ClientWrapper):
    """A client whose gradients are counted: `counts` holds all of them, `idle` those of clients that were not active,
    per replica."""

    def __init__(self, client: Client, counts: Counts):
        super().__init__(client)
        self._counts = counts
        self.idle: Any = 0

    def gradients(self, *points: Tensor, active: Tensor | None = None) -> tuple[Tensor, ...]:
        self._counts.gradients += len(points) * self.count
        active = self.working(active)
        if active is not None:  # this number may change from round to round, so it stays on the device
            inactive = (~active).expand(*active.shape[:-2], self.count, 1)
            self.idle = self.idle + len(points) * inactive.sum(dim=(-2, -1))
        return super().gradients(*points, active=active)

    def full_gradient(self, x: Tensor) -> Tensor:
        self._counts.full_gradients += self.count
        return super().full_gradient(x)


def message_bytes(message: Tensor) -> int:
    """The bytes of one client's message: the last axis of the tensor."""
    return message.element_size() * (message.shape[-1] if message.dim() else 1)
