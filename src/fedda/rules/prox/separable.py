"""Separable maps: penalties gamma1 |x| + gamma2 x^2 / 2 and intervals. Every coordinate is solved separately."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ... import checks, registry
from .base import Prox, numbers, unbound
from .layout import Layout, mask


class Separable(Prox):
    """prox_j(u) = clip(soft(u, threshold) / (1 + shrinkage)); a part that is None is left out.

    `on` restricts a map to some parameters of a model: "weights" (2 or more dimensions), or a pattern over names.
    """

    on: str | None = None
    penalties: ClassVar[tuple[str, ...]] = ()  # the fields with a weight of a penalty: a number, or one per coordinate

    def __post_init__(self) -> None:
        owner = type(self).__name__
        checks.check(owner, **{name: getattr(self, name) for name in self.penalties})
        for name in self.penalties:
            object.__setattr__(self, name, numbers(owner, name, getattr(self, name)))

    def bind(self, layout: Layout) -> Prox:
        if self.on is None:
            return self
        chosen = mask(type(self).__name__, self.on, layout).double()
        return replace(self, on=None, **{name: getattr(self, name) * chosen for name in self.penalties})  # type: ignore[type-var]

    def threshold(self, q: Any, s: Any) -> Any:
        """Where coordinates are soft thresholded; None for nowhere.

        Args:
            q: the metric.
            s: the weight of psi.
        """
        return None

    def shrinkage(self, q: Any, s: Any) -> Any:
        """By how much coordinates shrink, x / (1 + shrinkage); None for not at all.

        Args:
            q: the metric.
            s: the weight of psi.
        """
        return None

    def clip(self, x: Tensor) -> Tensor:
        """The nearest point of the set.

        Args:
            x: points, [..., d].
        """
        return x

    def terms(self, x: Tensor) -> Any:
        """psi of every coordinate.

        Args:
            x: points, [..., d].
        """
        return None

    def _bound(self) -> None:
        if self.on is not None:
            raise unbound(type(self).__name__, "on", self.on)

    def __call__(self, u: Tensor, q: Any, s: Any) -> Tensor:
        self._bound()
        x, threshold, shrinkage = u, self.threshold(q, s), self.shrinkage(q, s)
        if threshold is not None:
            x = x - x.clamp(-threshold, threshold)
        if shrinkage is not None:
            x = x / (1 + shrinkage)
        return self.clip(x).to(u.dtype)

    def value(self, x: Tensor) -> Tensor:
        self._bound()
        terms = self.terms(x)
        return super().value(x) if terms is None else terms.sum(dim=-1, dtype=torch.float64).to(x.dtype)


@registry.proxes.register("none")
@dataclass(frozen=True)
class Unconstrained(Separable):
    """No penalty and no constraint.

    >>> Unconstrained()(torch.tensor([2.0]), q=1.0, s=1.0)
    tensor([2.])
    """

    identity: ClassVar[bool] = True


@registry.proxes.register("l1")
@dataclass(frozen=True)
class L1(Separable):
    """psi(x) = gamma ||x||_1: soft thresholding at s gamma / q, with exact zeros.

    Args:
        gamma: the weight of the penalty: a number, or one for each coordinate.
        decoupled: ignore the metric and threshold at s gamma, the analogue of decoupled weight decay: with h about 0.01
            it is a hundred times weaker.
        on: the parameters that it applies to: "weights" (2 or more dimensions), or a pattern over names; all by
            default.

    >>> L1(gamma=1.0)(torch.tensor([3.0, -0.1]), q=2.0, s=1.0)
    tensor([2.5000, 0.0000])
    >>> L1(gamma=1.0, on="weights").bind([("weight", (1, 2)), ("bias", (1,))]).gamma
    tensor([1., 1., 0.], dtype=torch.float64)
    """

    penalties: ClassVar = ("gamma",)
    gamma: Any
    decoupled: bool = False
    on: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("L1", "decoupled", self.decoupled, (True, False))

    def threshold(self, q: Any, s: Any) -> Any:
        return s * self.gamma / (1.0 if self.decoupled else q)

    def terms(self, x: Tensor) -> Any:
        return self.gamma * x.abs()


@registry.proxes.register("squared-l2")
@dataclass(frozen=True)
class SquaredL2(Separable):
    """psi(x) = (gamma / 2) ||x||^2: x = u / (1 + s gamma / q).

    Args:
        gamma: the weight of the penalty: a number, or one for each coordinate.
        on: the parameters that it applies to: "weights" (2 or more dimensions), or a pattern over names; all by
            default.

    >>> SquaredL2(gamma=1.0)(torch.tensor([3.0]), q=2.0, s=1.0)
    tensor([2.])
    """

    penalties: ClassVar = ("gamma",)
    gamma: Any
    on: str | None = None

    def shrinkage(self, q: Any, s: Any) -> Any:
        return s * self.gamma / q

    def terms(self, x: Tensor) -> Any:
        return self.gamma / 2 * x**2


@registry.proxes.register("elastic-net")
@dataclass(frozen=True)
class ElasticNet(Separable):
    """psi(x) = gamma1 ||x||_1 + (gamma2 / 2) ||x||^2: x = soft(u, s gamma1 / q) / (1 + s gamma2 / q).

    Args:
        gamma1: the weight of the L1 norm: a number, or one for each coordinate.
        gamma2: the weight of the squared L2 norm, likewise.
        on: the parameters that it applies to: "weights" (2 or more dimensions), or a pattern over names; all by
            default.

    >>> ElasticNet(gamma1=1.0, gamma2=2.0)(torch.tensor([3.0, -0.1]), q=2.0, s=1.0)
    tensor([1.2500, 0.0000])
    """

    penalties: ClassVar = ("gamma1", "gamma2")
    gamma1: Any
    gamma2: Any
    on: str | None = None

    def threshold(self, q: Any, s: Any) -> Any:
        return s * self.gamma1 / q

    def shrinkage(self, q: Any, s: Any) -> Any:
        return s * self.gamma2 / q

    def terms(self, x: Tensor) -> Any:
        return self.gamma1 * x.abs() + self.gamma2 / 2 * x**2
