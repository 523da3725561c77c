"""A Cohort of a Cohort: replies pass through wrappers before they are averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .. import rng
from ..core import Algorithm, ClientTask, CohortWrapper
from . import centres, gaussian
from .compression import Compression, compressed, compressions
from .foreseen import foreseen
from .means import mean
from .wrapper import Exchange, Wrapper


@dataclass
class Aggregated(CohortWrapper):
    """The cohort of one round with wrappers round it; `key` [..., 1] is the round's, `new_key` gives fresh secrets.

    It stands outside whatever counts bytes, which then sees what travels.
    """

    wrappers: Sequence[Wrapper]
    key: Tensor
    new_key: Callable[[], bytes] = gaussian.new_key
    exchanges: int = 0  # so far in this round

    def average(self, task: ClientTask, *down: Tensor) -> tuple[Tensor, ...]:
        if any(wrapper.combines for wrapper in self.wrappers):
            means = mean(*self._changes(task, down))
        else:  # the engine may take it piece by piece, or without ever seeing a single reply
            means = self.cohort.average(client_side(self.wrappers, task), *down)
        return tuple(self._whole(task, list(means), down))

    def replies(self, task: ClientTask, *down: Tensor) -> tuple[list[Tensor], Tensor]:
        """As they are left: one row where a wrapper reduces them."""
        replies, weights = self._changes(task, down)
        return self._whole(task, replies, down), weights

    def _changes(self, task: ClientTask, down: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
        replies, weights = self.cohort.replies(client_side(self.wrappers, task), *down)
        exchange = Exchange(task.__name__, self.size, rng.fold(self.key, self.exchanges), self.new_key)
        self.exchanges += 1
        return server_side(self.wrappers, replies, weights, exchange)

    def _whole(self, task: ClientTask, found: list[Tensor], down: tuple[Tensor, ...]) -> list[Tensor]:
        return centres.models(task, found, down) if relative(self.wrappers) else found


def client_side(wrappers: Sequence[Wrapper], task: ClientTask) -> ClientTask:
    """What a client runs: the task, replying changes, and the client parts in the order given; compressions, which are
    the last of them, as one."""
    if relative(wrappers):
        task = centres.changes(task)
    for wrapper in wrappers:
        if not isinstance(wrapper, Compression):
            task = wrapper.on_client(task)
    packing = compressions(wrappers)
    return compressed(packing, task) if packing else task


def server_side(
    wrappers: Sequence[Wrapper], replies: list[Tensor], weights: Tensor, exchange: Exchange
) -> tuple[list[Tensor], Tensor]:
    """What the server does with the replies that come: the server parts in the order given; the mean is still to be
    taken, and the model that was sent to be added where a reply is a moved copy of it (`Aggregated` does both)."""
    for wrapper in wrappers:
        if wrapper.combines:
            replies, weights = wrapper.combine(replies, weights, exchange)
    return replies, weights


def relative(wrappers: Sequence[Wrapper]) -> bool:
    """Whether changes travel, and not models."""
    return any(wrapper.relative for wrapper in wrappers)


def refuse_unfit(wrappers: Sequence[Wrapper], algorithm: Algorithm, x: Tensor) -> None:
    """Refuse wrappers that can do nothing with a task of the algorithm, before it is asked."""

    def look(task: ClientTask, down: tuple[Tensor, ...], replies: tuple[Tensor, ...]) -> None:
        if relative(wrappers):
            centres.refuse_unmarked(task, down, replies)
        for wrapper in wrappers:
            wrapper.fits(task.__name__, len(replies))

    if wrappers:
        foreseen(algorithm, x + 0.1, look)  # not at zero, where a copy of the model is like any other zero


def residuals(wrappers: Sequence[Wrapper], algorithm: Algorithm, x: Tensor) -> tuple[str, ...]:
    """The names of what wrappers keep in the memory of clients, for the replies of a round that are as long as x."""
    if not any(wrapper.remembers("local", 1) for wrapper in wrappers):
        return ()
    _, round = foreseen(algorithm, x)
    names: dict[str, None] = {}  # in order, each once
    for asked in round:
        for wrapper in wrappers:
            kept = zip(wrapper.remembers(asked.task, len(asked.replies)), asked.replies, strict=False)
            names |= {name: None for name, m in kept if m == asked.longest}
    return tuple(names)


def checked(wrappers: Any, owner: str = "train") -> tuple[Wrapper, ...]:
    """The wrappers, if they make sense together.

    >>> from fedda.aggregation import Clip, Float16, Median, Noise
    >>> checked([Noise(1.0, norm=1.0), Median()])
    Traceback (most recent call last):
    ValueError: train: aggregation can put one thing in the place of the mean, got Noise and Median
    """
    if not isinstance(wrappers, Sequence) or not all(
        isinstance(w, Wrapper) and not isinstance(w, type) for w in wrappers
    ):
        raise ValueError(
            f"{owner}: aggregation must be a list of wrappers, such as [fedda.aggregation.Median()], got {wrappers!r}"
        )
    reducing = [type(w).__name__ for w in wrappers if w.reduces]
    if len(reducing) > 1:
        raise ValueError(
            f"{owner}: aggregation can put one thing in the place of the mean, got {' and '.join(reducing)}"
        )
    packing = ""
    for wrapper in wrappers:
        name = type(wrapper).__name__
        if isinstance(wrapper, Compression):
            if [type(w) for w in wrappers].count(type(wrapper)) > 1:
                raise ValueError(f"{owner}: aggregation has {name} twice")
            packing = name
        elif packing and wrapper.on_client(_task) is not _task:
            # It would change what was packed, after the residual was taken.
            raise ValueError(f"{owner}: aggregation must have {name}, which acts on the client, before {packing}")
    return tuple(wrappers)


def _task(client: Any, *down: Tensor) -> tuple[Tensor, ...]:
    return ()
