"""The way from the node of an upper federation to its relay, which runs in the lower one: a Unix socket."""

import socket
import struct
import time

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as Proto

HEAD = struct.Struct("<dQ")  # before a message on the socket: the seconds that it has left, and its length
LARGEST = 1 << 32  # bytes of a message


class RelaySocket:
    """The relay as the node of the upper federation reaches it: `relay = "PATH"` in its node configuration."""

    def __init__(self, path: str):
        self.path = path

    def answer(self, message: Message, own_number: int) -> Message:
        """The reply of the relay, whose node has this number in the upper federation."""
        seconds = seconds_left(message)
        content = RecordDict({**message.content, "relay": ConfigRecord({"number": own_number})})
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
                door.settimeout(max(1.0, seconds))
                door.connect(self.path)
                send(door, content, seconds)
                _, reply = receive(door)
        except OSError as why:
            reply = refusal(f"the relay's own federation does not answer: {type(why).__name__}")
        return Message(reply, reply_to=message)


def seconds_left(message: Message) -> float:
    """The time until the upper server no longer waits for the reply."""
    return message.metadata.created_at + message.metadata.ttl - time.time()


def refusal(why: str) -> RecordDict:
    """The content of a reply that says why there is none."""
    return RecordDict({"refused": ConfigRecord({"why": why[:200]})})


def send(door: socket.socket, content: RecordDict, seconds: float) -> None:
    """One message, through a socket."""
    data = recorddict_to_proto(content).SerializeToString()
    door.sendall(HEAD.pack(seconds, len(data)) + data)


def receive(door: socket.socket) -> tuple[float, RecordDict]:
    """One message from a socket, and the seconds that it has left."""
    seconds, length = HEAD.unpack(_exactly(door, HEAD.size))
    if length > LARGEST:
        raise ValueError("the message is too long")
    return seconds, recorddict_from_proto(Proto.FromString(_exactly(door, length)))


def _exactly(door: socket.socket, length: int) -> bytes:
    parts: list[bytes] = []
    while length:
        part = door.recv(min(length, 1 << 20))
        if not part:
            raise ConnectionError("the other side has closed the socket")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
