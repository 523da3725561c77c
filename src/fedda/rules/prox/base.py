"""The interface of all maps, and how a map is built from a user's value."""

from __future__ import annotations

from contextlib import suppress
from numbers import Real
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ... import checks, registry
from ...checks import warn
from .layout import Layout


class Prox:
    """The base of all maps: psi = 0 and C = R^d."""

    identity: ClassVar[bool] = False  # whether it stands for no penalty and no constraint

    def __call__(self, u: Tensor, q: Any, s: Any) -> Tensor:
        """The map itself: argmin_x s psi(x) + 1/2 sum_j q_j (x_j - u_j)^2 over x in C.

        Args:
            u: points, [..., d].
            q: the metric: a number for each row, or a diagonal that broadcasts with u.
            s: the weight of psi.

        Returns:
            The solutions, in the shape and dtype of u.
        """
        return u

    def value(self, x: Tensor) -> Tensor:
        """psi(x), without the constraint: [...] from [..., d].

        Args:
            x: points, [..., d].
        """
        return torch.zeros_like(x[..., 0])

    def feasible(self, x: Tensor, tol: float = 0.0) -> Tensor:
        """Whether x lies in C up to `tol` and the rounding of its dtype: [...] from [..., d].

        Args:
            x: points, [..., d].
            tol: how far outside a point may lie, as a length.
        """
        return torch.ones_like(x[..., 0], dtype=torch.bool)

    def project(self, x: Tensor) -> Tensor:
        """The nearest point of C.

        Args:
            x: points, [..., d].
        """
        return self(x, 1.0, 0.0)

    def bind(self, layout: Layout) -> Prox:
        """This map for a model with this layout: names and patterns become masks and groups.

        Args:
            layout: names and shapes of the model's parameters, in the order of the flat vector.
        """
        return self


def prox(value: Prox | dict[str, Any] | None) -> Prox:
    """A map from None, a map, or a table as in TOML: ``{kind = "l1", gamma = 0.01}``.

    Args:
        value: None for no penalty, a map, or a table with its "kind" and parameters.

    >>> prox({"kind": "l1-ball", "radius": 50})
    L1Ball(radius=50, method='newton')
    """
    if value is None:
        value = {"kind": "none"}
    if isinstance(value, dict) and "kind" in value:
        value = registry.proxes.find(value["kind"])(**{k: v for k, v in value.items() if k != "kind"})
    if isinstance(value, Prox):
        return value
    raise ValueError(f"prox must be a fedda.prox map, a table with 'kind', or None, got {checks.shown(value)}")


def feasible_start(owner: str, prox: Prox, x: Tensor) -> Tensor:
    """A first model in the set: x if it lies in C; else its projection, with a warning.

    Args:
        owner: the name of the algorithm, for the warning.
        prox: the map.
        x: the first model, [..., d].
    """
    if bool(prox.feasible(x).all()):
        return x
    projected = prox.project(x)
    moved = float((projected - x).norm(dim=-1).max())
    warn(f"{owner}: x_0 lies outside the {type(prox).__name__}; projected, moved by {moved:.3g}")
    return projected


def slack(x: Tensor) -> float:
    """How far off, relative to its size, a constraint may be in the dtype of x."""
    return 1e-12 if x.dtype == torch.float64 else 1e-6


def is_scalar(q: Any) -> bool:
    """Whether the metric is one number for each row."""
    return not isinstance(q, Tensor) or q.dim() == 0 or q.shape[-1] == 1


def numbers(owner: str, name: str, value: Any) -> Any:
    """A number or a tensor as it is, a list or an array as a tensor; anything else is refused."""
    if isinstance(value, Tensor) or (isinstance(value, Real) and not isinstance(value, bool)):
        return value
    if isinstance(value, list | tuple | np.ndarray):
        with suppress(TypeError, ValueError):
            return torch.tensor(value, dtype=torch.float64)
    raise ValueError(f"{owner}: {name} must be a number or a tensor, got {checks.shown(value)}")


def unbound(owner: str, name: str, value: Any) -> ValueError:
    return ValueError(
        f"{owner}: {name}={value!r} needs the names and shapes of the model's parameters: call bind(layout) first"
    )
