"""SCAFFOLD-M against its paper: by hand, and where it is another method."""

import pytest
import torch

import fedda
from conftest import close, last, path, quadratic
from fedda.rules.schedules import CubeRoot

A, B, X0 = (2.0, 0.5, 1.0), (1.0, -3.0, 4.0), 0.5


def eta(t):
    return 0.2 / (8 + t) ** (1 / 3)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_three_rounds_by_hand(engine):
    """Three clients, four steps at a decaying rate, half a server step, beta = 0.3."""
    x, delta, c, own, beta = X0, 0.0, 0.0, [0.0] * 3, 0.3
    for tau in range(3):
        rates, ends, changes = [eta(4 * tau + i) for i in range(4)], [], []
        for k in range(3):
            y, gradients = x, []
            for rate in rates:
                g = A[k] * (y - B[k])
                gradients.append(g)
                y -= rate * (beta * (g - own[k] + c) + (1 - beta) * delta)
            ends.append(y)
            changes.append(sum(gradients) / 4 - own[k])
            own[k] = sum(gradients) / 4
        delta = (x - sum(ends) / 3) / sum(rates)
        x -= 0.5 * sum(rates) * delta
        c += sum(changes) / 3
    problem = fedda.Quadratic([[v] for v in A], [[v] for v in B])
    algorithm = fedda.make("scaffold-m", lr=CubeRoot(0.2, 8.0), steps=4, server_lr=0.5, momentum=0.7)
    server = last(algorithm, problem, 3, x0=torch.tensor([X0], dtype=torch.float64), engine=engine)
    assert (server.x.item(), server.delta.item(), server.c.item()) == pytest.approx((x, delta, c), rel=1e-13)


def test_without_momentum_it_is_scaffold():
    """At a constant rate both control variates are the mean of the gradients; 2 of 5 clients, with noise."""
    problem, params = quadratic(), {"lr": 0.1, "steps": 3, "server_lr": 0.7}
    paths = [
        path(fedda.make(name, **params, **more), problem, 6, cohort=2)
        for name, more in (("scaffold-m", {"momentum": 0.0}), ("scaffold", {"option": 2}))
    ]
    close(*paths, 1e-13)


def test_with_one_client_it_is_fedcm():
    """The only client has the mean control variate, so that nothing is corrected."""
    problem, params = quadratic(clients=1), {"lr": 0.1, "steps": 3, "momentum": 0.8}
    close(*(path(fedda.make(name, **params), problem, 6) for name in ("scaffold-m", "fedcm")), 1e-13)


def test_it_ends_at_the_optimum_of_different_clients():
    """Where FedCM drifts: without noise, 2 of 6 clients per round, different Hessians."""
    problem = quadratic(clients=6, noise=0.0)
    best = (problem.A * problem.b).sum(0) / problem.A.sum(0)
    ends = {
        name: last(fedda.make(name, lr=0.1, steps=5), problem, 1500, cohort=2).x[0] for name in ("scaffold-m", "fedcm")
    }
    assert (ends["scaffold-m"] - best).abs().max() < 1e-9 < 1e-3 < (ends["fedcm"] - best).abs().max()
