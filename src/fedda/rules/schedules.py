"""Step sizes eta_t as functions of the global step t ([..., 1, 1], counted from the start of the run)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import AT_LEAST_ZERO, POSITIVE, check, number
from ..registry import schedules

__all__ = [
    "Constant", "CosineDecay", "CubeRoot", "InverseSqrt", "LinearDecay", "RateDecay", "Schedule", "StepDecay",
    "constant", "cosine", "cube_root", "inverse_sqrt", "linear", "schedule", "steps",
]  # fmt: skip

SMALLEST_SHARE = 1e-9  # of the start: a rate is never less, because methods divide by rates
Schedule = Callable[[Tensor], Any]  # t -> eta_t: a float, or a tensor that broadcasts with [..., 1, 1]


@dataclass(frozen=True)
class Constant:
    """eta_t = lr.

    Args:
        lr: the rate: a number, or a tensor [replicas, 1, 1] with one for each replica.

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

    Args:
        lr: the numerator, the rate at w + t = 1.
        w: the offset: the rate stays about constant for w steps.

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
    """lr / (w + t)^(1/3) from numbers, or `lr` itself if it is a schedule.

    Args:
        lr: a number, or a schedule.
        w: the offset of the decay; a schedule ignores it.
    """
    return lr if callable(lr) else CubeRoot(lr, w)


def schedule(lr: Any) -> Schedule:
    """A schedule from a number, a tensor of numbers (one for each replica), or a schedule.

    Args:
        lr: a number, a tensor [replicas, 1, 1], or a schedule.
    """
    return lr if callable(lr) else Constant(lr)


@schedules.register("constant")
@dataclass(frozen=True)
class RateDecay:
    """A constant rate after a warm-up; the base of rates that depend on how much of the run is over.

    Args:
        start: the first rate, after the warm-up.
        warmup: the share of the run, such as 0.05, in which the rate rises from (nearly) 0 in a straight line.
        horizon: the local steps of the run; `train` fills it in.
    """

    start: float
    warmup: float = 0.0
    horizon: float | None = None

    def __post_init__(self) -> None:
        check(self.name, lr=self.start)
        if not isinstance(self.warmup, int | float) or not 0 <= self.warmup < 1:
            raise ValueError(f"{self.name}: warmup must be a share of the run, from 0 to 1, got {self.warmup!r}")
        if self.horizon is not None:
            number(self.name, "horizon", self.horizon, POSITIVE)

    @property
    def name(self) -> str:
        return next(entry.name for entry in schedules if entry.build is type(self))

    def __call__(self, t: Tensor) -> Any:
        if self.horizon is None:
            raise ValueError(f"{self.name}: the length of the run is not known; give horizon, a number of steps")
        share = (torch.as_tensor(t) / self.horizon).clamp(0, 1)
        rises = (share / self.warmup).clamp(max=1) if self.warmup else 1.0
        falls = self.factor(((share - self.warmup) / (1 - self.warmup)).clamp(min=0) if self.warmup else share)
        rate: Tensor = self.start * rises * falls
        return rate.clamp(min=self.start * SMALLEST_SHARE)

    def factor(self, share: Tensor) -> Tensor:
        """What the first rate is multiplied by after this share of the run.

        Args:
            share: how much of the run after the warm-up is over, from 0 to 1.
        """
        return torch.ones_like(share)


@schedules.register("cosine")
@dataclass(frozen=True)
class CosineDecay(RateDecay):
    """From `start` to `end` along half a cosine (Loshchilov, Hutter 2017).

    Args:
        start: the first rate, after the warm-up.
        warmup: the share of the run, such as 0.05, in which the rate rises from (nearly) 0 in a straight line.
        horizon: the local steps of the run; `train` fills it in.
        end: the last rate.

    >>> [round(float(CosineDecay(1.0, horizon=4)(torch.tensor(float(t)))), 3) for t in range(5)]
    [1.0, 0.854, 0.5, 0.146, 0.0]
    """

    end: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self.name, "end", self.end, AT_LEAST_ZERO)

    def factor(self, share: Tensor) -> Tensor:
        low = self.end / self.start
        return low + (1 - low) * (1 + torch.cos(torch.pi * share)) / 2


@schedules.register("linear")
@dataclass(frozen=True)
class LinearDecay(RateDecay):
    """From `start` to `end` in a straight line.

    Args:
        start: the first rate, after the warm-up.
        warmup: the share of the run, such as 0.05, in which the rate rises from (nearly) 0 in a straight line.
        horizon: the local steps of the run; `train` fills it in.
        end: the last rate.

    >>> [round(float(LinearDecay(1.0, horizon=4)(torch.tensor(float(t)))), 9) for t in range(5)]
    [1.0, 0.75, 0.5, 0.25, 1e-09]
    """

    end: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self.name, "end", self.end, AT_LEAST_ZERO)

    def factor(self, share: Tensor) -> Tensor:
        return 1 + (self.end / self.start - 1) * share


@schedules.register("steps")
@dataclass(frozen=True)
class StepDecay(RateDecay):
    """Multiplied by `by` at each of the shares `at` of the run.

    Args:
        start: the first rate, after the warm-up.
        warmup: the share of the run, such as 0.05, in which the rate rises from (nearly) 0 in a straight line.
        horizon: the local steps of the run; `train` fills it in.
        at: the shares of the run at which the rate falls.
        by: the factor of each fall.

    >>> [round(float(StepDecay(1.0, horizon=4)(torch.tensor(float(t)))), 3) for t in range(4)]
    [1.0, 1.0, 0.1, 0.01]
    """

    at: tuple[float, ...] = (0.5, 0.75)
    by: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = self.at if isinstance(self.at, list | tuple) else ()
        if not shares or not all(isinstance(at, int | float) and 0 < at < 1 for at in shares):
            raise ValueError(f"{self.name}: at must be shares of the run, such as [0.5, 0.75], got {self.at!r}")
        number(self.name, "by", self.by, POSITIVE)

    def factor(self, share: Tensor) -> Tensor:
        passed = torch.stack([share >= at for at in self.at]).sum(dim=0)
        return torch.as_tensor(self.by, dtype=share.dtype, device=share.device) ** passed


@schedules.register("inverse_sqrt")
@dataclass(frozen=True)
class InverseSqrt:
    """start / sqrt(1 + t / scale), with t in local steps.

    Args:
        start: the first rate.
        scale: local steps after which the rate has fallen by about a third, to start / sqrt(2).

    >>> float(InverseSqrt(1.0, scale=10.0)(torch.tensor(30.0)))
    0.5
    """

    start: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        check("inverse_sqrt", lr=self.start, w=self.scale)

    def __call__(self, t: Tensor) -> Any:
        return self.start / (1 + torch.as_tensor(t) / self.scale) ** 0.5


# As users call them: `fedda.schedules.cosine(0.1)`.
constant, cosine, linear, steps, inverse_sqrt = RateDecay, CosineDecay, LinearDecay, StepDecay, InverseSqrt


def __dir__() -> list[str]:
    return sorted(__all__)
