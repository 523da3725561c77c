"""The nouns: a Client holds data and memory, an Algorithm holds rules, a Cohort runs the rules on clients and averages.
A Problem says what a gradient is.

Axes: the last axis is the model (a flat vector, the paper's x in R^d), the one before it is the clients. A third axis
in front, the replicas, is optional. Server tensors are [1, d] or [replicas, 1, d], client tensors [clients, d] or
[replicas, clients, d], so that everything broadcasts. Numbers such as step counters are [..., 1, 1].
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, cast, overload

import torch
from torch import Tensor

from . import checks, rng
from .user_code import has_user_code

Layout = list[tuple[str, tuple[int, ...]]]  # names and shapes of the parameters, in the order of the flat vector
ClientTask = Callable[..., tuple[Tensor, ...]]
Move = Callable[[Any, Any], Any]  # move(old, new): the new value for the clients that take this step
A = TypeVar("A")
L = TypeVar("L", bound="LocalWork")
STRAGGLER = -2  # folded into a client's key for the work that it manages; batches fold in their number, from 0


class Number(str):
    """The name of a client memory that is one number, not a vector: ``memory = ("X", Number("t"))``."""


class Client(Protocol):
    """One client, or a stack of them, as a task sees it."""

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

        Args:
            points: where to take gradients, each [..., clients, d] or [..., 1, d].
            active: [..., clients, 1] and boolean, for unequal work: the gradients of the other clients are zero, and
                are not counted.
        """

    def full_gradient(self, x: Tensor) -> Tensor:
        """The gradient over all of the client's data.

        Args:
            x: where to take it.
        """

    def steps(self, number: int) -> Iterator[tuple[int, Move]]:
        """The local steps of a round: ``for i, move in client.steps(self.steps)``. Clients with less work stop earlier:
        ``x = move(x, new)`` changes x only for the others.

        Args:
            number: how many, unless clients work unequally (see `LocalWork`).
        """

    @property
    def active(self) -> Tensor | None:
        """The clients that take the current step, [..., clients, 1] and boolean; None if all do. The gradients of the
        others are zero."""


class ClientWrapper:
    """A client that passes every call on to another client. A subclass changes one of them."""

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

    def steps(self, number: int) -> Iterator[tuple[int, Move]]:
        return self.client.steps(number)

    @property
    def active(self) -> Tensor | None:
        return self.client.active

    def working(self, active: Tensor | None) -> Tensor | None:
        """The clients that are active in the current step and in `active`; None if all are."""
        return both(self.active, active)


def both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Where two masks hold; None holds everywhere."""
    return b if a is None else a if b is None else a & b


def take_new(old: Any, new: Any) -> Any:
    """`move` if all clients take the step."""
    return new


class Cohort(Protocol):
    """The clients of a round (or all of them, at the start)."""

    @property
    def size(self) -> int:
        """How many clients take part."""

    @property
    def population(self) -> int:
        """How many clients exist."""

    @property
    def share(self) -> Tensor:
        """The weight of the clients in this round's means over the weight of all clients: r / K if no client fails."""

    def average(self, task: ClientTask, *down: Tensor) -> tuple[Tensor, ...]:
        """Send the tensors down, run the task on every client, return the means of the replies.

        Args:
            task: a method of the algorithm, marked by `on_client`.
            down: the tensors to send, [..., 1, m].

        Returns:
            The means, [..., 1, m], one for each reply.
        """

    def replies(self, task: ClientTask, *down: Tensor) -> tuple[list[Tensor], Tensor]:
        """The replies and their weights, for wrappers that replace the mean.

        Args:
            task: a method of the algorithm, marked by `on_client`.
            down: the tensors to send, [..., 1, m].

        Returns:
            The replies, each [..., clients, m], and the weights [..., clients, 1]: 0 for a client without a valid
            reply.
        """


@dataclasses.dataclass
class CohortWrapper:
    """A Cohort around another one. A subclass changes `average` and `replies`."""

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


class Evaluated(NamedTuple):
    """The samples of an evaluation, and those of a client's mini-batch."""

    train: int
    others: int  # held out, and those for the statistics of BatchNorm
    batch: int


