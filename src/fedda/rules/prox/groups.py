"""Penalties on the norms of groups of coordinates: a whole filter or input feature is zero, or is not."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ... import checks, registry
from .balls import SMOOTH
from .base import Prox, is_scalar, numbers, unbound
from .layout import GROUPS, Layout, group_ids
from .newton import climb, in_blocks
from .segments import Segments


class Grouped(Prox):
    """What is shared: x_j = c_j r / (q_j r + kap), c = soft(q u, s gamma1), r = ||x_g|| by Newton's method."""

    groups: Any
    weights: Any
    segments: Any

    def _prepare(self, **gammas: Any) -> None:
        owner = type(self).__name__
        checks.check(owner, **gammas)
        name, gamma = list(gammas.items())[-1]
        if isinstance(gamma, Tensor) and gamma.dim() and gamma.shape[1:] != (1, 1):
            raise ValueError(
                f"{owner}: {name} must be one number (weights has one for each group), got {checks.shown(gamma)}"
            )
        object.__setattr__(self, "segments", None)
        if isinstance(self.groups, str):
            checks.one_of(owner, "groups", self.groups, GROUPS)
            return
        ids = self.groups if isinstance(self.groups, Tensor) else numbers(owner, "groups", self.groups)
        good = (
            isinstance(ids, Tensor) and ids.dim() == 1 and bool((ids >= -1).all()) and bool((ids == ids.long()).all())
        )
        if not good or not bool((ids >= 0).any()):
            allowed = "'layer', 'filter', 'feature', or a group number for every coordinate (-1: in none)"
            raise ValueError(f"{owner}: groups must be {allowed}, got {checks.shown(self.groups)}")
        object.__setattr__(self, "groups", ids.long())
        object.__setattr__(self, "segments", Segments(self.groups))
        if self.weights is not None:
            object.__setattr__(self, "weights", numbers(owner, "weights", self.weights))
            checks.number(owner, "weights", self.weights, checks.AT_LEAST_ZERO)
            if isinstance(self.weights, Tensor) and self.weights.shape not in ((), (self.segments.count,)):
                raise ValueError(
                    f"{owner}: weights must be one for each of the {self.segments.count} groups, "
                    f"got {list(self.weights.shape)}"
                )

    def bind(self, layout: Layout) -> Prox:
        if not isinstance(self.groups, str):
            return self
        return replace(self, groups=group_ids(type(self).__name__, self.groups, layout))  # type: ignore[type-var]

    def _segments(self, x: Tensor) -> Segments:
        if self.segments is None:
            raise unbound(type(self).__name__, "groups", self.groups)
        segments: Segments = self.segments
        if len(segments.ids) != x.shape[-1]:
            raise ValueError(f"{type(self).__name__}: groups has {len(segments.ids)} entries, the model {x.shape[-1]}")
        return segments

    def _weights(self, segments: Segments) -> Any:
        return segments.sizes.double().sqrt() if self.weights is None else self.weights

    def _map(self, u: Tensor, q: Any, s: Any, gamma1: Any, gamma2: Any) -> Tensor:
        segments = self._segments(u)
        kap = s * gamma2 * self._weights(segments)
        one = torch.ones(segments.count, dtype=torch.float64, device=u.device)
        shift = None if gamma1 is None else s * gamma1 * (segments.ids >= 0).double()
        return in_blocks(_scalar if is_scalar(q) else _diagonal, u, q, kap * one, shift, segments)

    def _norms(self, x: Tensor) -> Tensor:
        """The weighted sum of the groups' norms: [..., 1]."""
        segments = self._segments(x)
        norms = segments.sum(x.double() ** 2).sqrt()
        total: Tensor = (self._weights(segments) * norms).sum(dim=-1, keepdim=True)
        return total


def _scalar(u: Tensor, q: Any, kap: Tensor, shift: Tensor | None, segments: Segments) -> Tensor:
    u = u.double() if shift is None else u - u.clamp(-shift / q, shift / q)
    norm = q * segments.sum(u**2).sqrt()
    factor = torch.where(kap == 0, 1.0, torch.where(norm > kap, 1 - kap / norm, 0.0))
    return u * segments.spread(factor, otherwise=1.0)


