"""Replies of bounded length."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import one_of, shown
from ..core import ClientTask
from .wrapper import Exchange, Wrapper, aggregations, post_process

Norm = float | Sequence[float] | Mapping[str, float | Sequence[float]]


@aggregations.register("clip")
@dataclass(frozen=True)
class Clip(Wrapper):
    """Scales a client's change to at most `norm` in Euclidean length.

        u <- u min(1, norm / ||u||),   u = X - x for a reply X that is a model (x was sent), the reply itself otherwise

    Args:
        norm: the largest length: one number for all replies, a number for each, or a table by task: ``{"first": 10.0,
            "local": (1.0, 10.0)}`` for FedDA's nu_0 and its (z, nu).
        where: "server" bounds the harm that a dishonest client can do, "client" what leaves an honest one.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0]], b=[[100.0]])
    >>> fedda.train(fedda.make("fedavg", lr=0.5), problem, rounds=3, aggregation=[Clip(2.0)]).x
    tensor([6.], dtype=torch.float64)
    """

    norm: Any
    where: str = "server"

    def __post_init__(self) -> None:
        check_norm("Clip", self.norm)
        one_of("Clip", "where", self.where, ("server", "client"))

    @property
    def combines(self) -> bool:
        return self.where == "server"

    def on_client(self, task: ClientTask) -> ClientTask:
        if self.combines:
            return task
        return post_process(task, lambda replies, *_: tuple(clip("Clip", self.norm, task.__name__, replies)))

    def fits(self, task: str, replies: int) -> None:
        norms("Clip", self.norm, task, replies)

    def combine(self, replies: list[Tensor], weights: Tensor, exchange: Exchange) -> tuple[list[Tensor], Tensor]:
        return clip("Clip", self.norm, exchange.task, replies), weights


def clip(owner: str, norm: Norm, task: str, replies: Sequence[Tensor]) -> list[Tensor]:
    """The replies of a task, each with rows of at most its norm."""
    return [clip_rows(r, most) for r, most in zip(replies, norms(owner, norm, task, len(replies)), strict=True)]


def clip_rows(v: Tensor, most: float) -> Tensor:
    """Rows longer than `most` are scaled down, others stay the same. NaN and infinity stay NaN or infinite."""
    largest = v.abs().amax(dim=-1, keepdim=True)
    unit = v / largest.clamp(min=torch.finfo(v.dtype).tiny)  # a liar may send numbers whose squares overflow
    length = unit.double().norm(dim=-1, keepdim=True)
    scale = (most / length).to(v.dtype)
    return torch.where(largest * length <= most, v, unit * scale)


def norms(owner: str, norm: Norm, task: str, replies: int) -> list[float]:
    """The bound of each reply of a task."""
    if isinstance(norm, Mapping):
        if task not in norm:
            raise ValueError(f"{owner}: norm has no entry for the task {task!r}, only for {', '.join(map(repr, norm))}")
        norm = norm[task]
    if isinstance(norm, Sequence):
        if len(norm) != replies:
            raise ValueError(
                f"{owner}: norm has {len(norm)} numbers but the task {task!r} has {replies} replies: give one number, "
                "or a table such as {'first': 1.0, 'local': (1.0, 1.0)}"
            )
        return list(norm)
    return [norm] * replies


def check_norm(owner: str, norm: Any, least: float = 0.0, most: float = math.inf) -> None:
    """Refuse a norm that is not > 0. Noise has bounds, because its size is proportional to the norm."""
    for entry in norm.values() if isinstance(norm, Mapping) and norm else [norm]:
        several = isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry)
        for one in entry if several else [entry]:
            real = isinstance(one, int | float) and not isinstance(one, bool)
            # A whole number may be too large for any tensor.
            if not (real and one > 0 and least <= one <= most and (one == math.inf or one <= sys.float_info.max)):
                wanted = "a number > 0" if most == math.inf else f"a number from {least:g} to {most:g}"
                form = "one for each reply, or a table by task"
                raise ValueError(f"{owner}: norm must be {wanted}, {form}, got {shown(one)}")
