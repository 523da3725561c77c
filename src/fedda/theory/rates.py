"""How G_t falls with the steps T and the clients K (C29), and the steps and rounds to a stationary point (C30)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import checks
from ..rules.preconditioners import Diagonal
from .synthetic import Synthetic, centred, spectrum
from .theorem import Practical, rounds_of, steps_to
from .trace import measure, traces

ADAPTIVE = Diagonal(beta=0.99, eps=0.5)
DECADES = 1.3  # the last part of the curve, to which the slope is fitted


@dataclass(frozen=True)
class Decay:
    """Running means of G_t: `mean` [K, seeds, points] at the steps `t` [points]."""

    K: tuple[int, ...]
    t: np.ndarray
    mean: np.ndarray

    @property
    def long(self) -> bool:
        """Whether the curve has enough decades of steps to fit the slope."""
        return bool(self.t[-1] >= self.t[0] * 10**DECADES)

    @property
    def slopes(self) -> np.ndarray:
        """The exponent of T for every number of clients and seed, fitted over the last 1.3 decades."""
        late = self.t >= self.t[-1] / 10**DECADES
        x = np.log(self.t[late])
        x = x - x.mean()
        return (np.log(self.mean[..., late]) * x).sum(axis=-1) / (x**2).sum()

    def first_below(self, level: float) -> np.ndarray:
        """The steps until the running mean over seeds is at most `level`, by interpolation; nan if it never is."""
        steps = []
        for curve in self.mean.mean(axis=1):
            below = np.flatnonzero(curve <= level)
            if not below.size or not below[0]:
                steps.append(math.nan)
                continue
            i = below[0]
            share = np.log(curve[i - 1] / level) / np.log(curve[i - 1] / curve[i])
            steps.append(float(self.t[i - 1] * (self.t[i] / self.t[i - 1]) ** share))
        return np.array(steps)


def decay(
    K: Sequence[int] = (1, 4, 16), T: int = 60_000, seeds: int = 3, steps: int = 5, estimator: Any = None, d: int = 20,
    points: int = 120, hessians: Tensor | None = None, adaptive: bool = False,
) -> Decay:  # fmt: skip
    """Run FedDA-MVR with the practical schedule for T steps on K clients and record the running mean of G_t.

    d = 20, A = linspace(0.1, 1) for all clients (or `hessians` [K, d]), b_k ~ N(0, I) centred, sigma = 1 in each
    coordinate, x_0 = 1, H = 1. Numbers of clients and seeds run as replicas of one program. `estimator` makes
    another estimator from c. With `adaptive`, H is that of FedDA-1-1 (`ADAPTIVE`), and lambda is its epsilon, so that
    no step is longer than with H = 1; G has the rho of each round.
    """
    checks.count("decay", "T", T)
    most = max(K)
    counts = [k for k in K for _ in range(seeds)]
    A = spectrum(d) if hessians is None else hessians
    # The centres of K clients have mean zero; Synthetic copies these clients until there are `most`.
    centres = torch.zeros(len(counts), most, d, dtype=torch.float64)
    for i, k in enumerate(counts):
        centres[i, :k] = centred(k, d, seed=i % seeds)
    problem = Synthetic(A, centres, noise=1.0, distinct=counts)
    schedule = Practical(torch.tensor(counts, dtype=torch.float64).view(-1, 1, 1))
    algorithm = schedule.algorithm(steps, None if estimator is None else estimator(schedule.c))
    if adaptive:
        algorithm = replace(algorithm, preconditioner=ADAPTIVE, scale=ADAPTIVE.eps, mu_scale="mean")
    rounds = max(1, T // steps)
    due = np.unique(np.geomspace(1, rounds, points).round().astype(int))
    total = torch.zeros(len(counts), dtype=torch.float64)
    means: list[Tensor] = []
    x0 = torch.ones(d, dtype=torch.float64)
    seed = [1000 * s for s in range(seeds)] * len(K)
    for n, trace in enumerate(traces(algorithm, problem, rounds, seed=seed, x0=x0), 1):
        total += measure(trace, problem).total.sum(dim=0)
        if n == due[len(means)]:
            means.append(total / (n * steps))
    mean = torch.stack(means, dim=-1).view(len(K), seeds, -1).numpy()
    return Decay(tuple(K), due * steps, mean)


@dataclass(frozen=True)
class Complexity:
    """Powers p in eps^-p."""

    steps: float  # of T, at which the bound falls to eps
    rounds: float  # of E = T / I with the corollary's I
    measured: float  # of T on the quadratics, mean over the numbers of clients


def complexity(curve: Decay, K: int = 10) -> Complexity:
    """Fit the powers: of the bound, for eps so small that I > 1 and logarithms matter little, and of the curve."""
    eps = np.geomspace(1e-12, 1e-8, 9)
    T = np.array([steps_to(e, K) for e in eps])
    E = np.array([rounds_of(t, K) for t in T])
    late = curve.t >= curve.t[-1] / 10
    measured = []
    for i, G in enumerate(curve.mean.mean(axis=1)):
        levels = np.geomspace(0.99 * G[late][0], 1.01 * G[-1], 8)  # that the last decade of steps passes through
        measured.append(power(levels, np.array([curve.first_below(level)[i] for level in levels])))
    return Complexity(power(eps, T), power(eps, E), float(np.mean(measured)))


def power(eps: np.ndarray, amount: np.ndarray) -> float:
    """p in amount = eps^-p, by least squares."""
    return float(-np.polyfit(np.log(eps), np.log(amount), 1)[0])
