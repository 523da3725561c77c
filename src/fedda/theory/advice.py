"""lr, w and c for a user's own task from its estimated constants, and how far any choice is from the theory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..algorithms.fedda import FedDA
from ..problems import Quadratic
from ..rules.estimators import Mvr
from ..rules.schedules import CubeRoot
from ..run import Run
from .constants import SAMPLES, Constants, constants, curvature_in
from .practical import Practical
from .synthetic import Synthetic
from .theorem import Theorem1, local_steps


@dataclass(frozen=True)
class Rates:
    """One way to set lr, w and c, and what it comes to at the first step."""

    who: str
    lr: float
    w: float
    c: float
    eta: float
    alpha: float
    stable: (
        float  # eta lambda (the largest curvature in the metric H_0): a gradient step diverges on a quadratic above 2
    )
    ratio: float  # eta over the theorem's
    broken: tuple[str, ...] = ()  # the theorem's conditions that do not hold


@dataclass(frozen=True)
class Advice:
    """What the theory says of one FedDA on one problem."""

    found: Constants
    rho: float  # the smallest entry of H_0
    L_H: float  # the largest curvature of f at x_0 in the metric H_0
    theorem: Theorem1
    T: int
    bound: float  # of Theorem 1 for T steps, with the estimated constants
    now: float  # |grad f(x_0)|^2, at least G there with an exact estimate and no constraint: to compare with
    own: Rates
    proposed: Rates
    literal: Rates
    penalised: bool  # psi is more than a constraint set, which the theorem does not have

    @property
    def steps(self) -> float:
        """The corollary's number of local steps for T."""
        return local_steps(self.T, self.theorem.K)

    def algorithm(self, algorithm: FedDA) -> FedDA:
        """The same FedDA at the proposed values."""
        own = self.proposed
        return replace(algorithm, lr=CubeRoot(own.lr, own.w), estimator=Mvr(own.c))


def advise(
    algorithm: FedDA, problem: Any, rounds: int, seed: int = 0, cohort: int | None = None, samples: int = SAMPLES
) -> Advice:
    """Estimate L, sigma and zeta at the first point and propose lr, w, c: the practical schedule, with lambda times the
    curvature of f in the metric H_0 (at most lambda L / rho) for lr, and assumption 5's L of mini-batches for c.

    The theorem is given its own L, that of assumption 5, and rho = min H_0; K is the number of clients in a round.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[0.5, 2.0], [0.5, 2.0]], b=[[0.0, 1.0], [1.0, 0.0]], noise=0.1)
    >>> algorithm = fedda.make("fedda-mvr", lr=0.1, w=8.0, eps=0.5)
    >>> advice = advise(algorithm, problem, rounds=100)
    >>> round(advice.L_H, 2), round(advice.proposed.stable, 2), round(advice.literal.stable * 48 * 25, 2)
    (4.0, 0.2, 1.0)
    """
    if type(algorithm) is not FedDA or not isinstance(algorithm.estimator, Mvr):
        raise ValueError("theory: Theorem 1 is about FedDA with the MVR estimator: take fedda-mvr or fedda-1-2")
    run = Run(algorithm, problem, seed=seed, force=True)
    placed: Any = run.algorithm
    zero = torch.zeros_like(run.server.t)
    H = placed.preconditioner.diagonal(run.server.mu, zero)
    x, lam, I, K = run.server.x[0], float(algorithm.scale), algorithm.steps, cohort or problem.clients
    found = constants(problem, x, seed, samples=samples)
    rho, L_H = float(H.min()), curvature_in(problem, x, H[0], seed, samples)
    theorem = Theorem1(max(found.L_batch, found.L), rho, K, I, lam)
    T = rounds * I
    schedule = Practical(K, lam * L_H, lam * theorem.L / rho)
    gap = found.loss if not isinstance(problem, Quadratic) else found.loss - lowest(problem)
    # sigma is that of the problem's batches already: b and b_1 are 1 in these units.
    bound = theorem.bound(T, gap, found.sigma, found.zeta)
    weight = placed.estimator.c

    def choice(who: str, lr: float, w: float, c: float, eta: Callable[[int], float]) -> Rates:
        first = float(eta(0))
        slacks = [slack for t in {1, I} for slack in theorem.conditions(t, eta, c).items()]  # over the first round
        broken = tuple(dict.fromkeys(name for name, slack in slacks if slack < -1e-9))
        return Rates(who, lr, w, c, first, min(1.0, c * first**2), first * lam * L_H, first / theorem.eta(0), broken)

    def mine(t: int) -> float:
        return float(placed.lr(zero + t))

    rate = algorithm.lr
    lr, w = (float(rate.lr), float(rate.w)) if isinstance(rate, CubeRoot) else (mine(0), 0.0)
    return Advice(
        found, rho, L_H, theorem, T, bound, found.gradient**2,
        choice("the experiment", lr, w, float(weight), mine),
        choice("proposed", schedule.lr, schedule.w, schedule.c, schedule.eta),
        choice("Theorem 1", theorem.kappa, float(theorem.plateau), theorem.c, theorem.eta),
        bool((placed.prox.value(torch.ones_like(x)[None]) != 0).any()),
    )  # fmt: skip


def lowest(problem: Quadratic) -> float:
    """f* of a problem that knows it."""
    if isinstance(problem, Synthetic):
        return float(problem.lowest)
    one = torch.ones(problem.clients, dtype=torch.float64)
    return float(problem.evaluate(problem.minimum, one)["train_loss"])
