"""The paper's lemmas on one recorded round, as slacks: right side minus left side, which must not be negative.

Labels are those of the paper's LaTeX source. Lemma A9 is false as stated; both of its sides are here as well.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import Problem
from ..registry import make
from .synthetic import Synthetic
from .trace import Trace, error, square, traces, value


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=-1)


def norm(a: Tensor) -> Tensor:
    return a.norm(dim=-1)


def spread(v: Tensor) -> Tensor:
    """sum_k |v_k - vbar|^2, [...] from [..., K, d]."""
    return square(v - v.mean(dim=-2, keepdim=True))


def a0(trace: Trace) -> dict[str, Tensor]:
    """Lemma A0: primal steps are bounded by dual ones, for every i and k.

    1  lambda <nu, d> >= rho |d|^2  and  lambda |nu| >= rho |d|     on every client
    2  the same for nubar and d~                                    along the virtual point
    3  lambda |z - zbar| >= rho |X - x~|
    """
    _sets_only(trace)
    lam, rho = trace.scale, trace.rho[..., 0]
    NU, nubar = trace.NU[:-1], trace.nubar[:-1]
    return {
        "1": lam * dot(NU, trace.d) - rho * dot(trace.d, trace.d),
        "1, norms": lam * norm(NU) - rho * norm(trace.d),
        "2": lam * dot(nubar, trace.dt) - rho * dot(trace.dt, trace.dt),
        "2, norms": lam * norm(nubar) - rho * norm(trace.dt),
        "3": lam * norm(trace.Z - trace.zbar) - rho * norm(trace.X - trace.xt),
    }


def weighted_spread(trace: Trace) -> Tensor:
    """sum over l = 1..i of eta_l^2 sum_k |nu_l - nubar_l|^2, for i = 0..I-1; the term l = 0 is zero."""
    return (trace.eta[..., 0, 0] ** 2 * spread(trace.NU[:-1])).cumsum(dim=0)


def a8_1(trace: Trace) -> Tensor:
    """Lemma A8.1: sum_k |z_i - zbar_i|^2 <= (I - 1) sum_{l<i} eta_l^2 sum_k |nu_l - nubar_l|^2, i = 0..I."""
    sums = weighted_spread(trace)
    return (trace.steps - 1) * torch.cat([torch.zeros_like(sums[:1]), sums]) - spread(trace.Z)


def a8_2(trace: Trace) -> Tensor:
    """Lemma A8.2, both sides times eta_i^2, i = 0..I-1:

    eta_i^2 sum_k |d_i - d~_i|^2 <= 4 (lambda / rho)^2 (I - 1) sum_{l<=i} eta_l^2 sum_k |nu_l - nubar_l|^2
    """
    _sets_only(trace)
    factor = 4 * (trace.scale / trace.rho)[..., 0, 0] ** 2 * (trace.steps - 1)
    return factor * weighted_spread(trace) - trace.eta[..., 0, 0] ** 2 * square(trace.d - trace.dt)


def a3(trace: Trace, problem: Problem, L: float) -> Tensor:
    """Lemma A3, descent over a round, [...]:

    f(x_{tau+1}) <= f(x_tau) - sum_i (3 rho eta_i / (4 lambda) - eta_i^2 L / 2) |d~_i|^2
        + sum_i lambda eta_i / rho |ebar_i|^2
    """
    _sets_only(trace)
    eta, ratio = trace.eta[..., 0, 0], (trace.rho / trace.scale)[..., 0, 0]
    ends = value(problem, torch.stack([trace.xt[0], trace.xt[-1]]))[..., 0, 0]
    gain = ((3 * ratio * eta / 4 - eta**2 * L / 2) * square(trace.dt)).sum(dim=0)
    cost = (eta / ratio * square(error(trace, problem)[:-1])).sum(dim=0)
    return ends[0] - gain + cost - ends[1]


def a13(trace: Trace, problem: Problem, L: float, sigma: float = 0.0, batch: int = 1) -> Tensor:
    """Lemma A13, consensus of the estimates, for i = 1..I; path by path if sigma = 0, else in the mean.

        sum_k |nu_i - nubar_i|^2 <= (1 + 1/I) sum_k |nu_{i-1} - nubar_{i-1}|^2 + 8 K I L^2 eta_{i-1}^2 |d~_{i-1}|^2
            + 8 K I alpha_i^2 (sigma^2 / b_1 + 2 zeta^2)
            + 96 (lambda I L / rho)^2 sum_{l<i} eta_l^2 sum_k |nu_l - nubar_l|^2

    with zeta taken at x~_{i-1}, where the proof uses it.
    """
    _sets_only(trace)
    K, I, eta = trace.clients, trace.steps, trace.eta[..., 0, 0]
    nu, alpha = spread(trace.NU), trace.weights[..., 0, 0]
    factor = 96 * (trace.scale * I * L / trace.rho)[..., 0, 0] ** 2
    sums = weighted_spread(trace)  # its entry i - 1 runs to l = i - 1
    right = (1 + 1 / I) * nu[:-1] + 8 * K * I * L**2 * eta**2 * square(trace.dt)
    right = right + 8 * K * I * alpha**2 * (sigma**2 / batch + 2 * zeta(problem, trace.xt[:-1]) ** 2)
    return right + factor * sums - nu[1:]


def zeta(problem: Problem, x: Tensor) -> Tensor:
    """The largest difference between two clients' full gradients at x [..., 1, d]: [...]."""
    g = problem.full_gradients(x)
    return torch.cdist(g, g, compute_mode="donot_use_mm_for_euclid_dist").amax(dim=(-2, -1))


