"""A dry run of an algorithm, its start and one round, on one client whose gradients are zero: it shows all messages."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import Algorithm, ClientTask, ClientWrapper, Move, check_replies, take_new

Shapes = tuple[tuple[int, ...], ...]
Tensors = tuple[Tensor, ...]
OnTask = Callable[[ClientTask, Tensors, Tensors], None]  # called with a task, the tensors sent to it, and its replies


class TaskShapes(NamedTuple):
    """One exchange: the name of the task, the shapes of the tensors sent down and of the replies."""

    task: str
    down: Shapes
    up: Shapes


def dry_run(
    algorithm: Algorithm, x: Tensor, on_task: OnTask = lambda task, down, replies: None
) -> tuple[list[TaskShapes], list[TaskShapes]]:
    """The exchanges of the start and those of one round. `on_task` is called for each of them.

    >>> import fedda
    >>> dry_run(fedda.make("fedda-mvr"), torch.zeros(1, 3))
    ([TaskShapes(task='first', down=((1, 3),), up=((1, 3),))],
     [TaskShapes(task='local', down=((1, 3), (1, 3), (1, 3), (1, 1)), up=((1, 3), (1, 3)))])
    """
    client = ZeroGradientClient(x, algorithm.memory)
    start, round = ZeroGradientCohort(client, on_task), ZeroGradientCohort(client, on_task)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself will warn
        algorithm.round(algorithm.init(x, start), round)
    return start.exchanges, round.exchanges


def takes_client_steps(algorithm: Algorithm, x: Tensor) -> bool:
    """Whether a round takes its local steps by `client.steps`, as clients that work unequally need."""
    client = ZeroGradientClient(x, algorithm.memory)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        algorithm.round(algorithm.init(x, ZeroGradientCohort(client)), ZeroGradientCohort(client))
    return client.took_steps


def decays_weights(algorithm: Algorithm, x: Tensor) -> bool:
    """Whether the weight decay changes a model like x. Tried with gradients of zero and of one: zero gradients can make
    a metric so small that a penalty sets every weight to 0."""
    clients = ZeroGradientClient, UnitGradientClient
    return any(not torch.equal(*with_decay_and_without(algorithm, x, client)) for client in clients)


def with_decay_and_without(algorithm: Algorithm, x: Tensor, client: type["ZeroGradientClient"]) -> list[Tensor]:
    """A model like x after two rounds. In float64, because the first rates of a warm-up are small."""
    x, ends = torch.ones_like(x, dtype=torch.float64), []
    for decay in (0.1, 0.0):
        other = dataclasses.replace(algorithm, weight_decay=decay)
        cohort = ZeroGradientCohort(client(x, other.memory))
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            server = other.init(x, cohort)
            for _ in range(2):  # the first round may only measure
                server = other.round(server, cohort)
        ends.append(server.x)
    return ends


class ZeroGradientClient(ClientWrapper):
    """One client with one sample, whose gradients are all zero. It wraps no other client."""

    count = 1
    active = None

    def __init__(self, x: Tensor, memory: tuple[str, ...]):
        self.one = torch.ones_like(x[..., :1])
        self._memory = {name: torch.zeros_like(x) for name in memory}
        self.took_steps = False

    @property
    def memory(self) -> dict[str, Tensor]:
        return self._memory

    @property
    def samples(self) -> Tensor:
        return self.one

    def uniform(self) -> Tensor:
        return self.one / 2

    def gradients(self, *points: Tensor, active: Tensor | None = None) -> Tensors:
        return tuple(torch.zeros_like(x) for x in points)

    def full_gradient(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def steps(self, number: int) -> Iterator[tuple[int, Move]]:
        self.took_steps = True
        return ((i, take_new) for i in range(number))


class UnitGradientClient(ZeroGradientClient):
    """The same with gradients of ones."""

    def gradients(self, *points: Tensor, active: Tensor | None = None) -> Tensors:
        return tuple(torch.ones_like(x) for x in points)


class ZeroGradientCohort:
    """A cohort of one `ZeroGradientClient` that records the shapes of all messages."""

    size = population = 1

    def __init__(self, client: ZeroGradientClient, on_task: OnTask = lambda task, down, replies: None):
        self.client, self.on_task = client, on_task
        self.exchanges: list[TaskShapes] = []

    @property
    def share(self) -> Tensor:
        return torch.ones(())

    def average(self, task: ClientTask, *down: Tensor) -> Tensors:
        replies = task(self.client, *down)
        check_replies(task, replies, tuple(self.client.one.shape[:-1]))
        self.on_task(task, down, replies)
        sent, received = (tuple(tuple(v.shape) for v in side) for side in (down, replies))
        self.exchanges.append(TaskShapes(task.__name__, sent, received))
        return replies

    def replies(self, task: ClientTask, *down: Tensor) -> tuple[list[Tensor], Tensor]:
        return list(self.average(task, *down)), torch.ones(1, 1)


def model_length(down: Sequence[Tensor]) -> int:
    """The length of the model: it is always sent down, and nothing is longer."""
    return max(v.shape[-1] for v in down)
