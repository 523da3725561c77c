"""Penalties on a parameter as a matrix."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ... import checks, registry
from .base import Prox, is_scalar, unbound
from .layout import Layout, matching


@registry.proxes.register("nuclear-norm")
@dataclass(frozen=True)
class NuclearNorm(Prox):
    """psi(x) = gamma (sum of the singular values of one matrix parameter): they are soft thresholded at s gamma / q.

    The metric must be a scalar one: the singular vectors of the solution are those of u only where all entries are
    weighted alike. Give `on` or `shape`.

    Args:
        gamma: the weight of the penalty.
        shape: rows and columns of the matrix, if it is given by its position in the flat vector.
        on: the name of the parameter, or a pattern that fits one; a convolution is taken as [output channels, the
            rest].
        start: with `shape`: the position of the matrix in the flat vector.

    >>> NuclearNorm(gamma=1.0, shape=(2, 2))(torch.tensor([3.0, 0.0, 0.0, 0.5]), q=1.0, s=1.0)
    tensor([2., 0., 0., 0.])
    """

    gamma: Any
    shape: tuple[int, int] | None = None
    on: str | None = None
    start: int = 0

    def __post_init__(self) -> None:
        checks.check("NuclearNorm", gamma=self.gamma)
        if (self.shape is None) == (self.on is None):
            raise ValueError("NuclearNorm: give shape, or on (the name of a parameter), and not both")
        if self.shape is not None:
            good = isinstance(self.shape, list | tuple) and len(self.shape) == 2
            if not good or not all(isinstance(n, int) and n >= 1 for n in self.shape):
                raise ValueError(f"NuclearNorm: shape must be two whole numbers >= 1, got {self.shape!r}")
            object.__setattr__(self, "shape", tuple(self.shape))

    def bind(self, layout: Layout) -> Prox:
        if self.on is None:
            return self
        spans = matching("NuclearNorm", self.on, layout)
        if len(spans) > 1 or len(spans[0].shape) < 2:
            named = ", ".join(f"{span.name} {list(span.shape)}" for span in spans)
            raise ValueError(f"NuclearNorm: on={self.on!r} must fit one parameter of 2 or more dimensions, got {named}")
        (_, shape, part) = spans[0]
        return replace(self, on=None, shape=(shape[0], math.prod(shape[1:])), start=part.start)

    def _matrix(self, x: Tensor) -> Tensor:
        if self.shape is None:
            raise unbound("NuclearNorm", "on", self.on)
        m, n = self.shape
        if self.start + m * n > x.shape[-1]:
            raise ValueError(f"NuclearNorm: shape {m} x {n} from {self.start} on is more than {x.shape[-1]} numbers")
        matrix: Tensor = x[..., self.start : self.start + m * n].double().unflatten(-1, (m, n))
        return matrix

    def __call__(self, u: Tensor, q: Any, s: Any) -> Tensor:
        matrix = self._matrix(u)
        if not is_scalar(q):
            raise ValueError(
                "NuclearNorm: the metric must be a scalar (fedda-1-2, fedda-2-2), got a diagonal one, in which the "
                "singular vectors of the solution are no longer those of u and no closed form is known"
            )
        U, sigma, V = torch.linalg.svd(matrix, full_matrices=False)
        sigma = (sigma - s * self.gamma / q).clamp(min=0)
        new = ((U * sigma[..., None, :]) @ V).flatten(-2).to(u.dtype)
        end = self.start + new.shape[-1]
        return torch.cat(
            [u[..., : self.start].expand(*new.shape[:-1], -1), new, u[..., end:].expand(*new.shape[:-1], -1)], -1
        )

    def value(self, x: Tensor) -> Tensor:
        psi: Tensor = (self.gamma * torch.linalg.svdvals(self._matrix(x))).sum(dim=-1).to(x.dtype)
        return psi
