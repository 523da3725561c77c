"""FedDA under penalties and constraints: its fixed points are the constrained optima."""

from itertools import pairwise

import pytest
import torch

import fedda
from conftest import close, last, quadratic
from fedda.rules.estimators import Mvr
from fedda.rules.preconditioners import Diagonal
from fedda.rules.prox import L1, Box, ElasticNet, L1Ball, L2Ball, Simplex
from test_identities import fedda_of

SETS = [L1(0.2), ElasticNet(0.1, 0.3), Box(-0.2, 0.3), L1Ball(0.8), L2Ball(0.5), Simplex(0.7)]


def optimum(problem, prox):
    """argmin of the mean of f_k plus psi over C: the map itself, in the metric of the mean Hessian, at the free minimum."""
    return prox(problem.minimum, problem.A.mean(0), 1.0)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("prox", SETS, ids=lambda p: type(p).__name__)
def test_on_a_common_hessian_it_ends_at_the_optimum(prox, steps):
    problem = quadratic(clients=4, d=6, noise=0.0, common=True)
    start = prox.project(torch.zeros(6, dtype=torch.float64))
    algorithm = fedda_of(Mvr(0.0), Diagonal(eps=0.5), lr=lambda t: 0.2, steps=steps, prox=prox)
    close(last(algorithm, problem, 800 // steps, x0=start).x[0], optimum(problem, prox), 1e-6)


@pytest.mark.parametrize("prox", [L1(0.2), Box(-0.2, 0.3), L1Ball(0.8), Simplex(0.7)], ids=lambda p: type(p).__name__)
def test_on_different_hessians_the_distance_falls_with_the_step(prox):
    """Local drift is a bias of order eta: half the step, about half the distance."""
    problem = quadratic(clients=5, d=6, noise=0.0, seed=2)
    start = prox.project(torch.zeros(6, dtype=torch.float64))
    distances = []
    for eta in (0.04, 0.02):
        algorithm = fedda_of(Mvr(10.0), Diagonal(eps=0.5, beta=1.0), lr=lambda t, eta=eta: eta, steps=5, prox=prox)
        x = last(algorithm, problem, int(6 / eta), x0=start).x[0]
        distances.append(float((x - optimum(problem, prox)).norm()))
    assert distances[0] < 0.1 and max(distances) > 1e-9  # the ratios below are real ones
    for a, b in pairwise(distances):
        assert b < 1e-9 or 1.6 < a / b < 2.6, distances


@pytest.mark.parametrize("kind,words", [
    ("l1-ball", {"radius": 0.5}), ("l2-ball", {"radius": 0.5}), ("elastic-net", {"gamma1": 0.1, "gamma2": 0.1}),
    ("simplex", {}), ("linf-ball", {"radius": 0.1}),
])  # fmt: skip
@pytest.mark.parametrize("name", ["fedda-mvr", "fedda-2-2", "feddualavg", "fedmid"])
@pytest.mark.filterwarnings("ignore:.*projected")
def test_maps_from_tables_on_every_engine(name, kind, words):
    problem = quadratic(clients=5)
    algorithm = fedda.make(name, lr=0.05, prox={"kind": kind, **words})
    a = last(algorithm, problem, 4, cohort=3, engine="sequential").x
    b = last(algorithm, problem, 4, cohort=3, seed=[0, 1], engine="vectorised").x
    close(b[0], a, 1e-11)
    assert algorithm.prox.feasible(a, 1e-9).all()


def test_penalties_by_parameter_name():
    """`on="weights"` leaves the bias free; the same by a mask of the user's own."""
    problem = fedda.load("breast-cancer", clients=4, model="logistic", dtype=torch.float64)
    assert problem.layout == [("1.weight", (1, 30)), ("1.bias", (1,))]
    named = fedda.make("fedda-mvr", lr=0.1, w=1000.0, prox=L1(0.05, on="weights"))
    gamma = torch.full((31,), 0.05, dtype=torch.float64)
    gamma[-1] = 0.0
    masked = fedda.make("fedda-mvr", lr=0.1, w=1000.0, prox=L1(gamma))
    close(last(named, problem, 20).x, last(masked, problem, 20).x, 1e-14)


def test_details_by_layer_and_the_gradient_mapping():
    problem = quadratic(clients=4, d=6, noise=0.0, common=True)
    algorithm = fedda_of(Mvr(0.0), Diagonal(eps=0.5), lr=lambda t: 0.1, steps=5, prox=L1(0.2))
    rows = fedda.train(algorithm, problem, rounds=800, every=800, detail=True).history
    assert rows[0]["gradient_mapping"] > 0.1 and rows[-1]["gradient_mapping"] < 1e-8  # 0 at the optimum alone
    # by hand at the start: one round along the full gradient from x_0 = 0 with h = eps, the sum of the etas S = 0.5
    full, S = (problem.A * (0 - problem.b)).mean(0), 0.5
    u = -S * full / 0.5
    moved = u.sign() * (u.abs() - S * 0.2 / 0.5).clamp(min=0)
    assert rows[0]["gradient_mapping"] == pytest.approx(float(moved.norm()) / S, rel=1e-12)
    network = fedda.load("digits", clients=4, model="mlp", hidden=4, dtype=torch.float64)
    result = fedda.train(fedda.make("fedda-mvr", prox=L1(0.01)), network, rounds=2, detail=True)
    sizes = {name: torch.Size(shape).numel() for name, shape in network.layout}
    row = result.history[-1]
    assert sum(row[f"nonzero:{n}"] * size for n, size in sizes.items()) / network.d == pytest.approx(row["nonzero"])
    assert sum(row[f"density:{n}"] * size for n, size in sizes.items()) / network.d == pytest.approx(row["density"])


def test_the_distance_to_the_set_is_recorded():
    run = fedda.Run(fedda.make("fedda-2-1", prox=Box(-1.0, 1.0)), quadratic())
    run.server = run.server._replace(x=torch.tensor([[4.0, 0.0, -5.0, 1.0]], dtype=torch.float64))
    assert run.evaluate()[0]["infeasible"] == pytest.approx(5.0)  # (3, 0, 4, 0)


def test_fedmid_projects_an_infeasible_start_and_says_so():
    with pytest.warns(UserWarning, match="FedMiD: x_0 lies outside the Box; projected, moved by 2"):
        run = fedda.Run(fedda.make("fedmid", prox=Box(-1.0, 1.0)), quadratic(), x0=[3.0, 0.0, 0.0, 0.0])
    assert run.server.x[0, 0] == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e10, 1e14, 1e17, 1e20, 1e30])
def test_points_far_outside_still_land_on_the_boundary(size, dtype):
    u = (torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * size).to(dtype)
    q = 0.5 + torch.rand(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    for prox in (L1Ball(1.0), L1Ball(1.0, method="sort"), Simplex(1.0)):
        x = prox(u, q, 1.0)
        assert prox.feasible(x).all()
        torch.testing.assert_close(x.double().abs().sum(-1), torch.ones(6, dtype=torch.float64), rtol=1e-6, atol=0)


def test_a_list_gives_a_weight_for_each_coordinate():
    table = fedda.make("fedda-2-1", prox={"kind": "l1", "gamma": [0.1, 0.0, 0.2, 0.0]})
    given = fedda.make("fedda-2-1", prox=L1(torch.tensor([0.1, 0.0, 0.2, 0.0], dtype=torch.float64)))
    close(last(table, quadratic(), 3).x, last(given, quadratic(), 3).x, 1e-14)
    with pytest.raises(ValueError, match="L1: gamma must be >= 0, got -1"):
        L1([0.1, -1])
