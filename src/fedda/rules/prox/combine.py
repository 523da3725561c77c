"""Maps made of maps: sums of separable ones, and shifts to a centre."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ... import checks, registry
from . import base
from .base import Prox, numbers
from .layout import Layout
from .separable import Separable


@dataclass(frozen=True, init=False)
class Sum(Separable):
    """psi_1 + psi_2 + ... on the intersection of the sets, for separable maps: clip(soft(u, sum) / (1 + sum)).

    Any penalties of L1, SquaredL2 and ElasticNet with any of Box, NonNegative and LInfBall. Anything else has no
    closed form in a diagonal metric and is refused. In TOML: ``{kind = "sum", of = [{kind = "l1", ...}, ...]}``.

    Args:
        first: a map, or its table.
        second: another one.
        more: further ones.

    >>> from fedda.rules.prox import L1, NonNegative
    >>> Sum(L1(gamma=1.0), NonNegative())(torch.tensor([3.0, -2.0]), q=2.0, s=1.0)
    tensor([2.5000, 0.0000])
    """

    first: Separable
    second: Separable

    def __init__(self, first: Any, second: Any, *more: Any):
        maps = [base.prox(part) for part in (first, second, *more)]
        for part in maps:
            if not isinstance(part, Separable):
                raise ValueError(
                    f"Sum: {type(part).__name__} is not separable (a penalty l1, squared-l2, elastic-net, or a set "
                    "box, nonnegative, linf-ball): its sum with another map has no closed form in a diagonal metric"
                )
        object.__setattr__(self, "first", maps[0])
        object.__setattr__(self, "second", maps[1] if len(maps) == 2 else Sum(*maps[1:]))
        if self.first.on is None and self.second.on is None:
            point = self.clip(torch.zeros(1, dtype=torch.float64))
            if not bool(self.feasible(point, tol=1e-6).all()):
                raise ValueError(f"Sum: no point lies in both {maps[0]} and {self.second}")

    on = property(lambda self: self.first.on if self.first.on is not None else self.second.on)

    def bind(self, layout: Layout) -> Prox:
        return Sum(self.first.bind(layout), self.second.bind(layout))

    def threshold(self, q: Any, s: Any) -> Any:
        return _plus(self.first.threshold(q, s), self.second.threshold(q, s))

    def shrinkage(self, q: Any, s: Any) -> Any:
        return _plus(self.first.shrinkage(q, s), self.second.shrinkage(q, s))

    def clip(self, x: Tensor) -> Tensor:  # intervals that meet: one after the other ends in both
        return self.second.clip(self.first.clip(x))

    def terms(self, x: Tensor) -> Any:
        return _plus(self.first.terms(x), self.second.terms(x))

    def feasible(self, x: Tensor, tol: float = 0.0) -> Tensor:
        return self.first.feasible(x, tol) & self.second.feasible(x, tol)


@registry.proxes.register("sum", owner="Sum")
def summed(of: Any) -> Prox:
    """Several separable maps at once: penalties (l1, squared-l2, elastic-net) and sets (box, nonnegative, ...).

    Args:
        of: two or more maps, or their tables.
    """
    if not isinstance(of, list | tuple) or len(of) < 2:
        raise ValueError(f"Sum: of must be a list of two or more tables with 'kind', got {checks.shown(of)}")
    return Sum(*of)


def _plus(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


@registry.proxes.register("shifted")
@dataclass(frozen=True)
class Shifted(Prox):
    """psi(x - centre) on centre + C: x = centre + prox(u - centre, q, s), for any map.

    Args:
        prox: the map to shift, or its table.
        centre: the new origin: a number, or one for each coordinate.

    >>> from fedda.rules.prox import L2Ball
    >>> Shifted(L2Ball(radius=1.0), centre=1.0)(torch.tensor([4.0, 5.0]), q=2.0, s=1.0)
    tensor([1.6000, 1.8000])
    """

    prox: Any
    centre: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "prox", base.prox(self.prox))
        object.__setattr__(self, "centre", numbers("Shifted", "centre", self.centre))

    def bind(self, layout: Layout) -> Prox:
        return replace(self, prox=self.prox.bind(layout))

    def __call__(self, u: Tensor, q: Any, s: Any) -> Tensor:
        x: Tensor = (self.centre + self.prox(u - self.centre, q, s)).to(u.dtype)
        return x

    def value(self, x: Tensor) -> Tensor:
        psi: Tensor = self.prox.value(x - self.centre).to(x.dtype)
        return psi

    def feasible(self, x: Tensor, tol: float = 0.0) -> Tensor:
        inside: Tensor = self.prox.feasible(x - self.centre, tol)
        return inside
