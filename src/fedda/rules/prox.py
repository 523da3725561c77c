"""Proximal maps in the diagonal metric q, on any leading axes:

    prox(u, q, s) = argmin_x  s psi(x) + 1/2 sum_j q_j (x_j - u_j)^2   subject to x in C.

`u` is [..., d], `q` a scalar or a diagonal that broadcasts with it (q = h / lambda), `s` the weight of psi: the sum
of the step sizes in the dual state. With any other weight the fixed point is not that of f + psi.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import checks, registry


class Prox:
    """Nothing: psi = 0 and C = R^d. The base of all maps, and the interface that they keep."""

    def __call__(self, u: Tensor, q: Any, s: Any) -> Tensor:
        return u

    def value(self, x: Tensor) -> Tensor:
        """psi(x), without the constraint: [...] from [..., d]."""
        return torch.zeros_like(x[..., 0])

    def feasible(self, x: Tensor, tol: float = 0.0) -> Tensor:
        """Whether x lies in C up to `tol`: [...] from [..., d]."""
        return torch.ones_like(x[..., 0], dtype=torch.bool)

    def project(self, x: Tensor) -> Tensor:
        """The nearest point of C."""
        return self(x, 1.0, 0.0)


@registry.proxes.register("none")
@dataclass(frozen=True)
class Unconstrained(Prox):
    """No penalty and no constraint.

    >>> Unconstrained()(torch.tensor([2.0]), q=1.0, s=1.0)
    tensor([2.])
    """


@registry.proxes.register("l1")
@dataclass(frozen=True)
class L1(Prox):
    """psi(x) = gamma ||x||_1: soft thresholding at s gamma / q, with exact zeros.

    `gamma` is a number or a weight for each coordinate. `decoupled` forgets the metric and thresholds at s gamma,
    the analogue of decoupled weight decay: with h about 0.01 it is a hundred times weaker.

    >>> L1(gamma=1.0)(torch.tensor([3.0, -0.1]), q=2.0, s=1.0)
    tensor([2.5000, 0.0000])
    """

    gamma: Any
    decoupled: bool = False

    def __post_init__(self) -> None:
        checks.check("L1", gamma=self.gamma)
        checks.one_of("L1", "decoupled", self.decoupled, (True, False))

    def __call__(self, u: Tensor, q: Any, s: Any) -> Tensor:
        threshold = s * self.gamma / (1.0 if self.decoupled else q)
        return u - u.clamp(-threshold, threshold)

    def value(self, x: Tensor) -> Tensor:
        return (self.gamma * x.abs()).sum(dim=-1)


@registry.proxes.register("box")
@dataclass(frozen=True)
class Box(Prox):
    """C = {lower <= x <= upper}, numbers or vectors: clipping, in every diagonal metric.

    >>> Box(-1.0, 1.0)(torch.tensor([3.0, 0.5]), q=2.0, s=1.0)
    tensor([1.0000, 0.5000])
    """

    lower: Any
    upper: Any

    def __post_init__(self) -> None:
        for name, value in (("lower", self.lower), ("upper", self.upper)):
            if not torch.is_tensor(value) and not isinstance(value, int | float):
                raise ValueError(f"Box: {name} must be a number or a tensor, got {checks.shown(value)}")
        if not bool((torch.as_tensor(self.lower) <= torch.as_tensor(self.upper)).all()):
            raise ValueError(
                f"Box: lower must be <= upper, got {checks.shown(self.lower)} and {checks.shown(self.upper)}"
            )

    def __call__(self, u: Tensor, q: Any, s: Any) -> Tensor:
        return u.clamp(min=self.lower).clamp(max=self.upper)

    def feasible(self, x: Tensor, tol: float = 0.0) -> Tensor:
        return ((x >= self.lower - tol) & (x <= self.upper + tol)).all(dim=-1)


@registry.proxes.register("nonnegative")
@dataclass(frozen=True)
class NonNegative(Prox):
    """C = {x >= 0}.

    >>> NonNegative()(torch.tensor([-3.0, 0.5]), q=2.0, s=1.0)
    tensor([0.0000, 0.5000])
    """

    def __call__(self, u: Tensor, q: Any, s: Any) -> Tensor:
        return u.clamp(min=0)

    def feasible(self, x: Tensor, tol: float = 0.0) -> Tensor:
        return (x >= -tol).all(dim=-1)


def prox(given: Prox | dict[str, Any] | None) -> Prox:
    """A map from None, a map, or a table as in TOML: ``{kind = "l1", gamma = 0.01}``.

    >>> prox({"kind": "l1", "gamma": 0.01})
    L1(gamma=0.01, decoupled=False)
    """
    if given is None:
        return Unconstrained()
    if isinstance(given, Prox):
        return given
    if isinstance(given, dict) and "kind" in given:
        made: Prox = registry.proxes.find(given["kind"])(**{k: v for k, v in given.items() if k != "kind"})
        return made
    raise ValueError(f"prox must be a fedda.prox map, a table with 'kind', or None, got {checks.shown(given)}")


def feasible_start(owner: str, prox: Prox, x: Tensor) -> Tensor:
    """x if it lies in C, else its projection, which is said."""
    if bool(prox.feasible(x).all()):
        return x
    projected = prox.project(x)
    moved = float((projected - x).norm(dim=-1).max())
    warnings.warn(f"{owner}: x_0 lies outside the {type(prox).__name__}; projected, moved by {moved:.3g}", stacklevel=4)
    return projected
