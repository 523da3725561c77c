"""A Grid whose nodes live in this process, for tests and for debugging; and what to do if a SuperLink is gone."""

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from flwr.app import DEFAULT_TTL, Context, Error, Message, Metadata, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid


class InProcessGrid(Grid):
    """`clients` nodes, numbered from 1, each with its own state. A message is answered when it is pulled.

    Args:
        app: the ClientApp.
        clients: how many nodes it plays.
        run_config: the settings that nodes see.
        first: the partition-id of the first node.
    """

    def __init__(self, app: ClientApp, clients: int, run_config: dict[str, Any] | None = None, first: int = 0):
        self.app, self.numbers = app, itertools.count(1)
        self.contexts = {
            node + 1: Context(
                run_id=0, node_id=node + 1, node_config={"partition-id": first + node, "num-partitions": clients},
                state=RecordDict(), run_config=dict(run_config or {}),
            )
            for node in range(clients)
        }  # fmt: skip
        self.posted: dict[str, Message] = {}

    def set_run(self, run: Any) -> None:
        """Nothing: there is no run to set.

        Args:
            run: ignored.
        """

    @property
    def run(self) -> Any:
        raise NotImplementedError("a grid in one process has no run")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message to a node.

        Args:
            content: its records.
            message_type: such as "query".
            dst_node_id: the number of the node.
            group_id: any text.
            ttl: seconds after which it is old.
        """
        about = Metadata(
            run_id=0, message_id="", src_node_id=0, dst_node_id=dst_node_id, reply_to_message_id="", group_id=group_id,
            created_at=time.time(), ttl=ttl or DEFAULT_TTL, message_type=message_type,
        )  # fmt: skip
        untyped: Any = Message  # the typed signature lacks `metadata`, which Flower itself uses
        message: Message = untyped(metadata=about, content=content)
        return message

    def get_node_ids(self) -> list[int]:
        """The numbers of all nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Keep messages until their answers are pulled.

        Args:
            messages: what is sent.

        Returns:
            A number for each.
        """
        ids = []
        for message in messages:
            ids.append(str(next(self.numbers)))
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.posted[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The answers to messages.

        Args:
            message_ids: what `push_messages` returned.
        """
        return [self.answer(self.posted.pop(i)) for i in message_ids if i in self.posted]

    def answer(self, message: Message) -> Message:
        """The answer of a node, or its error, as a real node reports it.

        Args:
            message: what was sent to it.
        """
        try:
            return self.app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as why:  # as a node reports it
            return Message(Error(code=2, reason=f"{type(why)}:<'{why}'>"), reply_to=message)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages and wait for the answers.

        Args:
            messages: what is sent.
            timeout: ignored: answers are immediate.
        """
        return self.pull_messages(self.push_messages(messages))


class SuperLinkGone(RuntimeError):
    """The SuperLink has not answered for too long."""


def give_up_after(grid: Grid, seconds: float) -> None:
    """Let the calls of Flower's own Grid fail after this time. By default they try again for ever."""
    retries: Any = getattr(grid, "_retry_invoker", None)
    if hasattr(retries, "max_time"):
        retries.max_time = seconds


@contextmanager
def link_errors(seconds: float) -> Iterator[None]:
    """Say in one line that the SuperLink is gone."""
    try:
        yield
    except httpx.TransportError as why:
        raise SuperLinkGone(
            f"the SuperLink has not answered for {seconds:g} s ({type(why).__name__}): start it again, and submit the "
            "run with resume=true"
        ) from why