def a9(trace: Trace, problem: Problem, L: float, sigma: float = 0.0, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Both sides of lemma A9 (contraction of the error) for i = 1..I, which is FALSE as stated (docs/errata.md, 2):

    |ebar_i|^2 <= (1 - alpha_i)^2 |ebar_{i-1}|^2 + 8 eta_{i-1}^2 L^2 / K |d~_{i-1}|^2 + 4 alpha_i^2 sigma^2 / (b_1 K)
        + 40 (lambda L / rho)^2 (I - 1) / K^2 sum_{l<i} eta_l^2 sum_k |nu_l - nubar_l|^2
    """
    K, eta, alpha = trace.clients, trace.eta[..., 0, 0], trace.weights[..., 0, 0]
    e = square(error(trace, problem))
    factor = 40 * (trace.scale * L / trace.rho)[..., 0, 0] ** 2 * (trace.steps - 1) / K**2
    right = (1 - alpha) ** 2 * e[:-1] + factor * weighted_spread(trace) + 8 * eta**2 * L**2 / K * square(trace.dt)
    return e[1:], right + 4 * alpha**2 * sigma**2 / (batch * K)


def least(trace: Trace, problem: Any, L: float) -> dict[str, float]:
    """The smallest slack of every lemma that holds path by path; A13 needs gradients without noise."""
    slacks = {f"A0.{name}": slack for name, slack in a0(trace).items()}
    slacks |= {"A8.1": a8_1(trace), "A8.2": a8_2(trace), "A3": a3(trace, problem, L)}
    if problem.noiseless and hasattr(trace.algorithm.estimator, "weight"):
        slacks["A13"] = a13(trace, problem, L)
    return {name: float(slack.min()) for name, slack in slacks.items()}


def _sets_only(trace: Trace) -> None:
    if bool((trace.algorithm.prox.value(trace.xt) != 0).any()):
        psi = type(trace.algorithm.prox).__name__
        raise ValueError(f"theory: the lemmas are about constraint sets, {psi} is a penalty; use a set, such as L1Ball")


@dataclass(frozen=True)
class Consensus:
    """Means over rounds for i = 0..I: distances of estimates and dual states, and the lemmas' bounds on them."""

    estimates: np.ndarray  # sum_k |nu_i - nubar_i|^2 / K
    duals: np.ndarray  # sum_k |z_i - zbar_i|^2 / K
    estimates_bound: np.ndarray  # A13, from i = 1 on
    duals_bound: np.ndarray  # A8.1


def consensus(rounds: int = 60, steps: int = 10, clients: int = 8, d: int = 8) -> Consensus:
    """FedDA-MVR in a box, on clients with different Hessians and without noise: both lemmas hold path by path."""
    generator = torch.Generator().manual_seed(0)
    A = 0.1 + 0.9 * torch.rand(clients, d, generator=generator, dtype=torch.float64)
    problem = Synthetic(A, torch.randn(clients, d, generator=generator, dtype=torch.float64))
    box = {"kind": "box", "lower": -1.0, "upper": 1.0}
    algorithm: Any = make("fedda-mvr", lr=0.05, w=100.0, eps=0.3, steps=steps, prox=box)
    rows: list[list[np.ndarray]] = []
    for trace in traces(algorithm, problem, rounds):
        nu, z = spread(trace.NU), spread(trace.Z)
        bounds = (a13(trace, problem, problem.L) + nu[1:], a8_1(trace) + z)
        rows.append([(v / clients).numpy() for v in (nu, z, *bounds)])
    return Consensus(*(np.mean(column, axis=0) for column in zip(*rows, strict=True)))
