"""The three nouns: a Client holds data and memory, an Algorithm rules; a Cohort runs rules on clients and averages.

Axes: the last is the model (a flat vector, the paper's x in R^d), the one before it the clients; a third in front,
the replicas, is optional. Server tensors are [1, d] or [replicas, 1, d], those of clients [clients, d] or
[replicas, clients, d], so that everything broadcasts. Numbers such as step counters are [..., 1, 1].
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar, overload

import torch
from torch import Tensor

from . import checks

Layout = list[tuple[str, tuple[int, ...]]]  # names and shapes of the parameters, in the order of the flat vector
ClientTask = Callable[..., tuple[Tensor, ...]]
A = TypeVar("A")


class Number(str):
    """The name of a client memory that is one number, not a vector: ``memory = ("X", Number("t"))``."""


class Client(Protocol):
    """One client, or a stack of them: what a task may use."""

    @property
    def memory(self) -> dict[str, Tensor]:
        """Vectors (and numbers, see `Number`) that stay on the client between rounds."""

    @property
    def count(self) -> int:
        """How many clients the stack holds."""

    @property
    def samples(self) -> Tensor:
        """How many samples each client of the stack has: [..., clients, 1], in the model's dtype."""

    def uniform(self) -> Tensor:
        """A fresh random number in (0, 1) for each client, [..., clients, 1]: the same in every engine."""

    def gradients(self, *points: Tensor, active: Tensor | None = None) -> tuple[Tensor, ...]:
        """One fresh mini-batch, evaluated at every point given.

        `active`, [..., clients, 1] and boolean, is for unequal work: the gradients of the other clients are zero, and
        are not counted.
        """

    def full_gradient(self, x: Tensor) -> Tensor:
        """The gradient over all of the client's data."""


class ClientWrapper:
    """A client that passes everything on to another. A subclass changes one thing."""

    def __init__(self, client: Client):
        self.client = client

    @property
    def memory(self) -> dict[str, Tensor]:
        return self.client.memory

    @property
    def count(self) -> int:
        return self.client.count

    @property
    def samples(self) -> Tensor:
        return self.client.samples

    def uniform(self) -> Tensor:
        return self.client.uniform()

    def gradients(self, *points: Tensor, active: Tensor | None = None) -> tuple[Tensor, ...]:
        return self.client.gradients(*points, active=active)

    def full_gradient(self, x: Tensor) -> Tensor:
        return self.client.full_gradient(x)


class Cohort(Protocol):
    """The clients of a round (or all of them, at the start)."""

    @property
    def size(self) -> int:
        """How many take part."""

    @property
    def population(self) -> int:
        """How many there are."""

    @property
    def share(self) -> Tensor:
        """The weight of those whose replies are in the means of this round, of everyone's: r / K if nobody fails."""

    def average(self, task: ClientTask, *down: Tensor) -> tuple[Tensor, ...]:
        """Send the tensors down, run the task on every client, give back the mean of the replies."""

    def replies(self, task: ClientTask, *down: Tensor) -> tuple[list[Tensor], Tensor]:
        """The replies themselves, each [..., clients, m], and the weights [..., clients, 1], 0 for who is not heard:
        for wrappers that put something else in the place of the mean."""


@dataclasses.dataclass
class CohortWrapper:
    """What every wrapper round a Cohort passes on as it is; a subclass does something to `average` and `replies`."""

    cohort: Cohort

    @property
    def size(self) -> int:
        return self.cohort.size

    @property
    def population(self) -> int:
        return self.cohort.population

    @property
    def share(self) -> Tensor:
        return self.cohort.share


