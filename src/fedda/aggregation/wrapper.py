"""What a wrapper is: one step on the way from a client's reply to what the server takes for the mean."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from ..core import Client, ClientTask
from . import gaussian

Tensors = tuple[Tensor, ...]


class Exchange(NamedTuple):
    """What the server knows of one `cohort.average` besides the replies."""

    task: str  # the task's name, such as "local"
    size: int  # how many clients were asked
    key: Tensor  # [..., 1], int64: a counter-based key of this exchange of this round (`fedda.rng`); not secret
    new_key: Callable[[], bytes] = gaussian.new_key  # a secret that nobody has had before, the same on all ranks


@runtime_checkable
class Wrapper(Protocol):
    """A step with a part on the client, a part on the server, or both. A subclass is a frozen dataclass.

    A reply goes through the client parts of all wrappers, in the order given, then over the wire, then through the
    server parts, in the same order; what is left is averaged. Both parts see CHANGES: where a reply is a moved copy of
    the model that was sent, its difference from that model (`centres.py`), and any other reply as it is.

    In a simulation `Aggregated` does both. In a federation the client process runs `client_side(wrappers, task)`, and
    the server's cohort gives the replies of everyone it asked to `server_side`: no other code is needed on either side.
    """

    relative: ClassVar[bool] = True  # whether it must be told from where a reply has moved
    reduces: ClassVar[bool] = False  # whether its server part puts something else in the place of the mean

    @property
    def reproducible(self) -> bool:
        """Whether its server part is a function of what it is given; if not, no round can be recorded and replayed."""
        return True

    @property
    def combines(self) -> bool:
        """Whether it has a server part; without one the mean of the replies is all that the server needs."""
        return False

    def on_client(self, task: ClientTask) -> ClientTask:
        """The client part: the task with something done to its replies (`followed`), with its name and its mark; the
        task itself where there is no client part."""
        return task

    def combine(self, replies: list[Tensor], weights: Tensor, exchange: Exchange) -> tuple[list[Tensor], Tensor]:
        """The server part: from replies [..., c, m] of the c clients that were asked and their weights [..., c, 1],
        0 for who was not heard (the reply is then zeros), to others of the same form; one row where it reduces."""
        return replies, weights

    def fits(self, task: str, replies: int) -> None:
        """Refuse (ValueError) a task with so many replies that it can do nothing with: asked before the first round."""

    def remembers(self, task: str, replies: int) -> tuple[str, ...]:
        """The names of what the client part keeps in `client.memory` between rounds, each as long as the model."""
        return ()


def followed(task: ClientTask, then: Callable[[Tensors, Client, Tensors], Tensors]) -> ClientTask:
    """The task, and `then(replies, client, what was sent)` of it."""

    @wraps(task)  # keeps its name and its mark
    def both(client: Client, *down: Tensor) -> Tensors:
        return then(task(client, *down), client, down)

    return both
