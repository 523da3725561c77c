"""Equivalences as oracles (E1-E6, E14, E15, E17, E22, E23), rounds by hand, and the composite fixed point.

The oracles are loops over plain tensors that know nothing of engines; they draw the very batches of the run through
`Oracle`, which spells out how randomness is named.
"""

import math
import warnings

import pytest
import torch

import fedda
from conftest import close, digits, last, path, quadratic, stable
from fedda import rng
from fedda.algorithms.fedda import FedDA, FedDAPrimal
from fedda.rules.estimators import Momentum, Mvr, Plain
from fedda.rules.preconditioners import Diagonal, Fixed, Identity, Scalar
from fedda.rules.prox import L1, Box, HalfSpace, L1Ball, L2Ball, LInfBall, NonNegative, Unconstrained
from fedda.rules.schedules import Constant, CubeRoot

LR = CubeRoot(0.3, 8.0)
D4 = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)


class Oracle:
    """Gradients of client k on draw n of round tau: what (seed, purpose, round, client, draw) means."""

    def __init__(self, problem, seed=0):
        self.problem, self.seed = problem, seed

    def _gradient(self, key, k, n, points):
        key = rng.fold(rng.fold(key, torch.tensor([k])), n)
        batch = self.problem.pick(self.problem.batch(torch.tensor([k]), key), (0,))
        return [self.problem.gradient(x, batch) for x in points]

    def __call__(self, tau, k, n, *points):
        return self._gradient(rng.fold(rng.key(self.seed, rng.BATCH), tau), k, n, points)

    def nu0(self, x):
        key = rng.key(self.seed, rng.START)
        return torch.stack([self._gradient(key, k, 0, [x])[0] for k in range(self.problem.clients)]).mean(0)

    def cohort(self, tau, r):
        return rng.choose(rng.fold(rng.key(torch.tensor([self.seed]), rng.COHORT), tau), self.problem.clients, r)


class Counted(fedda.Quadratic):
    """Noise by a count of each client's calls: batch n of client k, n over the whole run. With
    `identical`, every client gets the noise of client 0."""

    def __init__(self, A, b, noise, identical=False):
        super().__init__(A, b, noise)
        self.identical, self.calls = identical, torch.zeros(len(A), dtype=torch.int64)

    def batch(self, ids, key):
        n = self.calls[ids]
        self.calls[ids] += 1
        who = torch.zeros_like(ids) if self.identical else ids
        return super().batch(ids, rng.fold(rng.fold(rng.key(0, rng.BATCH), who), n))


