"""Wrappers: what is done to the replies of clients before they are averaged."""

from collections.abc import Callable
from functools import wraps
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from ..core import Client, ClientTask
from ..registry import Registry
from . import gaussian

Tensors = tuple[Tensor, ...]

aggregations = Registry("aggregation")


class Exchange(NamedTuple):
    """What the server knows about one `cohort.average`, besides the replies.

    Args:
        task: the name of the task, such as "local".
        size: clients in the cohort.
        key: a counter-based key of this exchange of this round, [..., 1] int64 (`fedda.rng`); not secret.
        new_key: makes a fresh secret, the same one on all ranks.
    """

    task: str  # the name of the task, such as "local"
    size: int  # the number of clients in the cohort
    key: Tensor  # [..., 1], int64: a counter-based key of this exchange of this round (`fedda.rng`); not secret
    new_key: Callable[[], bytes] = gaussian.new_key  # makes a fresh secret, the same one on all ranks


@runtime_checkable
class Wrapper(Protocol):
    """A step with a part on the client, a part on the server, or both. A subclass is a frozen dataclass.

    A reply passes through the client parts of all wrappers, in the order given, then over the wire, then through the
    server parts, in the same order. The results are averaged. Both parts see CHANGES: if a reply is a moved copy of
    the model that was sent, they see its difference from that model. Other replies are passed as they are.

    In a simulation `Aggregated` runs both parts. In a federation the client process runs `client_side(wrappers, task)`
    and the server passes the replies of its cohort to `server_side`.
    """

    relative: ClassVar[bool] = True  # whether it needs changes instead of models
    reduces: ClassVar[bool] = False  # whether its server part replaces the mean

    @property
    def reproducible(self) -> bool:
        """Whether the server part depends on its arguments alone. If not, rounds are not recorded and replayed."""
        return True

    @property
    def combines(self) -> bool:
        """Whether it has a server part. If no wrapper has one, the server needs only the mean of the replies."""
        return False

    def on_client(self, task: ClientTask) -> ClientTask:
        """The client part: the task with its replies changed (`post_process`), or the task itself.

        Args:
            task: the task of the clients, with its name and mark.
        """
        return task

    def combine(self, replies: list[Tensor], weights: Tensor, exchange: Exchange) -> tuple[list[Tensor], Tensor]:
        """The server part.

        Args:
            replies: each [..., c, m]; a client that did not reply has zeros.
            weights: [..., c, 1]; 0 for a client that did not reply.
            exchange: what else the server knows.

        Returns:
            Replies and weights of the same form, with c = 1 if it reduces.
        """
        return replies, weights

    def fits(self, task: str, replies: int) -> None:
        """Refuse (ValueError) a task that it cannot take, before the first round.

        Args:
            task: the name of the task.
            replies: how many replies it has.
        """

    def remembers(self, task: str, replies: int) -> tuple[str, ...]:
        """The names of the vectors that the client part keeps in `client.memory`, each as long as the model.

        Args:
            task: the name of the task.
            replies: how many replies it has.
        """
        return ()


def post_process(task: ClientTask, change: Callable[[Tensors, Client, Tensors], Tensors]) -> ClientTask:
    """The task with its replies replaced by `change(replies, client, down)`."""

    @wraps(task)  # keeps its name and its mark
    def changed(client: Client, *down: Tensor) -> Tensors:
        return change(task(client, *down), client, down)

    return changed
