"""One linear constraint: the half-space and the hyperplane."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import checks, registry
from .base import Prox, numbers, slack
from .newton import in_blocks


class Linear(Prox):
    """What is shared: a'x against b, and the step along a / q."""

    a: Any
    b: Any
    equal: bool

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for name in ("a", "b"):
            object.__setattr__(self, name, numbers(owner, name, getattr(self, name)))
            if not bool(torch.isfinite(torch.as_tensor(getattr(self, name))).all()):
                raise ValueError(f"{owner}: {name} must be finite, got {checks.shown(getattr(self, name))}")
        if not bool(torch.as_tensor(self.a).any()):
            raise ValueError(f"{owner}: a must not be zero, got {checks.shown(self.a)}")

    def __call__(self, u: Tensor, q: Any, s: Any) -> Tensor:
        a = (
            self.a
            if isinstance(self.a, Tensor)
            else torch.full(u.shape[-1:], float(self.a), dtype=torch.float64, device=u.device)
        )
        return in_blocks(self._solve, u, q, a, self.b)

    def _solve(self, u: Tensor, q: Any, a: Tensor, b: Any) -> Tensor:
        direction = a / q
        excess = (a * u).sum(dim=-1, keepdim=True) - b
        excess = excess if self.equal else excess.clamp(min=0)
        x: Tensor = u - excess / (a * direction).sum(dim=-1, keepdim=True) * direction
        return x

    def feasible(self, x: Tensor, tol: float = 0.0) -> Tensor:
        terms = (self.a * x).double()
        excess = terms.sum(dim=-1, keepdim=True) - self.b
        room = tol + slack(x) * (terms.abs().sum(dim=-1, keepdim=True) + abs(self.b))
        inside: Tensor = ((excess.abs() if self.equal else excess) <= room)[..., 0]
        return inside


@registry.proxes.register("half-space")
@dataclass(frozen=True)
class HalfSpace(Linear):
    """C = {a'x <= b}: x = u - max(0, a'u - b) / (sum_j a_j^2 / q_j) a / q.

    Args:
        a: the normal vector; a number stands for all coordinates.
        b: the bound.

    >>> HalfSpace(a=[1.0, 1.0], b=1.0)(torch.tensor([2.0, 1.0]), q=torch.tensor([1.0, 3.0]), s=1.0)
    tensor([0.5000, 0.5000])
    """

    a: Any
    b: Any
    equal = False


@registry.proxes.register("hyperplane")
@dataclass(frozen=True)
class Hyperplane(Linear):
    """C = {a'x = b}: x = u - (a'u - b) / (sum_j a_j^2 / q_j) a / q.

    Args:
        a: the normal vector; a number stands for all coordinates.
        b: the value of a'x.

    >>> Hyperplane(a=1.0, b=1.0)(torch.tensor([0.0, 0.0]), q=torch.tensor([1.0, 3.0]), s=1.0)
    tensor([0.7500, 0.2500])
    """

    a: Any
    b: Any
    equal = True
