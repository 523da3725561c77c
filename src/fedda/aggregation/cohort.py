"""A cohort whose replies pass through wrappers before they are averaged.

Some replies are moved copies of the model that was sent (FedAvg), others are changes already (FedDA's z). Clipping,
noise and compression make sense for changes only. So the client subtracts the model that was sent (the task's first
tensor) and the server, which sent it, adds it again. A task names these replies: `@on_client(model_replies=(0,))`. The
rule: a reply is a moved copy of the model if, with all gradients zero, it moves by as much as the model does.
`fedda.testing.check_algorithm` finds these replies by moving the model, and compares them with the task's mark.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .. import rng
from ..core import Algorithm, ClientTask, CohortWrapper
from . import gaussian
from .compression import Compression, compress_replies, compressions
from .dry_run import dry_run
from .means import mean
from .wrapper import Exchange, Wrapper, post_process


@dataclass
class Aggregated(CohortWrapper):
    """The cohort of one round with wrappers. `key` [..., 1] is the key of the round, `new_key` makes fresh secrets.

    It wraps the cohort that counts bytes, which therefore sees what travels.
    """

    wrappers: Sequence[Wrapper]
    key: Tensor
    new_key: Callable[[], bytes] = gaussian.new_key
    exchanges: int = 0  # so far in this round

    def average(self, task: ClientTask, *down: Tensor) -> tuple[Tensor, ...]:
        if any(wrapper.combines for wrapper in self.wrappers):
            means = mean(*self._combined(task, down))
        else:  # the engine may work in chunks, or without access to single replies
            means = self.cohort.average(client_side(self.wrappers, task), *down)
        return tuple(self._add_model(task, list(means), down))

    def replies(self, task: ClientTask, *down: Tensor) -> tuple[list[Tensor], Tensor]:
        """The replies after the server parts: one row if a wrapper reduces them."""
        replies, weights = self._combined(task, down)
        return self._add_model(task, replies, down), weights

    def _combined(self, task: ClientTask, down: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
        replies, weights = self.cohort.replies(client_side(self.wrappers, task), *down)
        exchange = Exchange(task.__name__, self.size, rng.fold(self.key, self.exchanges), self.new_key)
        self.exchanges += 1
        return server_side(self.wrappers, replies, weights, exchange)

    def _add_model(self, task: ClientTask, replies: list[Tensor], down: tuple[Tensor, ...]) -> list[Tensor]:
        """Add the model that `reply_changes` subtracted."""
        models = model_replies(task) if relative(self.wrappers) else ()
        return [down[0] + reply if i in models else reply for i, reply in enumerate(replies)]


def client_side(wrappers: Sequence[Wrapper], task: ClientTask) -> ClientTask:
    """What a client runs: the task, replying changes, then the client parts in the order given. Compressions come last
    and act as one."""
    if relative(wrappers):
        task = reply_changes(task)
    for wrapper in wrappers:
        if not isinstance(wrapper, Compression):
            task = wrapper.on_client(task)
    packing = compressions(wrappers)
    return compress_replies(packing, task) if packing else task


def server_side(
    wrappers: Sequence[Wrapper], replies: list[Tensor], weights: Tensor, exchange: Exchange
) -> tuple[list[Tensor], Tensor]:
    """The server parts in the order given. `Aggregated` then takes the mean and adds the model that was subtracted."""
    for wrapper in wrappers:
        if wrapper.combines:
            replies, weights = wrapper.combine(replies, weights, exchange)
    return replies, weights


def relative(wrappers: Sequence[Wrapper]) -> bool:
    """Whether clients send changes instead of models."""
    return any(wrapper.relative for wrapper in wrappers)


def model_replies(task: ClientTask) -> tuple[int, ...]:
    """Which replies of a task are moved copies of the model that was sent."""
    which: tuple[int, ...] = getattr(task, "model_replies", ())
    return which


def reply_changes(task: ClientTask) -> ClientTask:
    """The task, replying how far models have moved."""
    models = model_replies(task)
    if not models:
        return task
    return post_process(
        task, lambda replies, _, down: tuple(r - down[0] if i in models else r for i, r in enumerate(replies))
    )


def refuse_unmarked(task: ClientTask, down: tuple[Tensor, ...], replies: tuple[Tensor, ...]) -> None:
    """Refuse a task that, with all gradients zero, replies the model that was sent and is not marked."""
    for i, reply in enumerate(replies):
        copied = reply.shape == down[0].shape and bool((reply == down[0]).all())
        if copied and bool(reply.any()) and i not in model_replies(task):
            raise ValueError(
                f"aggregation: reply {i} of {task.__qualname__} is a moved copy of the model that was sent: mark the "
                f"task with @on_client(model_replies=({i},))"
            )


def refuse_unfit(wrappers: Sequence[Wrapper], algorithm: Algorithm, x: Tensor) -> None:
    """Refuse wrappers that do not fit a task of the algorithm, before the first round."""

    def check(task: ClientTask, down: tuple[Tensor, ...], replies: tuple[Tensor, ...]) -> None:
        if relative(wrappers):
            refuse_unmarked(task, down, replies)
        for wrapper in wrappers:
            wrapper.fits(task.__name__, len(replies))

    if wrappers:
        dry_run(algorithm, x + 0.1, check)  # not at zero: there a copy of the model looks like any other zero


def residuals(wrappers: Sequence[Wrapper], algorithm: Algorithm, x: Tensor) -> tuple[str, ...]:
    """The names of the vectors that wrappers keep in the memory of clients, for replies that are as long as x."""
    if not any(wrapper.remembers("local", 1) for wrapper in wrappers):
        return ()
    _, round = dry_run(algorithm, x)
    names: dict[str, None] = {}  # an ordered set
    for exchange in round:
        model = max(shape[-1] for shape in exchange.down)  # the longest tensor that is sent
        for wrapper in wrappers:
            remembered = zip(wrapper.remembers(exchange.task, len(exchange.up)), exchange.up, strict=False)
            names |= {name: None for name, shape in remembered if shape[-1] == model}
    return tuple(names)


def check_wrappers(wrappers: Any, owner: str = "train") -> tuple[Wrapper, ...]:
    """The wrappers, if they make sense together.

    >>> from fedda.aggregation import Clip, Float16, Median, Noise
    >>> check_wrappers([Noise(1.0, norm=1.0), Median()])
    Traceback (most recent call last):
    ValueError: train: aggregation can replace the mean only once, got Noise and Median
    """
    if not isinstance(wrappers, Sequence) or not all(
        isinstance(w, Wrapper) and not isinstance(w, type) for w in wrappers
    ):
        raise ValueError(
            f"{owner}: aggregation must be a list of wrappers, such as [fedda.aggregation.Median()], got {wrappers!r}"
        )
    reducing = [type(w).__name__ for w in wrappers if w.reduces]
    if len(reducing) > 1:
        raise ValueError(f"{owner}: aggregation can replace the mean only once, got {' and '.join(reducing)}")
    packing = ""
    for wrapper in wrappers:
        name = type(wrapper).__name__
        if isinstance(wrapper, Compression):
            if [type(w) for w in wrappers].count(type(wrapper)) > 1:
                raise ValueError(f"{owner}: aggregation has {name} twice")
            packing = name
        elif packing and wrapper.on_client(_task) is not _task:
            # It would change the reply after the residual was computed.
            raise ValueError(f"{owner}: aggregation must have {name}, which acts on the client, before {packing}")
    return tuple(wrappers)


def _task(client: Any, *down: Tensor) -> tuple[Tensor, ...]:
    return ()
