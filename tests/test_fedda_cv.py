"""FedDA with control variates: exact where FedDA drifts (E25), SCAFFOLD without a metric (E26), a round by hand."""

import math

import pytest
import torch

import fedda
from conftest import close, digits, last, path, quadratic, stable
from fedda.algorithms.fedda_cv import FedDACV
from fedda.rules.estimators import Momentum, Mvr, Plain
from fedda.rules.preconditioners import Identity
from fedda.rules.prox import (
    L1,
    Box,
    ElasticNet,
    GroupLasso,
    HalfSpace,
    Hyperplane,
    L1Ball,
    L2Ball,
    LInfBall,
    NonNegative,
    Simplex,
    SquaredL2,
    Sum,
)
from test_identities import LR

STEPS, ROUNDS = 5, 250
MAPS = [
    ElasticNet(0.1, 0.2), SquaredL2(0.3), NonNegative(), LInfBall(0.1), L1Ball(0.3), L2Ball(0.2), Simplex(0.5),
    HalfSpace(1.0, -0.5), Hyperplane(1.0, 0.3), GroupLasso(0.1, [0, 0, 1, -1]), Sum(L1(0.1), Box(-0.2, 0.1)),
]  # fmt: skip


def make(mvr, cv, **words):
    name = {(False, False): "fedda-2-1", (True, False): "fedda-mvr"}.get(
        (mvr, cv), "fedda-cv-mvr" if mvr else "fedda-cv"
    )
    rate = {"lr": lambda t: 0.05, "c": 40.0} if mvr else {"lr": 0.05}  # a = 0.1 for both
    return fedda.make(name, steps=STEPS, eps=0.5, **rate, **words)


def optimum(problem, prox):
    """Of f + psi: f has a diagonal Hessian, so every coordinate is by itself."""
    A = problem.A.mean(0)
    mean = (problem.A * problem.b).mean(0) / A
    if isinstance(prox, L1):
        return mean.sign() * (mean.abs() - prox.gamma / A).clamp(min=0)
    return mean if prox is None else mean.clamp(prox.lower, prox.upper)


@pytest.mark.parametrize("cohort", [6, 2])
@pytest.mark.parametrize("mvr", [False, True], ids=["momentum", "mvr"])
@pytest.mark.parametrize("prox", [None, L1(0.2), Box(-0.3, 0.2)], ids=["free", "l1", "box"])
def test_e25_it_ends_at_the_optimum_where_fedda_drifts(prox, mvr, cohort):
    """Different Hessians, no noise, constant rate, all clients or two of six."""
    problem = quadratic(clients=6, noise=0.0, seed=5)
    best = optimum(problem, prox)
    assert prox is None or (best == 0).any() or ((best == -0.3) | (best == 0.2)).any()  # it binds
    ends = (last(make(mvr, cv, prox=prox), problem, ROUNDS, cohort=cohort).x[0] for cv in (False, True))
    drift, exact = ((x - best).norm() for x in ends)
    assert exact < 1e-10
    assert drift > 5e-4


