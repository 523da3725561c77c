"""Step sizes eta_t as functions of the global step t ([..., 1, 1], counted from the start of the run)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..checks import check

Schedule = Callable[[Tensor], Any]  # t -> eta_t: a float, or a tensor that broadcasts with [..., 1, 1]


@dataclass(frozen=True)
class Constant:
    """eta_t = lr.

    >>> Constant(0.1)(torch.tensor(7.0))
    0.1
    """

    lr: float

    def __post_init__(self) -> None:
        check_on_host("Constant", lr=self.lr)

    def __call__(self, t: Tensor) -> Any:
        return self.lr


@dataclass(frozen=True)
class CubeRoot:
    """eta_t = lr / (w + t)^(1/3), the schedule of variance-reduced methods (algorithms 1-1, 1-2, STEM).

    >>> CubeRoot(0.02, w=8.0)(torch.tensor(0.0))
    tensor(0.0100)
    """

    lr: float
    w: float

    def __post_init__(self) -> None:
        check_on_host("CubeRoot", lr=self.lr, w=self.w)

    def __call__(self, t: Tensor) -> Any:
        return self.lr / (self.w + t) ** (1 / 3)


def check_on_host(owner: str, **values: Any) -> None:
    """Check the numbers, except tensors on a GPU. Algorithms make schedules inside their rounds, and there a CUDA graph
    forbids the host to read a number of the GPU. The algorithm checked these numbers when it was made."""
    check(owner, **{name: value for name, value in values.items() if not getattr(value, "is_cuda", False)})


def cube_root(lr: Any, w: Any) -> Schedule:
    """lr / (w + t)^(1/3) from numbers, or `lr` itself if it is a schedule."""
    return lr if callable(lr) else CubeRoot(lr, w)


def schedule(lr: Any) -> Schedule:
    """A schedule from a number, a tensor of numbers (one for each replica), or a schedule."""
    return lr if callable(lr) else Constant(lr)
