"""The remarks of the paper, measured: dual against primal averaging (C26) and second moments (C27, C28).

At a fixed point x the second moment should estimate the square of the gradient. FedDA squares the mean over clients,
s^2 with s = mean of nu; FAFED averages the clients' squares. For noise of variance v on every gradient and K clients

    E s^2 = g^2 + v/K,   Var s^2 = 4 g^2 v/K + 2 v^2/K^2;      E mean g_k^2 = g^2 + v + (spread of the clients' g_k)^2.

So the bias of FedDA's falls with K and that of the average does not. The VARIANCE of the average falls like 1/K as
well: it is a mean of K independent squares.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..algorithms.fafed import Fafed
from ..algorithms.fedda import FedDA, FedDAPrimal
from ..problems import Quadratic
from ..registry import make
from ..rules.estimators import Mvr
from ..rules.preconditioners import Diagonal
from ..rules.prox import Box, L1Ball, Prox
from ..rules.schedules import Constant
from ..run import Run
from .synthetic import Synthetic, centred, spectrum

# -- Remark 1 (C26): averaging dual and averaging primal states --------------------------------------------------------
WAYS = ("dual", "primal")
SETS: dict[str, Prox] = {"no constraint": Prox(), "box": Box(-0.5, 0.5), "L1 ball": L1Ball(2.0)}


@dataclass(frozen=True)
class Averaging:
    """Under one constraint: both paths of x, {way: [rounds, seeds, d]}, and the constrained minimum [d]."""

    path: dict[str, Tensor]
    minimum: Tensor

    @property
    def difference(self) -> np.ndarray:
        """max over coordinates of |x_dual - x_primal|, [rounds, seeds]."""
        return np.asarray((self.path["dual"] - self.path["primal"]).abs().amax(dim=-1))

    def distance(self, way: str) -> np.ndarray:
        """|x - x*|, [rounds, seeds]."""
        return np.asarray((self.path[way] - self.minimum).norm(dim=-1))


def averaging(
    prox: Prox, rounds: int = 300, seeds: Sequence[int] = (0, 1, 2), clients: int = 10, d: int = 8
) -> Averaging:
    """FedDA-MVR with both ways of averaging: clients with different Hessians, a diagonal adaptive H, noise 0.3."""
    generator = torch.Generator().manual_seed(0)
    A = 0.1 + 1.4 * torch.rand(clients, d, generator=generator, dtype=torch.float64)
    problem = Quadratic(A, torch.randn(clients, d, generator=generator, dtype=torch.float64), noise=0.3)
    algorithm: Any = make("fedda-mvr", lr=0.3, w=100.0, eps=0.3, prox=prox)
    paths = {way: path(averaged(algorithm, way), problem, rounds, seeds) for way in WAYS}
    return Averaging(paths, prox(problem.minimum[None], A.mean(dim=0), 0.0)[0])


def averaged(algorithm: FedDA, way: str) -> FedDA:
    """The algorithm with one way of averaging."""
    return algorithm if way == "dual" else FedDAPrimal.of(algorithm)


def path(algorithm: FedDA, problem: Any, rounds: int, seeds: Sequence[int]) -> Tensor:
    """x after each round, [rounds, seeds, d]."""
    run = Run(algorithm, problem, seed=list(seeds))
    return torch.stack([run.step().x[..., 0, :] for _ in range(rounds)])


METRICS = ("objective", "test_accuracy", "density", "nonzero")


def ablation(algorithm: FedDA, problem: Any, rounds: int, seeds: Sequence[int]) -> dict[str, dict[str, list[float]]]:
    """A penalised FedDA trained both ways: {way: {metric: one value per seed}} after the last round."""
    results: dict[str, dict[str, list[float]]] = {}
    for way in WAYS:
        run = Run(averaged(algorithm, way), problem, seed=list(seeds))
        for _ in range(rounds):
            run.advance()
        rows = run.evaluate()
        results[way] = {metric: [row[metric] for row in rows] for metric in METRICS if metric in rows[0]}
    return results


# -- Remark 2, first half (C27): is H smoother over rounds if it is built from z, not from the last estimate? ----------
INPUTS = ("z", "nu")


@dataclass(frozen=True)
class Smoothness:
    """log h of every round, by the input of H: [rounds + 1, seeds, d]. The first half of the run is not used."""

    path: dict[str, Tensor]

    def late(self, source: str) -> Tensor:
        path = self.path[source]
        return path[len(path) // 2 :]

    def deviation(self, source: str) -> Tensor:
        """The standard deviation of log h over the rounds of the second half, mean over coordinates: [seeds]."""
        return self.late(source).std(dim=0).mean(dim=-1)

    def change(self, source: str) -> Tensor:
        """The same of its changes from one round to the next, without the effect of a slow drift: [seeds]."""
        return self.late(source).diff(dim=0).std(dim=0).mean(dim=-1)


def smoothness(algorithm: FedDA, problem: Any, rounds: int, seeds: Sequence[int], **options: Any) -> Smoothness:
    """Run a FedDA with H from z and again from the last estimate (in the same units); keep log h of every round."""
    paths = {}
    for source in INPUTS:
        run = Run(replace(algorithm, v_input=source), problem, seed=list(seeds), **options)
        path = [log_h(run)]
        for _ in range(rounds):
            run.advance()
            path.append(log_h(run))
        paths[source] = torch.stack(path)
    return Smoothness(paths)


def log_h(run: Run) -> Tensor:
    """log of H's diagonal in the next round, [seeds, d]."""
    algorithm: FedDA = run.algorithm  # type: ignore[assignment]
    return algorithm.metric(run.server).double().log()[..., 0, :]


