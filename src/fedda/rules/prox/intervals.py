"""Separable constraints: an interval for every coordinate, the same in every diagonal metric."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import checks, registry
from .base import Prox, numbers
from .layout import Layout, mask
from .separable import Separable


class Interval(Separable):
    """Clipping to [lower, upper]; bound to some parameters of a model, a box that is open elsewhere."""

    def ends(self) -> tuple[Any, Any]:
        """The lower and the upper end of the interval: numbers or vectors."""
        raise TypeError(f"{type(self).__name__} must define ends()")

    def bind(self, layout: Layout) -> Prox:
        if self.on is None:
            return self
        chosen = mask(type(self).__name__, self.on, layout)
        lower, upper = (torch.as_tensor(end, dtype=torch.float64) for end in self.ends())
        return Box(torch.where(chosen, lower, -math.inf), torch.where(chosen, upper, math.inf))

    def clip(self, x: Tensor) -> Tensor:
        lower, upper = self.ends()
        return x.clamp(min=lower).clamp(max=upper)

    def feasible(self, x: Tensor, tol: float = 0.0) -> Tensor:
        self._bound()
        lower, upper = self.ends()
        inside: Tensor = ((x >= lower - tol) & (x <= upper + tol)).all(dim=-1)
        return inside


@registry.proxes.register("nonnegative")
@dataclass(frozen=True)
class NonNegative(Interval):
    """C = {x >= 0}.

    Args:
        on: the parameters that it applies to: "weights" (2 or more dimensions), or a pattern over names; all by
            default.

    >>> NonNegative()(torch.tensor([-3.0, 0.5]), q=2.0, s=1.0)
    tensor([0.0000, 0.5000])
    """

    on: str | None = None

    def ends(self) -> tuple[Any, Any]:
        return 0.0, math.inf


@registry.proxes.register("box")
@dataclass(frozen=True)
class Box(Interval):
    """C = {lower <= x <= upper}: clipping, in every diagonal metric.

    Args:
        lower: the least value: a number, or one for each coordinate.
        upper: the largest value, likewise.
        on: the parameters that it applies to: "weights" (2 or more dimensions), or a pattern over names; all by
            default.

    >>> Box(-1.0, 1.0)(torch.tensor([3.0, 0.5]), q=2.0, s=1.0)
    tensor([1.0000, 0.5000])
    """

    lower: Any
    upper: Any
    on: str | None = None

    def __post_init__(self) -> None:
        for name in ("lower", "upper"):
            object.__setattr__(self, name, numbers("Box", name, getattr(self, name)))
        if not bool((torch.as_tensor(self.lower) <= torch.as_tensor(self.upper)).all()):
            raise ValueError(
                f"Box: lower must be <= upper, got {checks.shown(self.lower)} and {checks.shown(self.upper)}"
            )

    def ends(self) -> tuple[Any, Any]:
        return self.lower, self.upper


@registry.proxes.register("linf-ball")
@dataclass(frozen=True)
class LInfBall(Interval):
    """C = {max_j |x_j| <= radius}: clipping to [-radius, radius].

    Args:
        radius: the largest absolute value of a coordinate.
        on: the parameters that it applies to: "weights" (2 or more dimensions), or a pattern over names; all by
            default.

    >>> LInfBall(radius=1.0)(torch.tensor([-3.0, 0.5]), q=2.0, s=1.0)
    tensor([-1.0000, 0.5000])
    """

    radius: Any
    on: str | None = None

    def __post_init__(self) -> None:
        checks.check("LInfBall", radius=self.radius)

    def ends(self) -> tuple[Any, Any]:
        return -self.radius, self.radius
