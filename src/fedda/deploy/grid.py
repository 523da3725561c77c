"""A Grid whose nodes live in this process: the same apps, for tests and for debugging."""

import itertools
import time
from collections.abc import Iterable
from typing import Any

from flwr.app import DEFAULT_TTL, Context, Error, Message, Metadata, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid


class InProcessGrid(Grid):
    """`clients` nodes, numbered from 1, each with its own state. A message is answered when it is pulled."""

    def __init__(self, app: ClientApp, clients: int, run_config: dict[str, Any] | None = None):
        self.app, self.numbers = app, itertools.count(1)
        self.contexts = {
            node + 1: Context(
                run_id=0, node_id=node + 1, node_config={"partition-id": node, "num-partitions": clients},
                state=RecordDict(), run_config=dict(run_config or {}),
            )
            for node in range(clients)
        }  # fmt: skip
        self.posted: dict[str, Message] = {}

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError("a grid in one process has no run")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        about = Metadata(
            run_id=0, message_id="", src_node_id=0, dst_node_id=dst_node_id, reply_to_message_id="", group_id=group_id,
            created_at=time.time(), ttl=ttl or DEFAULT_TTL, message_type=message_type,
        )  # fmt: skip
        untyped: Any = Message  # the typed signature lacks `metadata`, which Flower itself uses
        message: Message = untyped(metadata=about, content=content)
        return message

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            ids.append(str(next(self.numbers)))
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.posted[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.answer(self.posted.pop(i)) for i in message_ids if i in self.posted]

    def answer(self, message: Message) -> Message:
        try:
            return self.app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as why:  # as a node reports it
            return Message(Error(code=2, reason=f"{type(why)}:<'{why}'>"), reply_to=message)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))
