"""Compressed replies with error feedback: a client adds what it did not send to its next reply."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from ..checks import Bound, number
from ..core import Client, ClientTask
from .dry_run import model_length
from .wrapper import Wrapper, aggregations, post_process

LARGEST = torch.finfo(torch.float16).max
SHARE = Bound("in (0, 1]", lambda v: (v > 0) & (v <= 1))


class Compression(Wrapper):
    """Sends C(u) = unpack(pack(u)) instead of u and keeps the residual e in the client's memory (Seide et al. 2014;
    Stich, Cordonnier, Jaggi 2018):

        u = reply + e;     send C(u);     e <- u - C(u)

    for every reply that is as long as the model; shorter replies are sent uncompressed. Several compressions share one
    residual: each packs the numbers that the previous one has left. A task of the start of a run has no residual,
    because it runs once. The sum of everything sent, plus e, is the sum of all replies.
    """

    parts: ClassVar[int]  # the number of tensors that `pack` returns

    def pack(self, change: Tensor) -> tuple[Tensor, ...]:
        """The tensors to send: numbers [..., k] and, if needed, their positions as whole numbers.

        Args:
            change: what is to be sent, [..., m].
        """
        raise NotImplementedError

    def unpack(self, parts: Sequence[Tensor], length: int) -> Tensor:
        """The change, from what was sent.

        Args:
            parts: what `pack` returned.
            length: m, the length of the change.
        """
        raise NotImplementedError

    def on_client(self, task: ClientTask) -> ClientTask:
        return compress_replies((self,), task)

    def remembers(self, task: str, replies: int) -> tuple[str, ...]:
        return tuple(residual(task, i) for i in range(replies))


def residual(task: str, reply: int) -> str:
    """The name of a reply's residual in the client's memory."""
    return f"residual.{task}.{reply}"


def compress_replies(wrappers: Sequence[Compression], task: ClientTask) -> ClientTask:
    """The client part of several compressions."""

    def compress(reply: Tensor, client: Client, name: str) -> Tensor:
        before = client.memory.get(name)
        whole = reply if before is None else reply + before
        length = whole.shape[-1]
        sent = _unpack(wrappers, pack_reply(wrappers, whole, length), length).to(whole.dtype)
        if before is not None:
            client.memory[name] = whole - sent
        return sent

    def compress_all(replies: tuple[Tensor, ...], client: Client, down: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        d, name = model_length(down), task.__name__
        return tuple(
            compress(reply, client, residual(name, i)) if reply.shape[-1] == d else reply
            for i, reply in enumerate(replies)
        )

    return post_process(task, compress_all)


@aggregations.register("float16")
@dataclass(frozen=True)
class Float16(Compression):
    """Replies in half precision, half the bytes of float32. What exceeds +-65504 is sent in the next rounds.

    >>> Float16().pack(torch.tensor([0.1, 1e6]))
    (tensor([9.9976e-02, 6.5504e+04], dtype=torch.float16),)
    """

    parts = 1

    def pack(self, change: Tensor) -> tuple[Tensor, ...]:
        # NaN and infinity stay as they are: the engine drops such a client.
        bounded = torch.where(change.isfinite(), change.clamp(-LARGEST, LARGEST), change)
        return (bounded.to(torch.float16),)

    def unpack(self, parts: Sequence[Tensor], length: int) -> Tensor:
        return parts[0].double()


@aggregations.register("topk")
@dataclass(frozen=True)
class TopK(Compression):
    """The ceil(share m) coordinates of largest magnitude, each with its position (int32).

    Args:
        share: the part of the coordinates that is sent.

    >>> TopK(0.5).pack(torch.tensor([0.1, -3.0, 2.0, 0.0]))
    (tensor([-3.,  2.]), tensor([1, 2], dtype=torch.int32))
    """

    parts = 2
    share: float = 0.1

    def __post_init__(self) -> None:
        number("TopK", "share", self.share, SHARE)

    def pack(self, change: Tensor) -> tuple[Tensor, ...]:
        k = max(1, math.ceil(self.share * change.shape[-1] - 1e-9))  # 0.07 * 100 is above 7
        where = change.abs().topk(k, dim=-1).indices
        return change.gather(-1, where), where.to(torch.int32)

    def unpack(self, parts: Sequence[Tensor], length: int) -> Tensor:
        values, where = parts
        return values.new_zeros(*values.shape[:-1], length).scatter(-1, where.long(), values)


def pack_reply(wrappers: Sequence[Wrapper], change: Tensor, d: int) -> tuple[Tensor, ...]:
    """The tensors that are sent for a change that the client part of `Compression` has rounded: packing is lossless.

    >>> pack_reply([TopK(0.5), Float16()], torch.tensor([0.0, 3.0]), d=2)
    (tensor([3.], dtype=torch.float16), tensor([1], dtype=torch.int32))
    """
    parts: tuple[Tensor, ...] = (change,)
    for wrapper in compressions(wrappers) if change.shape[-1] == d else ():
        parts = (*wrapper.pack(parts[0]), *parts[1:])
    return parts


def unpack_reply(
    wrappers: Sequence[Wrapper], parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, d: int
) -> Tensor:
    """The change [..., m] from the tensors received. Tensors that `pack_reply` cannot have made are refused.

    >>> where = torch.tensor([7], dtype=torch.int32)
    >>> unpack_reply([TopK(0.5)], [torch.tensor([3.0]), where], shape=(2,), dtype=torch.float32, d=2)
    Traceback (most recent call last):
    ValueError: aggregation: positions must be from 0 to 1, got 7
    """
    expected = forms(compressions(wrappers), tuple(shape), dtype, d)
    got = [(tuple(v.shape), v.dtype) for v in parts]
    if got != expected:
        raise ValueError(f"aggregation: a packed reply must have the form {expected}, got {got}")
    for v in parts:
        if not v.is_floating_point() and not bool(((v >= 0) & (v < shape[-1])).all()):
            bad = v[(v < 0) | (v >= shape[-1])][0]
            raise ValueError(f"aggregation: positions must be from 0 to {shape[-1] - 1}, got {int(bad)}")
    return (_unpack(compressions(wrappers), parts, shape[-1]) if shape[-1] == d else parts[0]).to(dtype)


def _unpack(wrappers: Sequence[Compression], parts: Sequence[Tensor], length: int) -> Tensor:
    for wrapper in reversed(wrappers):
        parts = [wrapper.unpack(parts[: wrapper.parts], length), *parts[wrapper.parts :]]
    return parts[0]


def compressions(wrappers: Sequence[Wrapper]) -> tuple[Compression, ...]:
    return tuple(w for w in wrappers if isinstance(w, Compression))


@cache
def forms(
    wrappers: tuple[Compression, ...], shape: tuple[int, ...], dtype: torch.dtype, d: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the tensors that are sent, from packing a tensor on the meta device, without data."""
    parts = pack_reply(wrappers, torch.empty(shape, dtype=dtype, device="meta"), d)
    return [(tuple(v.shape), v.dtype) for v in parts]


def bytes_of(wrappers: Sequence[Wrapper]) -> Callable[[Tensor, Sequence[Tensor]], int]:
    """A function of one client's reply and of the tensors sent down: the bytes of the reply as it is sent."""
    packing = compressions(wrappers)

    def count(reply: Tensor, down: Sequence[Tensor]) -> int:
        sent = forms(packing, tuple(reply.shape[-1:]), reply.dtype, model_length(down))
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in sent)

    return count
