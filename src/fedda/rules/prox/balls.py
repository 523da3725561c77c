"""Sets with one multiplier, computed by Newton's method from the left: the L2 ball, the L1 ball and the simplex."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import checks, registry
from .base import Prox, is_scalar, slack
from .newton import climb, dot, in_blocks

# Piecewise linear: every step divides (value x slope) by 4 or more, so 32 steps leave 5e-20 of it (14 were seen at
# most, d = 1e6). Smooth: quadratic in the end (10 were seen).
LINEAR, SMOOTH = 32, 20
SAMPLED = 1 << 16  # from this size on a sample of the coordinates gives the first guess


@registry.proxes.register("l2-ball")
@dataclass(frozen=True)
class L2Ball(Prox):
    """C = {||x||_2 <= radius}: x_j = q_j u_j / (q_j + m), the multiplier m >= 0 by Newton's method; q = 1 rescales.

    Args:
        radius: the largest Euclidean norm.

    >>> L2Ball(radius=1.0)(torch.tensor([3.0, 4.0]), q=2.0, s=1.0)
    tensor([0.6000, 0.8000])
    """

    radius: Any

    def __post_init__(self) -> None:
        checks.check("L2Ball", radius=self.radius)

    def __call__(self, u: Tensor, q: Any, s: Any) -> Tensor:
        if is_scalar(q):
            return in_blocks(lambda u, R, x: self._rescale(x.copy_(u), R), u, self.radius, buffers=1)
        return in_blocks(self._solve, u, q, self.radius, buffers=3)

    @staticmethod
    def _rescale(x: Tensor, R: Any) -> Tensor:
        return x.mul_((R / dot(x, x).sqrt()).clamp(max=1.0))

    @staticmethod
    def _solve(u: Tensor, q: Tensor, R: Any, c: Tensor, t: Tensor, y: Tensor) -> Tensor:
        torch.mul(q, y.copy_(u), out=c)

        def step(m: Tensor) -> Tensor:  # on (sum c^2 / (q + m)^2)^(-1/2) - 1 / R, concave in m
            torch.add(q, m, out=t).reciprocal_()
            S2 = dot(torch.mul(c, t, out=y), y)
            S3 = dot(y.mul_(y), t)
            m = m + S2 * (S2.sqrt() / R - 1) / S3
            return m

        m0 = q.amin(dim=-1, keepdim=True) * (dot(y, y).sqrt() / R - 1).clamp(min=0)
        m = climb(step, m0, SMOOTH, tol=1e-12)
        return L2Ball._rescale(torch.div(q, torch.add(q, m, out=t), out=t).mul_(u), R)

    def feasible(self, x: Tensor, tol: float = 0.0) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
        inside: Tensor = (norm <= self.radius * (1 + slack(x)) + tol)[..., 0]
        return inside


@registry.proxes.register("l1-ball")
@dataclass(frozen=True)
class L1Ball(Prox):
    """C = {||x||_1 <= radius}: soft thresholding at th / q, th such that the norm is the radius; with exact zeros.

    Args:
        radius: the largest L1 norm.
        method: "newton" passes over the model about ten times, "sort" sorts it once.

    >>> L1Ball(radius=1.0)(torch.tensor([2.0, -1.5, 0.1]), q=1.0, s=1.0)
    tensor([ 0.7500, -0.2500, 0.0000])
    """

    radius: Any
    method: str = "newton"

    def __post_init__(self) -> None:
        checks.check("L1Ball", radius=self.radius)
        checks.one_of("L1Ball", "method", self.method, ("newton", "sort"))

    def __call__(self, u: Tensor, q: Any, s: Any) -> Tensor:
        return in_blocks(self._solve, u, _inverse(q, u), self.radius, buffers=3)

    def _solve(self, u: Tensor, w: Tensor, R: Any, a: Tensor, k: Tensor, active: Tensor) -> Tensor:
        inside = torch.zeros_like(a.copy_(u).abs_()[..., :1])
        torch.div(a, w, out=k)
        th = (
            torch.fmax(inside, sorted_level(a, w, k, R)) if self.method == "sort" else level(a, w, k, R, inside, active)
        )
        outside = a.sum(dim=-1, keepdim=True) > R
        x = torch.addcmul(a, w, th, value=-1, out=k).clamp_(min=0)
        return torch.where(outside, _to_sum(x, a, w, R), x).copysign_(u)

    def feasible(self, x: Tensor, tol: float = 0.0) -> Tensor:
        norm = x.abs().sum(dim=-1, keepdim=True, dtype=torch.float64)
        inside: Tensor = (norm <= self.radius * (1 + slack(x)) + tol)[..., 0]
        return inside


@registry.proxes.register("simplex")
@dataclass(frozen=True)
class Simplex(Prox):
    """C = {x >= 0, sum x = radius}: x = max(u - th / q, 0), th such that the sum is the radius.

    Args:
        radius: the sum of the coordinates.

    >>> Simplex()(torch.tensor([0.9, 0.5, -1.0]), q=1.0, s=1.0)
    tensor([0.7000, 0.3000, 0.0000])
    """

    radius: Any = 1.0

    def __post_init__(self) -> None:
        checks.check("Simplex", radius=self.radius)

    def __call__(self, u: Tensor, q: Any, s: Any) -> Tensor:
        return in_blocks(self._solve, u, _inverse(q, u), self.radius, buffers=3)

    @staticmethod
    def _solve(u: Tensor, w: Tensor, R: Any, v: Tensor, k: Tensor, active: Tensor) -> Tensor:
        torch.div(v.copy_(u), w, out=k)
        everyone = (v.sum(dim=-1, keepdim=True) - R) / w.sum(dim=-1, keepdim=True)  # all active: left of the root
        x = torch.addcmul(v, w, level(v, w, k, R, everyone, active), value=-1, out=k).clamp_(min=0)
        return _to_sum(x, v, w, R)

    def feasible(self, x: Tensor, tol: float = 0.0) -> Tensor:
        gap = (x.sum(dim=-1, keepdim=True, dtype=torch.float64) - self.radius).abs()
        inside: Tensor = (gap <= self.radius * slack(x) + tol)[..., 0] & (x >= -tol).all(dim=-1)
        return inside


def _to_sum(x: Tensor, v: Tensor, w: Tensor, R: Any) -> Tensor:
    """x scaled to sum R; where v is so large that v - th w has cancelled to 0, R stands on the largest v / w."""
    total = x.sum(dim=-1, keepdim=True)
    scaled: Tensor = x * (R / total)
    if total.device.type == "cpu" and not bool((total == 0).any()):
        return scaled
    largest = torch.zeros_like(x).scatter_(-1, (v / w).argmax(dim=-1, keepdim=True), 1.0) * R
    return torch.where(total == 0, largest, scaled)


def level(v: Tensor, w: Tensor, k: Tensor, R: Any, start: Tensor, active: Tensor) -> Tensor:
    """The root th >= start of sum_j max(v_j - th w_j, 0) = R, k = v / w, by Newton's method: ends when its set repeats.

    Every set A gives a bound from the left, (sum_A v - R) / (sum_A w); Newton's takes all that lie above th, wherever
    th lies. So it may start from any guess: here from single coordinates, which saves steps in a metric over many
    orders of magnitude, and from the level of every 32nd coordinate, which halves the steps of a large model.
    """

    def step(th: Tensor) -> Tensor:
        torch.gt(k, th, out=active)
        th = (dot(active, v) - R) / dot(active, w)
        return th

    alone = torch.sub(v, R, out=active).div_(w).amax(dim=-1, keepdim=True)
    th = torch.fmax(start, alone)
    if v.shape[-1] >= SAMPLED:
        a, b, c = (t[..., ::32].contiguous() for t in (v, w, k))
        th = torch.fmax(th, step(level(a, b, c, R / 32, start, torch.empty_like(a))))
    return climb(step, th, LINEAR)


def sorted_level(v: Tensor, w: Tensor, k: Tensor, R: Any) -> Tensor:
    """The same root, from one sort: the last n for which the n largest v / w lie above their own level."""
    k, order = k.sort(dim=-1, descending=True)
    sums = v.gather(-1, order).cumsum(dim=-1), w.expand_as(v).gather(-1, order).cumsum(dim=-1)
    levels: Tensor = (sums[0] - R) / sums[1]
    last = ((k > levels).sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    return levels.gather(-1, last)


def _inverse(q: Any, u: Tensor) -> Tensor:
    """1 / q in float64; a scalar metric cancels."""
    return torch.ones_like(u[..., :1, :] if u.dim() > 1 else u, dtype=torch.float64) if is_scalar(q) else 1 / q.double()