@pytest.mark.parametrize("prox", MAPS, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("mvr", [False, True], ids=["momentum", "mvr"])
def test_e25_with_every_map(prox, mvr):
    """A round along the full gradient moves nothing at the end: x is a solution of the penalised problem."""
    problem = quadratic(clients=6, noise=0.0, seed=5)
    x0 = prox.project(problem.start(0)[None])[0]

    def mapping(cv):
        run = fedda.Run(make(mvr, cv, prox=prox), problem, cohort=3, x0=x0)
        found = []
        while run.round < 160:
            run.advance()
            if run.round > 150:  # the largest of some rounds: a cohort may happen to leave x at a vertex
                found.append(run.evaluate(detail=True)[0]["gradient_mapping"])
        return max(found)

    assert mapping(cv=True) < 1e-10
    assert mapping(cv=False) > 1e-4


@pytest.mark.parametrize("estimator", [Plain(), Momentum(0.0), Mvr(1e9)], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("problem,cohort", [(quadratic, 5), (quadratic, 3), (digits, 4)])
def test_e26_without_a_metric_it_is_scaffold_one_step_later(problem, cohort, estimator):
    problem, how, eta = problem(), {"cohort": cohort, "seed": 4}, 0.1
    run = fedda.Run(FedDACV(lambda t: eta, estimator, Identity(), steps=3), problem, **how)
    states = [run.server, *(run.step() for _ in range(5))]
    y = [(s.x - eta * s.nu)[0] for s in states]  # the client's point after the first step of each round
    scaffold = fedda.make("scaffold", lr=eta, steps=3, option=2)
    close(path(scaffold, problem, 5, x0=y[0], **how), torch.stack(y[1:]))
    theirs = last(scaffold, problem, 5, x0=y[0], **how)
    close(states[-1].c, theirs.c)
    fedavg = path(fedda.make("fedavg", lr=eta, steps=3), problem, 5, x0=y[0], **how)
    assert (fedavg - torch.stack(y[1:])).abs().max() > 1e-3  # and that is not FedAvg


def test_e26_needs_a_constant_rate():
    """SCAFFOLD's c_k weighs the gradients of a round by their rates, ours is their mean: with a rate that falls the two
    differ."""
    run = fedda.Run(FedDACV(LR, Plain(), Identity(), steps=3), quadratic(), cohort=3, seed=4)
    states = [run.server, *(run.step() for _ in range(5))]
    y = torch.stack([(s.x - LR(s.t) * s.nu)[0] for s in states])
    theirs = path(fedda.make("scaffold", lr=lambda t: LR(t + 1), steps=3), quadratic(), 5, x0=y[0], cohort=3, seed=4)
    assert 1e-4 < (theirs - y[1:]).abs().max() < 1e-2
    close(theirs[0], y[1])  # in the first round all control variates are zero


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("mvr", [False, True], ids=["momentum", "mvr"])
@pytest.mark.parametrize("lost", [None, 1])
def test_three_rounds_by_hand(mvr, engine, lost):
    """Two clients, two steps, one coordinate with an L1 penalty, in plain floats. With `lost` a third client has never
    been heard: its c_k stays 0 and counts in c."""
    A, b, x = (2.0, 0.5), (1.0, -3.0), 0.4
    lr, w, cc, momentum, beta, eps, lam, gamma = 0.2, 3.0, 4.0, 0.9, 0.8, 0.3, 1.7, 0.05
    K = 2 if lost is None else 3

    def eta_at(t):
        return lr / (w + t) ** (1 / 3) if mvr else lr

    def primal(x0, z, h, total):
        u, threshold = x0 + lam * z / h, lam * total * gamma / h
        return math.copysign(max(abs(u) - threshold, 0.0), u)

    nu, mu, c, own = (A[0] * (x - b[0]) + A[1] * (x - b[1])) / 2, 0.0, 0.0, [0.0, 0.0]
    for tau in range(3):
        h = math.sqrt(mu) + eps
        zs, nus, news = [], [], []
        for k in range(2):
            X, NU, Z, total, s = x, nu, 0.0, 0.0, 0.0
            for i in range(2):
                eta = eta_at(2 * tau + i)
                Z, total = Z - eta * NU, total + eta
                X, old = primal(x, Z, h, total), X
                g, g_old = A[k] * (X - b[k]), A[k] * (old - b[k])
                s += g
                g, g_old = g - own[k] + c, g_old - own[k] + c
                NU = g + (1 - cc * eta**2) * (NU - g_old) if mvr else 0.1 * g + momentum * NU
            zs.append(Z)
            nus.append(NU)
            news.append(s / 2)
        z, last_eta = (zs[0] + zs[1]) / 2, eta_at(2 * tau + 1)
        x = primal(x, z, h, eta_at(2 * tau) + last_eta)
        mu = beta * mu + (1 - beta) * z**2 / last_eta**2
        nu = (nus[0] + nus[1]) / 2
        c, own = c + sum(new - old for new, old in zip(news, own, strict=True)) / K, news

    words = {"lr": lr, "steps": 2, "beta": beta, "eps": eps, "scale": lam, "prox": L1(gamma)}
    words |= {"w": w, "c": cc} if mvr else {"momentum": momentum}
    nan = [[float("nan")]] if lost else []
    problem = fedda.Quadratic(A=[[A[0]], [A[1]], *[[1.0]] * len(nan)], b=[[b[0]], [b[1]], *nan])
    x0 = torch.tensor([0.4], dtype=torch.float64)
    server = last(fedda.make("fedda-cv-mvr" if mvr else "fedda-cv", **words), problem, 3, x0=x0, engine=engine)
    for got, expected in ((server.x, x), (server.nu, nu), (server.mu, mu), (server.c, c)):
        assert got.item() == pytest.approx(expected, rel=1e-13)
    assert server.t.item() == 6


@pytest.mark.parametrize("name", ["fedda-cv", "fedda-cv-mvr"])
def test_c_is_the_mean_of_all_clients(name):
    problem = quadratic(clients=8)
    run = fedda.Run(stable(name, steps=3), problem, cohort=3)
    for _ in range(6):
        server = run.step()
        close(server.c[0], run.simulation.memory["c"].mean(0))
    assert server.c.abs().max() > 0.01


@pytest.mark.parametrize("mvr", [False, True], ids=["momentum", "mvr"])
def test_the_first_round_is_fedda_s(mvr):
    """No control variate is known yet."""
    ours, theirs = (last(make(mvr, cv), digits(), 1, cohort=4) for cv in (True, False))
    assert torch.equal(ours.x, theirs.x) and torch.equal(ours.nu, theirs.nu)


def test_it_has_one_way_of_averaging():
    with pytest.raises(ValueError, match="fedda-cv: no parameter 'averaging'"):
        fedda.make("fedda-cv", averaging="primal")
    with pytest.raises(ValueError, match="FedDACV: v_input must be one of"):
        fedda.make("fedda-cv", v_input="x")


def test_the_theory_is_about_fedda_alone():
    from fedda.theory.trace import traces

    with pytest.raises(ValueError, match="theory: the algorithm must be a FedDA, got FedDACV"):
        traces(stable("fedda-cv-mvr"), quadratic(), 1)
