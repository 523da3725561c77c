"""What an algorithm will ask of its clients, found by asking for it: a start and a round on one client whose gradients
are all zero."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import Algorithm, ClientTask, ClientWrapper, check_replies

Shapes = tuple[tuple[int, ...], ...]


class Asked(NamedTuple):
    """One exchange: the task, and the shapes of the tensors that go down with it and of the replies."""

    task: str
    down: Shapes
    up: Shapes

    @property
    def longest(self) -> int:
        """How long the longest tensor sent is: as long as the model."""
        return max(shape[-1] for shape in self.down)

    @property
    def replies(self) -> tuple[int, ...]:
        """How long the replies are."""
        return tuple(shape[-1] for shape in self.up)


Tensors = tuple[Tensor, ...]
Look = Callable[[ClientTask, Tensors, Tensors], None]  # a task, what was sent to it, and its replies


def foreseen(
    algorithm: Algorithm, x: Tensor, look: Look = lambda task, down, replies: None
) -> tuple[list[Asked], list[Asked]]:
    """The exchanges of the start, and those of a round; `look` sees every task.

    >>> import fedda
    >>> foreseen(fedda.make("fedda-mvr"), torch.zeros(1, 3))
    ([Asked(task='first', down=((1, 3),), up=((1, 3),))],
     [Asked(task='local', down=((1, 3), (1, 3), (1, 3), (1, 1)), up=((1, 3), (1, 3)))])
    """
    client = ZeroGradientClient(x, algorithm.memory)
    start, round = ZeroGradientCohort(client, look), ZeroGradientCohort(client, look)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself will warn
        algorithm.round(algorithm.init(x, start), round)
    return start.asked, round.asked


class ZeroGradientClient(ClientWrapper):
    """One client, with one sample, whose gradients are all zero. There is no other client behind it."""

    count = 1

    def __init__(self, x: Tensor, memory: tuple[str, ...]):
        self.one = torch.ones_like(x[..., :1])
        self._memory = {name: torch.zeros_like(x) for name in memory}

    @property
    def memory(self) -> dict[str, Tensor]:
        return self._memory

    @property
    def samples(self) -> Tensor:
        return self.one

    def uniform(self) -> Tensor:
        return self.one / 2

    def gradients(self, *points: Tensor, active: Tensor | None = None) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(x) for x in points)

    def full_gradient(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class ZeroGradientCohort:
    """The cohort of that client."""

    size = population = 1

    def __init__(self, client: ZeroGradientClient, look: Look = lambda task, down, replies: None):
        self.client, self.look = client, look
        self.asked: list[Asked] = []

    @property
    def share(self) -> Tensor:
        return torch.ones(())

    def average(self, task: ClientTask, *down: Tensor) -> tuple[Tensor, ...]:
        replies = task(self.client, *down)
        check_replies(task, replies, tuple(self.client.one.shape[:-1]))
        self.look(task, down, replies)
        self.asked.append(Asked(task.__name__, *(tuple(tuple(v.shape) for v in side) for side in (down, replies))))
        return replies

    def replies(self, task: ClientTask, *down: Tensor) -> tuple[list[Tensor], Tensor]:
        return list(self.average(task, *down)), torch.ones(1, 1)


def longest(down: Sequence[Tensor]) -> int:
    """As long as the model: it is always among what is sent."""
    return max(v.shape[-1] for v in down)