def fedda_of(estimator, preconditioner, lr=LR, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FedDA(lr, estimator, preconditioner, **more)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("estimator", [Plain(), Momentum(0.0), Mvr(1e9)], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("problem,cohort", [(quadratic, 5), (quadratic, 3), (digits, 4)])
def test_e1_unit_weight_is_fedavg_one_step_later(problem, cohort, estimator, engine):
    problem, how = problem(), {"cohort": cohort, "seed": 4, "engine": engine}
    algorithm = fedda_of(estimator, Identity(), steps=3)
    run = fedda.Run(algorithm, problem, **how)
    states = [run.server, *(run.step() for _ in range(5))]
    y = [(s.x - LR(s.t) * s.nu)[0] for s in states]  # the client's iterate after the first step of each round
    late = fedda.make("fedavg", lr=lambda t: LR(t + 1), steps=3)
    close(path(late, problem, 5, x0=y[0], **how), torch.stack(y[1:]))


@pytest.mark.parametrize("cohort", [5, 2])
def test_e2_one_local_step_is_minibatch_sgd(cohort):
    problem = quadratic()
    g = Oracle(problem, seed=1)
    x, xs = problem.start(1), []
    nu = g.nu0(x)
    for tau in range(6):
        x = x - LR(torch.tensor(float(tau), dtype=torch.float64)) * nu
        nu = torch.stack([g(tau, int(k), 0, x)[0] for k in g.cohort(tau, cohort)]).mean(0)
        xs.append(x)
    close(path(fedda_of(Plain(), Identity(), steps=1), problem, 6, seed=1, cohort=cohort), torch.stack(xs))


@pytest.mark.parametrize("problem,cohort", [(quadratic, 5), (quadratic, 3), (digits, 4)])
def test_e3_identity_metric_is_stem(problem, cohort):
    problem, steps, c = problem(), 3, 2.0
    g = Oracle(problem)
    x, xs = problem.start(0), []
    nu = g.nu0(x)
    for tau in range(4):
        ends = []
        for k in g.cohort(tau, cohort).tolist():
            X, NU = x, nu
            for i in range(steps):
                eta = float(LR(torch.tensor(tau * steps + i, dtype=torch.float64)))
                X, old = X - eta * NU, X
                new, before = g(tau, k, i, X, old)
                NU = new + (1 - min(1.0, c * eta**2)) * (NU - before)
            ends.append((X, NU))
        x, nu = (torch.stack(v).mean(0) for v in zip(*ends, strict=True))
        xs.append(x)
    close(path(fedda_of(Mvr(c), Identity(), steps=steps), problem, 4, cohort=cohort), torch.stack(xs))


@pytest.mark.parametrize("matrix", [Diagonal(eps=0.1), Scalar(eps=0.1), Fixed(D4)], ids=lambda m: type(m).__name__)
def test_e4_dual_and_primal_averaging(matrix):
    problem, how = quadratic(), {"lr": Constant(0.05), "steps": 4}
    dual = fedda_of(Mvr(5.0), matrix, **how)
    primal = FedDAPrimal.of(dual)
    close(path(dual, problem, 8, cohort=3), path(primal, problem, 8, cohort=3))
    box = {"prox": Box(-0.2, 0.2), "lr": Constant(0.3), "steps": 4}
    dual = fedda_of(Mvr(5.0), matrix, **box)
    primal = FedDAPrimal.of(dual)
    assert (path(dual, problem, 40, cohort=3) - path(primal, problem, 40, cohort=3)).abs().max() > 1e-3


@pytest.mark.parametrize("estimator", [Mvr(3.0), Momentum(0.7), Plain()], ids=lambda e: type(e).__name__)
def test_e5_one_client_does_not_see_the_rounds(estimator):
    base = quadratic(clients=1)
    ends = []
    for steps in (1, 2, 3, 6):
        problem = Counted(base.A, base.b, noise=0.3)
        ends.append(last(fedda_of(estimator, Fixed(D4), steps=steps), problem, 12 // steps))
    for end in ends[1:]:
        close(end.x, ends[0].x)
        close(end.nu, ends[0].nu)


@pytest.mark.parametrize("prox", [Unconstrained(), Box(-0.3, 0.4), L1(0.1)], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("estimator", [Mvr(2.0), Momentum(0.9)], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("diagonal", [True, False])
def test_e6_one_local_step_is_algorithm_3(diagonal, estimator, prox):
    problem, beta, eps, lam = quadratic(), 0.9, 0.2, 1.5
    g = Oracle(problem)
    x, xs = problem.start(0), []
    nu = g.nu0(x)
    mu = torch.zeros(4, dtype=torch.float64) if diagonal else nu.norm()
    for tau in range(6):
        h = mu.sqrt() + eps if diagonal else mu + eps
        eta = float(LR(torch.tensor(tau, dtype=torch.float64)))
        x, old = prox(x - lam * eta * nu / h, h / lam, eta), x  # line 4
        mu = beta * mu + (1 - beta) * (nu**2 if diagonal else nu.norm())  # line 8: V is fed nu_tau
        ends = []
        for k in range(problem.clients):
            if isinstance(estimator, Mvr):
                new, before = g(tau, k, 0, x, old)
                ends.append(new + (1 - min(1, estimator.c * eta**2)) * (nu - before))
            else:
                ends.append(0.1 * g(tau, k, 0, x)[0] + 0.9 * nu)
        nu = torch.stack(ends).mean(0)
        xs.append(x)
    matrix = Diagonal(beta, eps) if diagonal else Scalar(beta, eps)
    close(path(fedda_of(estimator, matrix, steps=1, scale=lam, prox=prox), problem, 6), torch.stack(xs))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_e14_identical_clients_are_one_client(name, engine):
    base = quadratic(clients=1)
    more = {"prox": L1(0.05)} if name.startswith("fedda") else {}
    alone = last(stable(name, **more), Counted(base.A, base.b, 0.3), 5, engine=engine)
    A, b = base.A.expand(6, 4), base.b.expand(6, 4)
    for cohort in (6,):
        many = last(stable(name, **more), Counted(A, b, 0.3, identical=True), 5, engine=engine, cohort=cohort)
        close(many.x, alone.x)


@pytest.mark.parametrize("prox", [Unconstrained(), L1(0.1), L1(0.1, decoupled=True), Box(-0.2, 0.2)], ids=str)
def test_e15_only_lambda_over_h_matters(prox):
    paths = [path(fedda_of(Mvr(2.0), Fixed(c * D4), scale=c, prox=prox), quadratic(), 6, cohort=3) for c in (1.0, 7.0)]
    close(*paths)


def test_e17_exact_start_and_no_forgetting_is_gradient_descent():
    problem, steps = quadratic(noise=0.0, common=True), 4
    x, xs = problem.start(0), []
    for t in range(6 * steps):
        eta = LR(torch.tensor(t, dtype=torch.float64))
        x = x - eta * (problem.A * (x - problem.b)).mean(0)
        xs.append(x)
    got = path(fedda.make("fedda-mvr", lr=0.3, w=8.0, c=0.0, steps=steps, eps=1.0, beta=1.0), problem, 6)
    close(got, torch.stack(xs[steps - 1 :: steps]))  # mu stays 0, so h = eps = 1


@pytest.mark.parametrize("variant", ["fedda-mvr", "fedda-1-2", "fedda-2-1", "fedda-2-2"])
def test_e22_a_constraint_that_never_binds_changes_no_bit(variant):
    free, boxed = (
        path(stable(variant, prox=p), digits(dtype=torch.float32), 5, cohort=6) for p in (None, Box(-1e9, 1e9))
    )
    assert torch.equal(free, boxed)


@pytest.mark.parametrize(
    "prox", [L1Ball(1e6), L2Ball(1e6), LInfBall(1e6), HalfSpace(1.0, 1e9)], ids=lambda p: type(p).__name__
)
def test_e22_nor_does_a_ball_that_is_large_enough(prox):
    free, within = (path(stable("fedda-mvr", prox=p), digits(), 5, cohort=6) for p in (None, prox))
    close(within, free, 1e-12)


@pytest.mark.parametrize("mvr", [False, True])
@pytest.mark.parametrize("prox", [L1(0.2), Box(-0.1, 0.3), NonNegative()], ids=lambda p: type(p).__name__)
def test_e23_one_client_one_step_is_proximal_sgd_or_storm(prox, mvr):
    problem, c = quadratic(clients=1), 3.0
    g = Oracle(problem, seed=2)
    x, xs = problem.start(2), []
    nu = g.nu0(x)
    for tau in range(8):
        eta = float(LR(torch.tensor(tau, dtype=torch.float64)))
        x, old = prox(x - eta * nu, 1.0, eta), x
        new, before = g(tau, 0, 0, x, old)
        nu = new + (1 - min(1, c * eta**2)) * (nu - before) if mvr else new
        xs.append(x)
    algorithm = fedda_of(Mvr(c) if mvr else Plain(), Identity(), steps=1, prox=prox)
    close(path(algorithm, problem, 8, seed=2), torch.stack(xs))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("diagonal,mvr", [(True, True), (True, False), (False, True), (False, False)])
def test_two_rounds_by_hand(diagonal, mvr, engine):
    """Two clients, two steps, one coordinate with an L1 penalty, in plain floats from the paper's three algorithms."""
    A, b, x = (2.0, 0.5), (1.0, -3.0), 0.4
    lr, w, c, momentum, beta, eps, lam, gamma = 0.2, 3.0, 4.0, 0.9, 0.8, 0.3, 1.7, 0.05

    def eta_at(t):
        return lr / (w + t) ** (1 / 3) if mvr else lr

    def primal(x0, z, h, total):
        u, threshold = x0 + lam * z / h, lam * total * gamma / h
        return math.copysign(max(abs(u) - threshold, 0.0), u)

    nu = (A[0] * (x - b[0]) + A[1] * (x - b[1])) / 2
    mu = 0.0 if diagonal else 2 * abs(nu)
    for tau in range(2):
        h = math.sqrt(mu) + eps if diagonal else mu + eps
        zs, nus = [], []
        for k in range(2):
            X, NU, Z, total = x, nu, 0.0, 0.0
            for i in range(2):
                eta = eta_at(2 * tau + i)
                Z, total = Z - eta * NU, total + eta
                X, old = primal(x, Z, h, total), X
                new, before = A[k] * (X - b[k]), A[k] * (old - b[k])
                NU = new + (1 - c * eta**2) * (NU - before) if mvr else 0.1 * new + momentum * NU
            zs.append(Z)
            nus.append(NU)
        z, last_eta = (zs[0] + zs[1]) / 2, eta_at(2 * tau + 1)
        x = primal(x, z, h, eta_at(2 * tau) + last_eta)
        mu = beta * mu + (1 - beta) * (z**2 / last_eta**2 if diagonal else abs(z) / last_eta)
        nu = (nus[0] + nus[1]) / 2

    words = {"lr": lr, "steps": 2, "beta": beta, "eps": eps, "scale": lam, "prox": L1(gamma)}
    words |= {"w": w, "c": c} if mvr else {"momentum": momentum}
    name = f"fedda-{1 if mvr else 2}-{1 if diagonal else 2}"
    problem = fedda.Quadratic(A=[[A[0]], [A[1]]], b=[[b[0]], [b[1]]])
    x0 = torch.tensor([0.4], dtype=torch.float64)
    server = last(fedda.make(name, **words), problem, 2, x0=x0, engine=engine)
    for got, expected in ((server.x, x), (server.nu, nu), (server.mu, mu)):
        assert got.item() == pytest.approx(expected, rel=1e-14)
    assert server.t.item() == 4


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("matrix", [Diagonal(eps=0.5), Scalar(eps=0.5)], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("clients", [1, 4])
def test_the_fixed_point_is_that_of_f_plus_psi(matrix, steps, clients):
    """Common Hessian, exact start, no forgetting: no drift, so the run must end at soft(mean b, gamma / A)."""
    problem, gamma = quadratic(clients=clients, noise=0.0, common=True, d=8), 0.3
    mean = problem.b.mean(0)
    optimum = mean.sign() * (mean.abs() - gamma / problem.A[0]).clamp(min=0)
    algorithm = fedda_of(Mvr(0.0), matrix, lr=Constant(0.5), steps=steps, prox=L1(gamma))
    x = last(algorithm, problem, 3000 // steps).x[0]
    close(x, optimum)
    assert torch.equal(x == 0, optimum == 0) and 0 < (x == 0).sum() < 8