def _diagonal(u: Tensor, q: Tensor, kap: Tensor, shift: Tensor | None, segments: Segments) -> Tensor:
    u = u.double() if shift is None else u - u.clamp(-shift / q, shift / q)
    c, K = q * u, segments.spread(kap, otherwise=0.0)

    def step(r: Tensor) -> Tensor:  # on (sum c^2 / (q r + kap)^2)^(-1/2) - 1, concave in r
        t = (q * segments.spread(r, otherwise=0.0)).add_(K).reciprocal_()
        y = (c * t).square_()
        S2 = segments.sum(y)
        return r + S2 * (S2.sqrt() - 1) / segments.sum(y.mul_(q).mul_(t))

    start = (segments.sum(c**2).sqrt() - kap).clamp(min=0) / segments.amax(q)
    r = climb(step, start.nan_to_num(), SMOOTH, tol=1e-12)
    qr = q * segments.spread(r, otherwise=0.0)
    return u * torch.where(K == 0, 1.0, qr / (qr + K))


@registry.proxes.register("group-lasso")
@dataclass(frozen=True)
class GroupLasso(Grouped):
    """psi(x) = gamma sum_g w_g ||x_g||: the norm of every group shrinks, and small groups are exactly zero.

    Args:
        gamma: the weight of the penalty.
        groups: a group number for every coordinate (-1: in none), or "layer", "filter" (output channel or row of every
            weight) or "feature" (input of the first weight). Biases of a model are not penalised.
        weights: the weights of the groups: one number, or one for each group; by default the square root of the size of
            a group.

    >>> GroupLasso(gamma=1.0, groups=[0, 0, 1, -1], weights=1.0)(torch.tensor([3.0, 4.0, 0.5, 0.5]), q=1.0, s=1.0)
    tensor([2.4000, 3.2000, 0.0000, 0.5000])
    """

    gamma: Any
    groups: Any
    weights: Any = None
    segments: Any = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        self._prepare(gamma=self.gamma)

    def __call__(self, u: Tensor, q: Any, s: Any) -> Tensor:
        return self._map(u, q, s, None, self.gamma)

    def value(self, x: Tensor) -> Tensor:
        psi: Tensor = (self.gamma * self._norms(x))[..., 0].to(x.dtype)
        return psi


@registry.proxes.register("sparse-group-lasso")
@dataclass(frozen=True)
class SparseGroupLasso(Grouped):
    """psi(x) = gamma1 ||x||_1 + gamma2 sum_g w_g ||x_g||, over the coordinates that are in a group.

    Args:
        gamma1: the weight of the L1 norm.
        gamma2: the weight of the norms of the groups.
        groups: a group number for every coordinate (-1: in none), or "layer", "filter" (output channel or row of every
            weight) or "feature" (input of the first weight).
        weights: the weights of the groups: one number, or one for each group; by default the square root of the size of
            a group.

    >>> penalty = SparseGroupLasso(gamma1=1.0, gamma2=1.0, groups=[0, 0, 1, -1], weights=1.0)
    >>> penalty(torch.tensor([4.0, 5.0, 1.5, 0.5]), q=1.0, s=1.0)
    tensor([2.4000, 3.2000, 0.0000, 0.5000])
    """

    gamma1: Any
    gamma2: Any
    groups: Any
    weights: Any = None
    segments: Any = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        self._prepare(gamma1=self.gamma1, gamma2=self.gamma2)

    def __call__(self, u: Tensor, q: Any, s: Any) -> Tensor:
        return self._map(u, q, s, self.gamma1, self.gamma2)

    def value(self, x: Tensor) -> Tensor:
        grouped = (self.gamma1 * x.abs() * (self._segments(x).ids >= 0)).sum(dim=-1, dtype=torch.float64)
        psi: Tensor = (grouped + (self.gamma2 * self._norms(x))[..., 0]).to(x.dtype)
        return psi
