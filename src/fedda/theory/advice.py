"""lr, w and c for a task, from its estimated constants; the distance of a choice from the theory; and a trial."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..algorithms.fedda import FedDA
from ..checks import one_of
from ..experiments.config import Experiment
from ..problems import Quadratic
from ..rules.estimators import Mvr
from ..rules.schedules import CubeRoot
from ..run import Run
from .estimates import SAMPLES, Constants, constants, curvature_in
from .synthetic import Synthetic
from .theorem import Practical, Theorem1, local_steps

METRICS = ("train_loss", "test_loss", "test_accuracy")


@dataclass(frozen=True)
class Rates:
    """One choice of lr, w and c, and its values at the first step."""

    who: str
    lr: float
    w: float
    c: float
    eta: float
    alpha: float
    stable: float  # eta lambda L_H: above 2 a gradient step diverges on a quadratic
    ratio: float  # eta over the theorem's
    broken: tuple[str, ...] = ()  # the theorem's conditions that do not hold


@dataclass(frozen=True)
class Advice:
    """The theory applied to one FedDA on one problem."""

    constants: Constants
    rho: float  # the smallest entry of H_0
    L_H: float  # the largest curvature of f at x_0 in the metric H_0
    theorem: Theorem1
    T: int
    bound: float  # Theorem 1's, for T steps, with the estimated constants
    now: float  # |grad f(x_0)|^2, for comparison: with an exact estimate and no constraint it is at least G
    current: Rates  # of the experiment
    proposed: Rates
    literal: Rates
    penalised: bool  # psi is a penalty, not only a constraint set: outside the theorem

    @property
    def steps(self) -> float:
        """The corollary's number of local steps for T."""
        return local_steps(self.T, self.theorem.K)

    def algorithm(self, algorithm: FedDA) -> FedDA:
        """The same FedDA at the proposed values."""
        rates = self.proposed
        return replace(algorithm, lr=CubeRoot(rates.lr, rates.w), estimator=Mvr(rates.c))


def advise(
    algorithm: FedDA, problem: Any, rounds: int, seed: int = 0, cohort: int | None = None, samples: int = SAMPLES
) -> Advice:
    """Estimate L, sigma and zeta at the first point and propose lr, w, c: the practical schedule, with lambda times the
    curvature of f in the metric H_0 (at most lambda L / rho) for lr, and assumption 5's L of mini-batches for c.

    Theorem 1 uses the L of assumption 5 and rho = min H_0; K is the number of clients per round.
    """
    if type(algorithm) is not FedDA or not isinstance(algorithm.estimator, Mvr):
        raise ValueError("theory: Theorem 1 is about FedDA with the MVR estimator: use fedda-mvr or fedda-1-2")
    run = Run(algorithm, problem, seed=seed, force=True)
    bound_algorithm: Any = run.algorithm
    zero = torch.zeros_like(run.server.t)
    H = bound_algorithm.metric(run.server)
    x, lam, I, K = run.server.x[0], float(algorithm.scale), algorithm.steps, cohort or problem.clients
    at_start = constants(problem, x, seed, samples=samples)
    rho, L_H = float(H.min()), curvature_in(problem, x, H[0], seed, samples)
    theorem = Theorem1(max(at_start.L_batch, at_start.L), rho, K, I, lam)
    T = rounds * I
    schedule = Practical(K, lam * L_H, lam * theorem.L / rho)
    gap = at_start.loss - (lowest(problem) if isinstance(problem, Quadratic) else 0.0)
    # sigma is that of the problem's batches, so b and b_1 are 1.
    bound = theorem.bound(T, gap, at_start.sigma, at_start.zeta)
    weight = bound_algorithm.estimator.c

    def choice(who: str, lr: float, w: float, c: float, eta: Callable[[int], float]) -> Rates:
        first = float(eta(0))
        slacks = [slack for t in {1, I} for slack in theorem.conditions(t, eta, c).items()]  # over the first round
        broken = tuple(dict.fromkeys(name for name, slack in slacks if slack < -1e-9))
        return Rates(who, lr, w, c, first, min(1.0, c * first**2), first * lam * L_H, first / theorem.eta(0), broken)

    def rate_at(t: int) -> float:
        return float(bound_algorithm.lr(zero + t))

    rate = algorithm.lr
    lr, w = (float(rate.lr), float(rate.w)) if isinstance(rate, CubeRoot) else (rate_at(0), 0.0)
    return Advice(
        at_start, rho, L_H, theorem, T, bound, at_start.gradient**2,
        choice("the experiment", lr, w, float(weight), rate_at),
        choice("proposed", schedule.lr, schedule.w, schedule.c, schedule.eta),
        choice("Theorem 1", theorem.kappa, float(theorem.plateau), theorem.c, theorem.eta),
        bool((bound_algorithm.prox.value(torch.ones_like(x)[None]) != 0).any()),
    )  # fmt: skip


def lowest(problem: Quadratic) -> float:
    """f* of a quadratic."""
    if isinstance(problem, Synthetic):
        return float(problem.lowest)
    one = torch.ones(problem.clients, dtype=torch.float64)
    return float(problem.evaluate(problem.minimum, one)["train_loss"])


def analysed(experiment: Experiment, label: str | None = None) -> str:
    """The label of a FedDA with the MVR estimator in an experiment: the given one, or the first."""
    algorithms: dict[str, Any] = {name: experiment.build(name) for name in experiment.algorithms}
    known = [name for name, own in algorithms.items() if type(own) is FedDA and isinstance(own.estimator, Mvr)]
    if not known:
        raise ValueError(f"theory: {experiment.name} holds no FedDA with the MVR estimator, such as fedda-mvr")
    if label is not None:
        one_of("theory", "--label", label, known)
    return label or known[0]


def trial(experiment: Experiment, algorithm: FedDA, advice: Advice, problem: Any) -> dict[str, dict[str, float]]:
    """Train the experiment's values and the proposed ones: {who: {metric: mean over seeds}} after the last round."""
    results: dict[str, dict[str, float]] = {}
    for who, tried in ((advice.current.who, algorithm), (advice.proposed.who, advice.algorithm(algorithm))):
        run = Run(
            tried, problem, experiment.cohort, experiment.seeds, weights=experiment.weights, force=True,
            aggregation=experiment.wrappers(),
        )  # fmt: skip
        for _ in range(experiment.rounds):
            run.advance()
        ends = run.evaluate()
        names = [name for name in METRICS if name in ends[0]]
        results[who] = {name: sum(row[name] for row in ends) / len(ends) for name in names}
    return results