# -- Remark 2, second half (C28): is there a linear speed-up for averaged second moments? ------------------------------
STILL, DECAY = 1e-9, 0.999  # a rate at which the point does not move; the decay of second moments
GROUPS = 5  # of replicas; each gives a variance, and their spread is its uncertainty


@dataclass(frozen=True)
class Moments:
    """The second moment after one round, against the square of the true gradient; means over coordinates.

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
    """One round at a fixed point for each number of clients K: the mean and variance of mu over replicas.

    Clients share the Hessian linspace(0.1, 1), their minima are those of `equal_spread`, x = 1, sigma = 1 in each
    coordinate. Both methods run with alpha = 0.1 and the decay 0.999 from zero, and the weight of their sums is divided
    out: FedDA's is the square of the mean estimate, FAFED's the mean over clients and steps of the squares.
    """
    if min(K) < 2:
        raise ValueError(f"moments: K must be at least 2, as one client has no spread, got {min(K)}")
    variance: dict[str, list[Tensor]] = {"FedDA": [], "FAFED": []}
    bias: dict[str, list[Tensor]] = {"FedDA": [], "FAFED": []}
    x0 = torch.ones(d, dtype=torch.float64)
    for k in K:
        problem = Synthetic(spectrum(d), equal_spread(k, d), noise=1.0)
        g = problem.full_gradients(x0[None]).mean(dim=-2, keepdim=True)
        ours = FedDA(Constant(STILL), Mvr(0.1 / STILL**2), Diagonal(DECAY, eps=1.0), steps=steps, mu_scale="mean")
        theirs = Fafed(lr=STILL, alpha=0.1, beta2=DECAY, eps=1.0, steps=steps, v0=0.0)
        weight = {"FedDA": 1 - DECAY, "FAFED": 1 - DECAY**steps}
        for name, algorithm, field in (("FedDA", ours, "mu"), ("FAFED", theirs, "v")):
            server = Run(algorithm, problem, seed=list(range(replicas)), x0=x0).step()
            mu = (getattr(server, field) / weight[name] - g**2).view(GROUPS, -1, d)
            spread = mu.var(dim=1)
            variance[name].append(spread.mean(dim=-1))
            # The mean of finitely many replicas has a part of the variance, which is subtracted.
            bias[name].append((mu.mean(dim=1) ** 2 - spread / mu.shape[1]).mean(dim=-1))
    errors, off = ({name: torch.stack(v, dim=-1).numpy() for name, v in part.items()} for part in (variance, bias))
    return Moments(tuple(K), errors, off, replicas)


def equal_spread(clients: int, d: int) -> Tensor:
    """Minima b_k ~ N(0, I), centred and then scaled to a mean square of 1 in each coordinate: without the scaling,
    heterogeneity would grow with the number of clients like (K - 1) / K.

    >>> bool((equal_spread(2, 3).abs() - 1).abs().max() < 1e-12)
    True
    """
    b = centred(clients, d, seed=clients)
    return b / (b**2).mean(dim=0).sqrt()