class Problem:
    """Data over clients, and what a gradient is. Subclass it and write the methods of the first part.

    `ids` are client numbers [..., c], `key` their random keys, of the same shape. A batch may be any object.
    """

    clients: int
    d: int
    sizes: Tensor  # samples of each client, [clients]
    batch_size: int = 1  # samples in a mini-batch
    d_personal: int = 0  # parameters that stay on their clients; they follow the d shared ones in a point
    personal_lr: Any = None  # their rate; None for that of the algorithm
    max_rate: float = math.inf  # a larger first effective rate is refused
    client_names: Sequence[Any] = ()  # the user's names of the clients; else their numbers
    class_names: tuple[str, ...] | None = None  # if the data names its classes
    gradient_paths: Any = None  # for networks: the way in which the gradients of a stack are computed

    @property
    def layout(self) -> Layout:
        """Names and shapes of the parameters, in the order of the flat vector."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of models and gradients."""
        raise NotImplementedError

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Problem:
        """The same problem on another device, or in another dtype.

        Args:
            device: the device; the same by default.
            dtype: the dtype; the same by default.
        """
        raise NotImplementedError

    def start(self, seed: int) -> Tensor:
        """The first model, [d].

        Args:
            seed: the seed of the run.
        """
        raise NotImplementedError

    def batch(self, ids: Tensor, key: Tensor) -> Any:
        """One mini-batch for each of these clients.

        Args:
            ids: client numbers, [..., c].
            key: random keys of the same shape.
        """
        raise NotImplementedError

    def everything(self, client: int) -> Any:
        """All samples of one client, as one batch.

        Args:
            client: its number.
        """
        raise NotImplementedError

    def pick(self, batch: Any, index: tuple[int, ...]) -> Any:
        """The batch of one client out of a stack.

        Args:
            batch: what `batch` gave.
            index: the position in `ids`.
        """
        raise NotImplementedError

    def gradient(self, x: Tensor, batch: Any) -> Tensor:
        """The gradient of one client, [d] from [d], in plain PyTorch. Every faster way must equal it.

        Args:
            x: the model, [d].
            batch: the batch of one client.
        """
        raise NotImplementedError

    def gradients(self, x: Tensor, batch: Any) -> Tensor:
        """The gradients of all clients at once, in the shape of x: [points, ..., c, d]. The points of a client share
        its batch, which has no axis of points.

        Args:
            x: models, [points, ..., c, d].
            batch: what `batch` gave for these clients.
        """
        raise NotImplementedError

    def bytes_per_client(self) -> int:
        """Memory for one client's step: it decides how many clients run at once."""
        raise NotImplementedError

    def evaluate(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Metrics of models [..., d], each [...], with the clients weighted as in the run.

        Args:
            x: models, [..., d].
            weights: the weights of the clients, [clients].
        """
        raise NotImplementedError

    # -- optional: each of these has a default ------------------------------------------------------------------------
    @property
    def noiseless(self) -> bool:
        """Whether every mini-batch gradient is the full gradient."""
        return False

    @property
    def fingerprint(self) -> str:
        """A hash of the data: a run is not resumed on other data. Empty if the problem has none."""
        return ""

    def class_counts(self) -> list[list[int]]:
        """How many samples of each class each client has, for the report; empty if there are no classes."""
        return []

    @property
    def personal_layout(self) -> Layout:
        """Names and shapes of the parameters that stay on their clients."""
        return []

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The parameters that are not trained, by name."""
        return {}

    def personal_start(self, seed: int) -> Tensor:
        """The first values of the parameters that stay on their clients, [d_personal].

        Args:
            seed: the seed of the run.
        """
        raise NotImplementedError

    def personalised(self, personal: Tensor) -> Problem:
        """The same problem, evaluated with these personal parameters of the process's clients, [..., clients, n].

        Args:
            personal: their values, [..., clients, n].
        """
        raise NotImplementedError

    def batches(self, ids: Tensor, keys: Tensor) -> Iterator[Any]:
        """A batch for each of keys [draws, ..., c].

        Args:
            ids: client numbers, [..., c].
            keys: random keys, [draws, ..., c].
        """
        return (self.batch(ids, key) for key in keys)

    def shuffled(self, ids: Tensor, key: Tensor, draws: Tensor) -> Iterator[Any]:
        """Batches of a pass over each client's data in random order, without replacement. Without single samples, they
        are drawn as all batches are.

        Args:
            ids: client numbers, [..., c].
            key: random keys of the same shape, which decide the order.
            draws: the numbers of the batches in the pass.
        """
        return self.batches(ids, rng.fold(key, draws.view(-1, *[1] * key.dim())))

    def subset(self, client: int, index: Tensor) -> Any:
        """Some samples of one client, as one batch: all of them if a problem has no single samples.

        Args:
            client: its number.
            index: the numbers of the samples among those of the client.
        """
        return self.everything(client)

    def batch_loss(self, x: Tensor, batch: Any) -> Tensor | None:
        """The loss of one client's batch at x [d], differentiable; None if the problem has gradients only.

        Args:
            x: the model, [d].
            batch: the batch of one client.
        """
        return None

    def full_gradients(self, x: Tensor) -> Tensor:
        """The full gradient of every client at points [..., 1, d]: [..., clients, d].

        Args:
            x: models, [..., 1, d].
        """
        points = x.reshape(-1, x.shape[-1])
        rows = [torch.stack([self.gradient(p, self.everything(k)) for k in range(self.clients)]) for p in points]
        return torch.stack(rows).view(*x.shape[:-2], self.clients, x.shape[-1])

    def with_path(self, path: str, precision: str, clients: int) -> Problem:
        """The same problem, its gradients computed in another way.

        Args:
            path: "auto", or the name of a path of `fedda.engines.Vectorised`.
            precision: "auto", or a precision of `fedda.engines.Vectorised`.
            clients: how many clients a stack holds.
        """
        if (path, precision) != ("auto", "auto"):
            raise ValueError(f"Vectorised: path and precision are for networks, a {type(self).__name__} has neither")
        return self

    @property
    def calls_user_code(self) -> bool:
        """Whether gradients call code that is not of this library. A compiled round would no longer call it."""
        return has_user_code(self)

    def arithmetic(self) -> AbstractContextManager[None]:
        """The settings of PyTorch that a recorded round must run under."""
        return nullcontext()

    def client_metrics(
        self, x: Tensor, weights: Tensor, mine: Callable[[int], slice], add: Callable[[Sequence[Tensor]], list[Tensor]]
    ) -> dict[str, Tensor]:
        """The metrics of models on the samples of each client of this process: [replicas, clients].

        Args:
            x: models, [replicas, d].
            weights: the weights of the clients.
            mine: which of n items this process has.
            add: sums tensors over all processes.
        """
        part = mine(self.clients)
        part = part if part.stop > part.start else slice(0, 1)
        return self.personal_metrics(x[:, None].expand(-1, part.stop - part.start, -1), part)

    def personal_metrics(self, x: Tensor, clients: slice) -> dict[str, Tensor]:
        """The metrics of each client with a model of its own: [replicas, clients].

        Args:
            x: models, [replicas, clients, d].
            clients: which clients these are.
        """
        only = torch.eye(self.clients, dtype=torch.float64, device=x.device)[clients]
        values = [self.evaluate(x[:, i], weights) for i, weights in enumerate(only)]
        return {n: torch.stack([v[n] for v in values], dim=-1) for n in values[0] if n.startswith("train_")}

    def evaluated(self) -> Evaluated | None:
        """How many samples an evaluation takes; None if that is not known: every evaluation is then complete."""
        return None

    def evaluated_samples(self, samples: int | None) -> int:
        """How many training samples an evaluation takes.

        Args:
            samples: about how many are wanted; None for all.
        """
        raise NotImplementedError

    def metric_names(self, part: str) -> list[str]:
        """The names of the metrics of held-out samples; none without such samples.

        Args:
            part: "validation" or "test".
        """
        return []

    @property
    def directions(self) -> dict[str, str]:
        """Of metrics of a user's own: whether "higher" or "lower" is better."""
        return {}

    def finished(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The metrics, from their means over all processes.

        Args:
            values: the means by name.
        """
        return values

    def totals(
        self, x: Tensor, weights: Tensor, mine: Callable[[int], slice], add: Callable[[Sequence[Tensor]], list[Tensor]]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """For each metric, a weighted sum and the weight, over this process's part of the data. By default one process
        evaluates for all.

        Args:
            x: models, [..., d].
            weights: the weights of the clients.
            mine: which of n items this process has.
            add: sums tensors over all processes.
        """
        here = mine(1)
        weight = torch.tensor(float(here.stop - here.start), device=x.device)
        return {name: (torch.where(weight > 0, v, 0.0), weight) for name, v in self.evaluate(x, weights).items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalWork:
    """Hyper-parameters that every algorithm takes: how much clients work in a round, and what holds for each step.

    By default all clients take `steps` steps. With `epochs`, a client passes so many times over its own data, in a new
    random order each time. With ``make(..., steps="proportional")`` it takes as many steps as one pass has batches, but
    draws them as usual. Then `steps`, the number that the server counts with, is the mean over all clients. A share
    `stragglers` of the clients, other ones in each round, stops early: after 1 to all of its steps, at random.

    `weight_decay` is decoupled: each step also multiplies the model by 1 - eta weight_decay, outside any metric.
    `max_grad_norm` shortens longer mini-batch gradients to this norm. The gradients of one batch at several points
    are scaled by the same factor, that of the first.

    Args:
        epochs: instead of `steps`: passes of a client over its own data per round, in a new random order each.
        proportional: set by `steps="proportional"`.
        stragglers: the share of clients, drawn anew in each round, that stop after 1 to all of their steps.
        weight_decay: each step also multiplies the model by 1 - eta_t weight_decay.
        max_grad_norm: mini-batch gradients that are longer are scaled to this norm; no limit by default.
    """

    epochs: float | None = None
    proportional: bool = False
    stragglers: Any = 0.0
    weight_decay: Any = 0.0
    max_grad_norm: Any = None

    @property
    def unequal(self) -> bool:
        """Whether clients may take different numbers of steps."""
        return self.epochs is not None or self.proportional or positive(self.stragglers)

    def full_work(self, steps: int, sizes: Tensor, batch: int) -> Tensor:
        """The number of steps of clients with these numbers of samples, if none of them stops early."""
        passes = sizes.double() / batch
        if self.epochs is not None:
            return (self.epochs * passes - 1e-9).ceil().long().clamp(min=1)
        return passes.round().long().clamp(min=1) if self.proportional else torch.full_like(sizes, steps)

    def steps_of_clients(self, steps: int, sizes: Tensor, batch: int, key: Tensor) -> Tensor | None:
        """The number of steps of these clients in this round, [..., clients, 1]; None if all take `steps`."""
        if not self.unequal:
            return None
        number = self.full_work(steps, sizes, batch)[..., None]
        if positive(self.stragglers):
            late, part = (rng.uniform(rng.fold(rng.fold(key, STRAGGLER), i))[..., None] for i in (0, 1))
            number = torch.where(late < self.stragglers, 1 + (part * number).floor().long(), number)
        return number

    def with_steps_of(self: L, problem: Problem) -> L:
        """The algorithm with `steps` set to the mean over the clients, if these work in proportion to their data."""
        if self.epochs is None and not self.proportional:
            return self
        mean = self.full_work(0, problem.sizes, problem.batch_size).double().mean()
        return dataclasses.replace(self, steps=max(1, round(float(mean))))  # type: ignore[call-arg]

    def decayed(self, x: Tensor, eta: Any) -> Tensor:
        """x after the weight decay of a step of size eta."""
        return x * (1 - eta * self.weight_decay) if positive(self.weight_decay) else x


def positive(value: Any) -> bool:
    """Whether a number may be above 0: a tensor has one for each replica."""
    return isinstance(value, Tensor) or value > 0


class Algorithm(LocalWork, ABC):
    """Rules with frozen hyper-parameters. It knows no device, process or network.

    A subclass is a frozen dataclass with a NamedTuple `Server` whose first field is `x`, the model that is evaluated.
    Tensors among the hyper-parameters ([replicas, 1, 1], or bounds of a constraint) are moved with the problem.

    Args:
        epochs: instead of `steps`: passes of a client over its own data per round, in a new random order each.
        proportional: set by `steps="proportional"`.
        stragglers: the share of clients, drawn anew in each round, that stop after 1 to all of their steps.
        weight_decay: each step also multiplies the model by 1 - eta_t weight_decay.
        max_grad_norm: mini-batch gradients that are longer are scaled to this norm; no limit by default.
    """

    Server: ClassVar[type]
    memory: ClassVar[tuple[str, ...]] = ()  # what clients keep, zero at first (a property where options decide)
    choices: ClassVar[dict[str, tuple[Any, ...]]] = {}  # the allowed values of a hyper-parameter
    named: ClassVar[dict[str, tuple[str, ...]]] = {}  # values with a name that a number may have instead
    variants: ClassVar[tuple[dict[str, Any], ...]] = ()  # options that change what is sent, kept or drawn, for tests
    one_rate_per_round: ClassVar[bool] = False  # whether all steps of a round take lr(t), and not lr(t + i)
    means_of_memory: ClassVar[dict[str, str]] = {}  # server fields that stay the mean of a memory over ALL clients
    steps: int

    def __post_init__(self) -> None:
        """Refuse bad hyper-parameters by name. A name has the same bounds in every algorithm."""
        owner, fields = type(self).__name__, dataclasses.fields(self)
        params = {field.name: getattr(self, field.name) for field in fields}
        numbers = {name: value for name, value in params.items() if value is not None}
        for name, values in self.named.items():
            if params[name] is None or isinstance(params[name], str):
                checks.one_of(owner, name, numbers.pop(name, None), values)
        checks.check(owner, **numbers)
        if self.epochs is not None and self.proportional:
            raise ValueError(f"{owner}: give epochs or steps='proportional', not both")
        switches = {field.name: (True, False) for field in fields if isinstance(field.default, bool)}
        for name, values in (switches | self.choices).items():
            checks.one_of(owner, name, params[name], values)

    @abstractmethod
    def init(self, x: Tensor, clients: Cohort) -> Any:
        """The first server state.

        Args:
            x: the first model, [..., 1, d].
            clients: all clients.
        """

    @abstractmethod
    def round(self, server: Any, cohort: Cohort) -> Any:
        """One round: the next server state.

        Args:
            server: the state before.
            cohort: the clients of the round.
        """

    def accepts(self, server: Any) -> bool:
        """Whether a state can be that of a run with these options.

        Args:
            server: the state.
        """
        return True

    def first_rate(self, server: Any) -> Tensor | None:
        """The largest effective step size of the first step, or None. A preconditioner can make it far too large.

        Args:
            server: the first state.
        """
        return None

    def mapping(self, server: Any, gradient: Tensor) -> Tensor | None:
        """The gradient mapping: how far one round along the full gradient moves x, per unit of step size. It is 0 at a
        constrained optimum.

        Args:
            server: the state.
            gradient: the full gradient at its x, [..., 1, d].
        """
        return None

    def monitor(self, server: Any) -> dict[str, Tensor]:
        """Numbers to report besides the metrics, each [..., 1, 1].

        Args:
            server: the state.
        """
        return {}


@overload
def on_client(task: A) -> A: ...
@overload
def on_client(*, model_replies: tuple[int, ...]) -> Callable[[A], A]: ...
def on_client(task: Any = None, *, model_replies: tuple[int, ...] = ()) -> Any:
    """Mark a method as a task for clients. Engines run no other method.

    Args:
        task: the method.
        model_replies: the replies that are updated models, by position: the model that was sent (the task's first
            tensor) plus a change. FedAvg's reply is one. FedDA's z is not: it starts at zero. Clipping, noise and
            compression work on the change of such a reply.

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
    """Refuse replies that are not a tuple of tensors [..., clients, m]; `lead` is [..., clients].

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
    """t = 0, one for each replica: [..., 1, 1] (float32 counts to 2^24).

    Args:
        like: the model, [..., 1, d], whose dtype and device it gets.
    """
    return torch.zeros_like(like[..., :1])


def bind_to_problem(thing: A, like: Tensor, layout: Layout) -> A:
    """`thing` for one problem: tensors in its (nested) dataclass fields get the device and dtype of `like`, and maps
    that name parameters, and units of rates, learn the layout of the flat vector."""
    if hasattr(thing, "bind"):
        thing = thing.bind(layout)
    if isinstance(thing, Tensor):
        dtype = like.dtype if thing.is_floating_point() else thing.dtype
        return cast(A, thing.to(device=like.device, dtype=dtype))
    return map_fields(thing, lambda value: bind_to_problem(value, like, layout))


def map_fields(thing: A, function: Callable[[Any], Any]) -> A:
    """A dataclass with its fields changed by a function; anything else, and what does not change, as it is."""
    if not dataclasses.is_dataclass(thing) or isinstance(thing, type):
        return thing
    old = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing) if f.init}
    new = {name: function(value) for name, value in old.items()}
    return dataclasses.replace(thing, **new) if any(new[name] is not old[name] for name in old) else thing
