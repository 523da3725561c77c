"""Remark 2, second half: does averaging second moments over clients give a speed-up, as building them from z? (C28)

At a fixed point x the second moment should tell of the gradient. FedDA squares the mean over clients, s^2 with s = mean
of nu; FAFED averages the clients' own squares. For noise of variance v on every gradient and K clients

    E s^2 = g^2 + v/K,   Var s^2 = 4 g^2 v/K + 2 v^2/K^2;      E mean g_k^2 = g^2 + v + (spread of the clients' g_k)^2.

So the bias of FedDA's falls with K and that of the average does not. The VARIANCE of the average falls like 1/K as
well: it is a mean of K independent squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..algorithms.fafed import Fafed
from ..algorithms.fedda import FedDA
from ..rules.estimators import Mvr
from ..rules.preconditioners import Diagonal
from ..rules.schedules import Constant
from ..run import Run
from .synthetic import Synthetic, centred, spectrum

STILL = 1e-9  # a rate at which the point stays where it is
DECAY = 0.999


GROUPS = 5  # of replicas, each of which gives a variance: their spread says how sure it is


@dataclass(frozen=True)
class Moments:
    """Of the second moment after one round, against the square of the true gradient; means over coordinates.

    `variance` and `bias` (squared) are {method: [groups, K]}.
    """

    K: tuple[int, ...]
    variance: dict[str, np.ndarray]
    bias: dict[str, np.ndarray]
    replicas: int

    def error(self, method: str) -> np.ndarray:
        """The mean squared error: variance and squared bias."""
        return self.variance[method] + self.bias[method]

    def exponents(self, values: np.ndarray) -> np.ndarray:
        """The power of K that values [groups, K] follow (least squares in the logarithms), [groups]."""
        return np.polyfit(np.log(self.K), np.log(values.T), 1)[0]


def moments(K: Sequence[int] = (2, 4, 8, 16, 32, 64), replicas: int = 500, d: int = 20, steps: int = 5) -> Moments:
    """One round at a point that does not move, for numbers of clients K: the mean and variance of mu over replicas.

    Clients share the Hessian linspace(0.1, 1), their minima are those of `spread_alike`, x = 1, sigma = 1 in each
    coordinate. Both methods run with alpha = 0.1 and the decay 0.999 from zero, and the weight of what they gathered is
    divided out: FedDA's is the square of the mean estimate, FAFED's the mean over clients and steps of the squares.

    >>> found = moments(K=(2, 16), replicas=200)
    >>> {method: [round(float(v), 1) for v in bias.mean(axis=0)] for method, bias in found.bias.items()}
    {'FedDA': [0.1, 0.0], 'FAFED': [1.9, 2.0]}
    """
    if min(K) < 2:
        raise ValueError(f"moments: K must be at least 2, as one client is not spread, got {min(K)}")
    variance: dict[str, list[Tensor]] = {"FedDA": [], "FAFED": []}
    bias: dict[str, list[Tensor]] = {"FedDA": [], "FAFED": []}
    x0 = torch.ones(d, dtype=torch.float64)
    for k in K:
        problem = Synthetic(spectrum(d), spread_alike(k, d), noise=1.0)
        g = problem.exact(x0[None])
        ours = FedDA(Constant(STILL), Mvr(0.1 / STILL**2), Diagonal(DECAY, eps=1.0), steps=steps, mu_scale="mean")
        theirs = Fafed(lr=STILL, alpha=0.1, beta2=DECAY, eps=1.0, steps=steps, v0=0.0)
        gathered = {"FedDA": 1 - DECAY, "FAFED": 1 - DECAY**steps}
        for name, algorithm, field in (("FedDA", ours, "mu"), ("FAFED", theirs, "v")):
            server = Run(algorithm, problem, seed=list(range(replicas)), x0=x0).step()
            mu = (getattr(server, field) / gathered[name] - g**2).view(GROUPS, -1, d)
            own = mu.var(dim=1)
            variance[name].append(own.mean(dim=-1))
            # Less what the mean of finitely many replicas has of the variance.
            bias[name].append((mu.mean(dim=1) ** 2 - own / mu.shape[1]).mean(dim=-1))
    spread, off = ({name: torch.stack(v, dim=-1).numpy() for name, v in part.items()} for part in (variance, bias))
    return Moments(tuple(K), spread, off, replicas)


def spread_alike(clients: int, d: int) -> Tensor:
    """Minima b_k ~ N(0, I), centred and then scaled to a mean square of 1 in each coordinate: heterogeneity does not
    grow with the number of clients, as (K - 1) / K does.

    >>> bool((spread_alike(2, 3).abs() - 1).abs().max() < 1e-12)
    True
    """
    b = centred(clients, d, seed=clients)
    return b / (b**2).mean(dim=0).sqrt()
