"""Fewer bytes up, with error feedback: what a client did not send it keeps, and adds to its next reply."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from ..checks import Bound, number
from ..core import Client, ClientTask
from .foreseen import longest
from .registered import aggregations
from .wrapper import Wrapper, followed

LARGEST = torch.finfo(torch.float16).max
SHARE = Bound("in (0, 1]", lambda v: (v > 0) & (v <= 1))


class Compression(Wrapper):
    """C(u) = unpack(pack(u)) in the place of u, with the residual e in the client's memory (Seide et al. 2014; Stich,
    Cordonnier, Jaggi 2018):

        u = reply + e;     send C(u);     e <- u - C(u)

    for every reply as long as the model; shorter ones go whole. Several compressions are one, with one residual: each
    packs the numbers that the one before has left. A task of the start of a run, which never comes again, has no
    residual. The sum of all that was sent, and e, is the sum of all replies.
    """

    parts: ClassVar[int]  # tensors that `pack` makes of one

    def pack(self, change: Tensor) -> tuple[Tensor, ...]:
        """What travels: numbers [..., k], and whole numbers that say where they stand, if need be."""
        raise NotImplementedError

    def unpack(self, parts: Sequence[Tensor], length: int) -> Tensor:
        raise NotImplementedError

    def on_client(self, task: ClientTask) -> ClientTask:
        return compressed((self,), task)

    def remembers(self, task: str, replies: int) -> tuple[str, ...]:
        return tuple(residual(task, i) for i in range(replies))


def residual(task: str, reply: int) -> str:
    """The name of what a client keeps of a reply."""
    return f"residual.{task}.{reply}"


def compressed(wrappers: Sequence[Compression], task: ClientTask) -> ClientTask:
    """The client part of compressions, together."""
    name = task.__name__

    def sent(reply: Tensor, client: Client, kept: str) -> Tensor:
        before = client.memory.get(kept)
        whole = reply if before is None else reply + before
        found = _restored(wrappers, packed(wrappers, whole, whole.shape[-1]), whole.shape[-1]).to(whole.dtype)
        if before is not None:
            client.memory[kept] = whole - found
        return found

    def all_sent(replies: tuple[Tensor, ...], client: Client, down: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        d = longest(down)
        return tuple(
            sent(reply, client, residual(name, i)) if reply.shape[-1] == d else reply for i, reply in enumerate(replies)
        )

    return followed(task, all_sent)


@aggregations.register("float16")
@dataclass(frozen=True)
class Float16(Compression):
    """Replies in half precision: half the bytes of float32; beyond +-65504 the rest is sent in the next rounds.

    >>> Float16().pack(torch.tensor([0.1, 1e6]))
    (tensor([9.9976e-02, 6.5504e+04], dtype=torch.float16),)
    """

    parts = 1

    def pack(self, change: Tensor) -> tuple[Tensor, ...]:
        # What is not finite stays so: the engine leaves out who sends it.
        bounded = torch.where(change.isfinite(), change.clamp(-LARGEST, LARGEST), change)
        return (bounded.to(torch.float16),)

    def unpack(self, parts: Sequence[Tensor], length: int) -> Tensor:
        return parts[0].double()


@aggregations.register("topk")
@dataclass(frozen=True)
class TopK(Compression):
    """The ceil(share m) coordinates that are largest in magnitude, each with its place (int32).

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


def packed(wrappers: Sequence[Wrapper], change: Tensor, d: int) -> tuple[Tensor, ...]:
    """What travels for a change, whichever compressions there are: nothing is lost here that the client part of
    `Compression` has not taken off already.

    >>> packed([TopK(0.5), Float16()], torch.tensor([0.0, 3.0]), d=2)
    (tensor([3.], dtype=torch.float16), tensor([1], dtype=torch.int32))
    """
    parts: tuple[Tensor, ...] = (change,)
    for wrapper in compressions(wrappers) if change.shape[-1] == d else ():
        parts = (*wrapper.pack(parts[0]), *parts[1:])
    return parts


def unpacked(
    wrappers: Sequence[Wrapper], parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, d: int
) -> Tensor:
    """The change [..., m] again, from what came; what cannot have been packed here is refused.

    >>> where = torch.tensor([7], dtype=torch.int32)
    >>> unpacked([TopK(0.5)], [torch.tensor([3.0]), where], shape=(2,), dtype=torch.float32, d=2)
    Traceback (most recent call last):
    ValueError: aggregation: places must be from 0 to 1, got 7
    """
    found, expected = list(parts), forms(compressions(wrappers), tuple(shape), dtype, d)
    got = [(tuple(v.shape), v.dtype) for v in found]
    if got != expected:
        raise ValueError(f"aggregation: a packed reply must have the form {expected}, got {got}")
    for v in found:
        if not v.is_floating_point() and not bool(((v >= 0) & (v < shape[-1])).all()):
            bad = v[(v < 0) | (v >= shape[-1])][0]
            raise ValueError(f"aggregation: places must be from 0 to {shape[-1] - 1}, got {int(bad)}")
    return (_restored(compressions(wrappers), found, shape[-1]) if shape[-1] == d else found[0]).to(dtype)


def _restored(wrappers: Sequence[Compression], parts: Sequence[Tensor], length: int) -> Tensor:
    for wrapper in reversed(wrappers):
        parts = [wrapper.unpack(parts[: wrapper.parts], length), *parts[wrapper.parts :]]
    return parts[0]


def compressions(wrappers: Sequence[Wrapper]) -> tuple[Compression, ...]:
    return tuple(w for w in wrappers if isinstance(w, Compression))


@cache
def forms(
    wrappers: tuple[Compression, ...], shape: tuple[int, ...], dtype: torch.dtype, d: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and types of what travels, found by packing nothing: tensors that have no numbers."""
    parts = packed(wrappers, torch.empty(shape, dtype=dtype, device="meta"), d)
    return [(tuple(v.shape), v.dtype) for v in parts]


def bytes_of(wrappers: Sequence[Wrapper]) -> Callable[[Tensor, Sequence[Tensor]], int]:
    """Bytes of one client's reply as it travels, from the reply and what was sent down."""

    def weigh(reply: Tensor, down: Sequence[Tensor]) -> int:
        shape = tuple(reply.shape[-1:])
        return sum(math.prod(own) * kind.itemsize for own, kind in forms(packing, shape, reply.dtype, longest(down)))

    packing = compressions(wrappers)
    return weigh
