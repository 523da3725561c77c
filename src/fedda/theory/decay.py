"""How G_t falls with the steps and with the clients, on clients that share a Hessian (the speed-up's own ground)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import checks
from ..rules.estimators import Estimator
from .measure import measure
from .practical import Practical, clients
from .synthetic import Synthetic, centred, spectrum
from .trace import traces

DECADES = 1.3  # the part of the curve, up to its end, that the slope is fitted to


@dataclass(frozen=True)
class Decay:
    """Running means of G_t: `mean` [K, seeds, points] at the steps `t` [points]."""

    K: tuple[int, ...]
    t: np.ndarray
    mean: np.ndarray

    @property
    def long(self) -> bool:
        """Whether there are as many decades of steps as the slope is fitted to."""
        return bool(self.t[-1] >= self.t[0] * 10**DECADES)

    @property
    def slopes(self) -> np.ndarray:
        """The exponent of T for every number of clients and seed, fitted over the last 1.3 decades."""
        late = self.t >= self.t[-1] / 10**DECADES
        x = np.log(self.t[late])
        x = x - x.mean()
        return (np.log(self.mean[..., late]) * x).sum(axis=-1) / (x**2).sum()

    @property
    def ratios(self) -> np.ndarray:
        """How much better each number of clients is at the end than the one before, by seed: [K - 1, seeds]."""
        return self.mean[:-1, :, -1] / self.mean[1:, :, -1]

    def first_below(self, level: float) -> np.ndarray:
        """The steps until the running mean, over seeds, is at most `level`, by interpolation; nan where it never is."""
        found = []
        for curve in self.mean.mean(axis=1):
            below = np.flatnonzero(curve <= level)
            if not below.size or not below[0]:
                found.append(math.nan)
                continue
            i = below[0]
            share = np.log(curve[i - 1] / level) / np.log(curve[i - 1] / curve[i])
            found.append(float(self.t[i - 1] * (self.t[i] / self.t[i - 1]) ** share))
        return np.array(found)


def decay(
    K: Sequence[int] = (1, 4, 16),
    T: int = 60_000,
    seeds: int = 3,
    steps: int = 5,
    estimator: Any = None,
    d: int = 20,
    points: int = 120,
    hessians: Tensor | None = None,
) -> Decay:
    """Run FedDA-MVR with the practical schedule for T steps on K clients and record the running mean of G_t.

    d = 20, A = linspace(0.1, 1) for all clients (or `hessians` [K, d]), b_k ~ N(0, I) centred, sigma = 1 in each
    coordinate, x_0 = 1, H = 1. Numbers of clients and seeds run as replicas of one program. `estimator` makes another
    one from c.

    >>> curve = decay(K=(1, 2), T=200, seeds=2)
    >>> curve.mean.shape, bool((curve.mean[..., -1] < curve.mean[..., 0]).all())
    ((2, 2, 39), True)
    """
    checks.count("decay", "T", T)
    most = max(K)
    counts = [k for k in K for _ in range(seeds)]
    A = spectrum(d) if hessians is None else hessians
    # Those of K clients, with mean zero, are copied until there are `most`.
    centres = torch.zeros(len(counts), most, d, dtype=torch.float64)
    for i, k in enumerate(counts):
        centres[i, :k] = centred(k, d, seed=i % seeds)
    problem = Synthetic(A, centres, noise=1.0, distinct=counts)
    schedule = Practical(clients(counts))
    made: Estimator | None = None if estimator is None else estimator(schedule.c)
    algorithm = schedule.algorithm(steps, made)
    rounds = max(1, T // steps)
    due = np.unique(np.geomspace(1, rounds, points).round().astype(int))
    total = torch.zeros(len(counts), dtype=torch.float64)
    found: list[Tensor] = []
    x0 = torch.ones(d, dtype=torch.float64)
    seed = [1000 * s for s in range(seeds)] * len(K)
    for n, trace in enumerate(traces(algorithm, problem, rounds, seed=seed, x0=x0), 1):
        total += measure(trace, problem).total.sum(dim=0)
        if n == due[len(found)]:
            found.append(total / (n * steps))
    mean = torch.stack(found, dim=-1).view(len(K), seeds, -1).numpy()
    return Decay(tuple(K), due * steps, mean)
