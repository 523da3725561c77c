"""Gradient estimators: the paper's rule U, from the old estimate and one fresh mini-batch to the new one.

All have one shape, ``nu = estimator(nu, x, x_prev, eta, client)``; `client.gradients(*points)` evaluates one
fresh mini-batch at every point given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..checks import check, one_of, warn
from .schedules import RateDecay

__all__ = ["Estimator", "Gradients", "Momentum", "Mvr", "Plain"]


class Gradients(Protocol):
    """The part of a client that an estimator uses."""

    def gradients(self, *points: Tensor) -> tuple[Tensor, ...]:
        """The gradients of one fresh mini-batch.

        Args:
            points: where to take them, each [..., d].
        """


Estimator = Callable[[Tensor, Tensor, Tensor, Any, Gradients], Tensor]


@dataclass(frozen=True)
class Plain:
    """nu = g(x; B): the mini-batch gradient itself (alpha = 1)."""

    def __call__(self, nu: Tensor, x: Tensor, x_prev: Tensor, eta: Any, client: Gradients) -> Tensor:
        (g,) = client.gradients(x)
        return g


@dataclass(frozen=True)
class Momentum:
    """nu = a g(x; B) + (1 - a) nu (equation nu-case2), a = 1 - momentum.

    Args:
        momentum: the weight of the history.
        alpha_mode: "history", or "weight": `momentum` is then a itself, as the equation prints it.
    """

    momentum: float = 0.9
    alpha_mode: str = "history"

    def __post_init__(self) -> None:
        one_of("Momentum", "alpha_mode", self.alpha_mode, ("history", "weight"))
        check("Momentum", momentum=self.momentum)

    def __call__(self, nu: Tensor, x: Tensor, x_prev: Tensor, eta: Any, client: Gradients) -> Tensor:
        a = self.momentum if self.alpha_mode == "weight" else 1 - self.momentum
        (g,) = client.gradients(x)
        return a * g + (1 - a) * nu


@dataclass(frozen=True)
class Mvr:
    """nu = g(x; B) + (1 - a) (nu - g(x_prev; B)), a = min(1, c eta^2) (equation nu-case1).

    Momentum-based variance reduction (STORM): ONE batch for both points, so that its noise cancels in the difference.

    Args:
        c: how fast old gradients are forgotten, relative to eta^2; larger is nearer to the plain gradient.
    """

    c: float

    def __post_init__(self) -> None:
        check("Mvr", c=self.c)

    @classmethod
    def default(cls, c: Any, rate: Callable[[Tensor], Any]) -> Mvr:
        """The estimator with c, or with 0.5 / eta_0^2.

        Args:
            c: the number, or None.
            rate: the schedule, for eta_0.
        """
        return cls(default_c(c, rate))

    def weight(self, eta: Any) -> Any:
        """a = min(1, c eta^2).

        Args:
            eta: the rate of the step.
        """
        return weight(self.c, eta)

    def warn(self, eta: Any) -> None:
        """Warn if c eta^2 > 1: without the clip 1 - a would be negative and the estimate would oscillate.

        Args:
            eta: the first rate.
        """
        a = float(torch.as_tensor(self.c * eta**2).max())
        if a > 1:
            warn(f"Mvr: c eta_0^2 = {a:.3g} > 1 is clipped to 1 (a plain gradient step); a smaller c or lr avoids it")

    def __call__(self, nu: Tensor, x: Tensor, x_prev: Tensor, eta: Any, client: Gradients) -> Tensor:
        g, g_prev = client.gradients(x, x_prev)
        estimate: Tensor = g + (1 - self.weight(eta)) * (nu - g_prev)
        return estimate


def default_c(c: Any, rate: Callable[[Tensor], Any]) -> Any:
    """c as given, or 0.5 / eta_0^2: the first weight is then a half. The start of a schedule counts as eta_0, without
    its warm-up."""
    if c is not None:
        return c
    first = rate.start if isinstance(rate, RateDecay) else rate(torch.zeros((), dtype=torch.float64))
    return 0.5 / first**2


def weight(c: Any, eta: Any) -> Any:
    """a = min(1, c eta^2)."""
    a = c * eta**2
    return a.clamp(max=1) if isinstance(a, Tensor) else min(1.0, a)


def __dir__() -> list[str]:
    return sorted(__all__)