class Problem(Protocol):
    """What a gradient is. `ids` are client numbers [..., c], `key` their random keys, of the same shape."""

    clients: int
    d: int
    sizes: Tensor  # samples of each client, [clients]
    max_rate: float  # the largest first effective rate that is let through

    @property
    def layout(self) -> Layout: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Problem: ...
    def start(self, seed: int) -> Tensor: ...
    def batch(self, ids: Tensor, key: Tensor) -> Any: ...
    def everything(self, client: int) -> Any: ...
    def gradient(self, x: Tensor, batch: Any) -> Tensor:
        """One client's gradient, [d] from [d], in plain PyTorch: the truth."""

    def gradients(self, x: Tensor, batch: Any) -> Tensor:
        """The gradients of all clients at once, [..., c, d] from the same."""

    def pick(self, batch: Any, index: tuple[int, ...]) -> Any: ...
    def bytes_per_client(self) -> int: ...
    def evaluate(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Metrics of models [..., d], each [...], with the clients weighted as in the run."""


class Algorithm(ABC):
    """Rules with frozen hyper-parameters; knows no device, process or network.

    A subclass is a frozen dataclass with a NamedTuple `Server` whose first field is `x`, the model that is evaluated.
    Tensors among the hyper-parameters ([replicas, 1, 1], or bounds of a constraint) are moved with the problem.
    """

    Server: ClassVar[type]
    memory: ClassVar[tuple[str, ...]] = ()  # what clients keep, zero at first (a property where options decide)
    choices: ClassVar[dict[str, tuple[Any, ...]]] = {}  # the values that a word may take, where they are few
    variants: ClassVar[tuple[dict[str, Any], ...]] = ()  # options that change what is sent, kept or drawn, for tests
    one_rate_per_round: ClassVar[bool] = False  # whether all steps of a round take lr(t), and not lr(t + i)
    means_of_memory: ClassVar[dict[str, str]] = {}  # server fields that stay the mean of a memory over ALL clients
    steps: int

    def __post_init__(self) -> None:
        """Refuse bad hyper-parameters by name; a word's bounds are the same everywhere."""
        name, words = type(self).__name__, {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        checks.check(name, **{word: value for word, value in words.items() if value is not None})
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if isinstance(field.default, bool):
                checks.one_of(name, field.name, words[field.name], (True, False))
        for word, values in self.choices.items():
            checks.one_of(name, word, words[word], values)

    @abstractmethod
    def init(self, x: Tensor, clients: Cohort) -> Any:
        """The first server state from the starting point, with all clients at hand."""

    @abstractmethod
    def round(self, server: Any, cohort: Cohort) -> Any:
        """One round: the next server state."""

    def first_rate(self, server: Any) -> Tensor | None:
        """The largest effective step size of the first step, where a preconditioner can make it absurd."""
        return None

    def mapping(self, server: Any, gradient: Tensor) -> Tensor | None:
        """How far a whole round along the full gradient would move x, for its length: 0 at a constrained optimum."""
        return None

    def monitor(self, server: Any) -> dict[str, Tensor]:
        """Numbers worth watching besides the metrics, each [..., 1, 1]."""
        return {}


@overload
def on_client(task: A) -> A: ...
@overload
def on_client(*, model_replies: tuple[int, ...]) -> Callable[[A], A]: ...
def on_client(task: Any = None, *, model_replies: tuple[int, ...] = ()) -> Any:
    """Mark a method as a task for clients: an engine runs no other.

    `model_replies` names the replies that are moved copies of the model that was sent, which is the task's first
    tensor. FedAvg's reply is one. FedDA's z is not: it begins at zero. Clipping, noise and compression work on the
    change of such a reply.

    >>> @on_client(model_replies=(0,))
    ... def local(self, client, x, t):
    ...     return x - 0.1 * client.gradients(x)[0], t
    >>> local.on_client, local.model_replies
    (True, (0,))
    """

    def mark(task: A) -> A:
        task.on_client, task.model_replies = True, model_replies  # type: ignore[attr-defined]
        return task

    return mark if task is None else mark(task)


def check_replies(task: Any, replies: Any, lead: tuple[int, ...]) -> None:
    """Refuse replies that are not a tuple of tensors [..., clients, m]; `lead` is [..., clients] of who replied.

    >>> check_replies("Mine.local", torch.zeros(3, 4), (3,))
    Traceback (most recent call last):
    ValueError: Mine.local must reply a tuple of tensors, got a Tensor: write `return (x,)`
    """
    name = getattr(task, "__qualname__", task)
    if not isinstance(replies, tuple | list):
        raise ValueError(f"{name} must reply a tuple of tensors, got a {type(replies).__name__}: write `return (x,)`")
    for i, reply in enumerate(replies):
        if not isinstance(reply, Tensor):
            raise ValueError(
                f"{name}: reply {i} must be a tensor, got a {type(reply).__name__}: make it one for each client, such "
                "as `torch.full_like(x[..., :1], value)`"
            )
        shape = tuple(reply.shape)
        if len(shape) == len(lead) + 1 and all(n in (1, most) for n, most in zip(shape, lead, strict=False)):
            continue
        wanted = f"[{', '.join(map(str, lead))}, m]"
        if not shape:
            raise ValueError(
                f"{name}: reply {i} is one number for all clients together, and must be {wanted}: name the axis, such "
                "as `g.norm(dim=-1, keepdim=True)`"
            )
        raise ValueError(
            f"{name}: reply {i} must be {wanted}, one row for each client, got {list(shape)}: reduce the last axis "
            "alone and keep it, such as `g.sum(dim=-1, keepdim=True)`"
        )


def step_counter(like: Tensor) -> Tensor:
    """t = 0, one for each replica: [..., 1, 1], in the model's dtype (float32 counts to 2^24)."""
    return torch.zeros_like(like[..., :1])


def bind_to_problem(thing: A, like: Tensor, layout: Layout) -> A:
    """`thing` made ready for a problem: every tensor in its (nested) dataclass fields on the device and in the dtype of
    `like`, every map that speaks of parameters by name bound to where they stand in the flat vector."""
    if hasattr(thing, "bind"):
        thing = thing.bind(layout)
    if isinstance(thing, Tensor):
        dtype = like.dtype if thing.is_floating_point() else thing.dtype
        moved: Any = thing.to(device=like.device, dtype=dtype)
        return moved
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        old = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing) if f.init}
        new = {name: bind_to_problem(value, like, layout) for name, value in old.items()}
        if any(new[name] is not old[name] for name in old):
            return dataclasses.replace(thing, **new)
    return thing
