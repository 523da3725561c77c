"""A schedule of Theorem 1's form with constants of practical size: one that can be run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..algorithms.fedda import FedDA
from ..rules.estimators import Estimator, Mvr
from ..rules.preconditioners import Identity, Preconditioner
from ..rules.schedules import CubeRoot

KAPPA, FLOOR, CLIENTS, WEIGHT = 0.25, 8.0, 1.6, 10.0  # where the theorem has 1, 14^3 sqrt K, 48^3 I^6 and 96


@dataclass(frozen=True)
class Practical:
    """eta_t = lr / (w + t)^(1/3), alpha = min(1, c eta^2) with the theorem's dependence on K, L, rho and lambda:

        lr = 0.25 rho K^(2/3) / (lambda L),    w = max(8, 1.6 K^2),    c = 10 (lambda L / rho)^2 / K

    It does not depend on the number of steps, so that one long run shows the whole curve. `ratio` is lambda L / rho of
    f, which bounds a stable step; `batches`, which sets c, the same with assumption 5's L of mini-batches, where it is
    another. K may be a tensor, one number for each replica.

    >>> schedule = Practical(K=4)
    >>> round(schedule.eta(0), 3), round(schedule.alpha(0), 3)
    (0.214, 0.114)
    """

    K: Any
    ratio: float = 1.0
    batches: float | None = None

    @property
    def lr(self) -> Any:
        return KAPPA * self.K ** (2 / 3) / self.ratio

    @property
    def w(self) -> Any:
        w = CLIENTS * self.K**2
        return w.clamp(min=FLOOR) if isinstance(w, Tensor) else max(FLOOR, w)

    @property
    def c(self) -> Any:
        ratio = self.ratio if self.batches is None else self.batches
        return WEIGHT * ratio**2 / self.K

    def eta(self, t: Any) -> Any:
        return self.lr / (self.w + t) ** (1 / 3)

    def alpha(self, t: Any) -> Any:
        return self.c * self.eta(t) ** 2

    def algorithm(
        self, steps: int = 5, estimator: Estimator | None = None, preconditioner: Preconditioner | None = None
    ) -> FedDA:
        """FedDA-MVR with this schedule, H = 1 unless another is given."""
        return FedDA(CubeRoot(self.lr, self.w), estimator or Mvr(self.c), preconditioner or Identity(), steps=steps)


def clients(numbers: list[int]) -> Tensor:
    """Numbers of clients, one for each replica, as hyper-parameters are: [replicas, 1, 1]."""
    return torch.tensor(numbers, dtype=torch.float64).view(-1, 1, 1)


@dataclass(frozen=True)
class Weighted:
    """nu = alpha g(x; B) + (1 - alpha) nu with MVR's alpha = min(1, c eta^2): what its second gradient is there for."""

    c: Any

    def weight(self, eta: Any) -> Any:
        return Mvr(self.c).weight(eta)

    def __call__(self, nu: Tensor, x: Tensor, x_prev: Tensor, eta: Any, client: Any) -> Tensor:
        (g,) = client.gradients(x)
        a = self.weight(eta)
        return a * g + (1 - a) * nu
