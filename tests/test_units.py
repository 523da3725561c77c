"""Rates in units of the size that each parameter has at the start, and the method that is built on them."""

import math
import warnings

import pytest
import torch
from torch import nn

import fedda
from conftest import close, digits, last, path, quadratic, stable
from fedda import registry
from fedda.rules.preconditioners import ParameterUnits
from fedda.rules.prox import L1, Box
from test_relative_eps import X0, A, B, by_hand

NAMES = ("fedda-2-1", "fedda-mvr", "fedda-2-2", "fedda-1-2", "fedda-cv", "fedda-cv-mvr")
SIZE = math.sqrt((X0[0] ** 2 + X0[1] ** 2) / 2)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_three_rounds_by_hand(name, relative, engine):
    """One parameter, so that the metric H divided by its size is a step that is longer by the size."""
    mvr, cv, scalar = name in ("fedda-mvr", "fedda-1-2", "fedda-cv-mvr"), "cv" in name, name.endswith("-2")
    words = {"steps": 2, "beta": 0.8, "kappa": 0.7, "eps": 0.3, "mu0": "zero", "lr_mode": "relative"}
    words |= {"lr": lambda t: 0.05, "c": 40.0} if mvr else {"lr": 0.05, "momentum": 0.9}
    words |= {"eps_mode": "relative"} if relative else {}
    x0 = torch.tensor(X0, dtype=torch.float64)
    server = last(fedda.make(name, **words), fedda.Quadratic(A, B), 3, x0=x0, engine=engine)
    expected = by_hand(3, mvr, cv, relative, "z", scalar=scalar, unit=SIZE)
    for got, wanted in zip(server[:3], expected, strict=True):
        torch.testing.assert_close(got[0], torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_units_of_the_model_do_not_matter(name):
    """y = 1000 x as the model: the path is the same, times 1000. With an absolute rate it is another."""
    base = quadratic()
    large = fedda.Quadratic(base.A / 1000**2, 1000 * base.b, noise=base.noise / 1000)
    x0 = torch.linspace(-1, 2, base.d, dtype=torch.float64)
    for lr_mode, alike in (("relative", True), ("absolute", False)):
        algorithm = stable(name, eps_mode="relative", lr_mode=lr_mode)
        a, b = (path(algorithm, p, 6, cohort=3, x0=x) for p, x in ((base, x0), (large, 1000 * x0)))
        assert bool(torch.allclose(1000 * a, b, rtol=1e-9, atol=1e-9)) is alike


def test_the_size_of_a_parameter():
    layout = [("a", (2, 2)), ("empty", (0, 3)), ("zero", (3,)), ("b", ())]
    units = ParameterUnits().bind(layout)
    x = torch.tensor([[[1.0, -1.0, 3.0, -3.0, 0.0, 0.0, 0.0, -2.0]], [[0.0] * 7 + [1e-9]]])
    sizes = units.start(x)
    torch.testing.assert_close(sizes, torch.tensor([[[math.sqrt(5), 0.01, 0.01, 2.0]], [[0.01] * 4]]))
    assert units.start(torch.zeros(1, 8)).tolist() == [[1.0] * 4]  # nothing has a size
    assert ParameterUnits().start(torch.ones(1, 8)).tolist() == [[1.0]]  # one parameter
    spread = units.spread(sizes)
    assert spread.shape == x.shape
    assert spread[0, 0].tolist() == pytest.approx([math.sqrt(5)] * 4 + [0.01] * 3 + [2.0])


def two_layers(factor):
    """A perceptron whose first layer is `factor` times as large."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    with torch.no_grad():
        network[1].weight *= factor
    return network


@pytest.mark.parametrize("lr_mode,bounded", [("relative", True), ("absolute", False)])
def test_a_local_step_moves_a_layer_by_the_rate_times_its_size_at_most(lr_mode, bounded):
    data, network = digits().data, two_layers(0.3)
    problem = fedda.problem(
        network, nn.functional.cross_entropy, x=data.x, y=data.y, client=torch.arange(len(data.y)) % 4
    )
    lengths = [p.numel() for p in network.parameters()]
    start, moved = path(stable("fedda-2-1", lr=0.01, eps_mode="relative", lr_mode=lr_mode), problem, 2)
    parts = zip((moved - start).split(lengths), start.split(lengths), strict=True)  # the first round only measures
    shares = [float(change.norm() / whole.norm()) for change, whole in parts]
    assert (max(shares) < 5 * 0.01) is bounded


@pytest.mark.parametrize("prox", [None, L1(0.2), Box(-0.2, 0.3)], ids=["free", "l1", "box"])
def test_fedda_cv_stays_exact(prox):
    """E25 in these units, three of six clients per round: H is another diagonal matrix, and any will do."""
    problem = quadratic(clients=6, noise=0.0, seed=5)
    words = {"eps_mode": "relative", "lr_mode": "relative", "prox": prox}
    end = last(fedda.make("fedda-cv", lr=0.01, **words), problem, 1500, cohort=3).x[0]
    q, mean = problem.A.mean(0), (problem.A * problem.b).mean(0) / problem.A.mean(0)
    best = {
        "Unconstrained": mean, "L1": mean.sign() * (mean.abs() - 0.2 / q).clamp(min=0), "Box": mean.clamp(-0.2, 0.3),
    }[type(fedda.make("fedda-cv", prox=prox).prox).__name__]  # fmt: skip
    assert (end - best).norm() < 1e-6


def test_a_state_has_the_units_of_the_first_model():
    problem, algorithm = digits(), stable("fedda-cv", eps_mode="relative", lr_mode="relative")
    whole = fedda.train(algorithm, problem, rounds=6, seed=[0, 1])
    half = fedda.train(algorithm, problem, rounds=3, seed=[0, 1])
    assert torch.equal(fedda.train(algorithm, problem, rounds=6, seed=[0, 1], state=half.state).x, whole.x)
    assert torch.equal(half.state["server.units"], whole.state["server.units"])
    assert not torch.equal(*whole.state["server.units"])  # the seeds have other first models


def test_the_mode_has_two_values():
    with pytest.raises(ValueError, match="FedDA: lr_mode must be one of 'absolute', 'relative', got 'large'"):
        fedda.make("fedda-2-1", lr_mode="large")


# -- the method without tuning -----------------------------------------------------------------------------------------
def test_fedda_is_fedda_2_1_with_other_defaults():
    words = {"eps_mode": "relative", "lr_mode": "relative", "v_input": "gradients", "beta": 0.99, "kappa": 0.3}
    rate, words["prox"] = fedda.schedules.cosine(0.3, warmup=0.05), L1(0.001)
    assert fedda.make("fedda", prox=L1(0.001)) == fedda.make("fedda-2-1", lr=rate, **words)
    assert fedda.make("fedda", lr=0.2, kappa=0.5).preconditioner.kappa == 0.5


def test_fedda_needs_no_values():
    """Its rate falls over the rounds of the run, which nobody has to say."""
    result = fedda.train(fedda.make("fedda"), digits(dtype=torch.float32), rounds=60)
    assert result.history[-1]["test_accuracy"] > 0.85


def test_a_penalty_and_weight_decay_go_together():
    algorithm = fedda.make("fedda", prox=L1(0.001), weight_decay=0.1)
    ends = [fedda.train(a, digits(), rounds=5).x for a in (algorithm, fedda.make("fedda", prox=L1(0.001)))]
    assert ends[0].norm() < ends[1].norm()


def test_a_rate_that_is_nearly_zero_divides_nothing_by_zero(name):
    """Many methods divide by rates: the first ones of a warm-up, and those after the end of a schedule."""
    words = {"steps": 1} | ({"c": 1.0} if "c" in registry.algorithms.find(name).defaults else {})
    problem = digits(dtype=torch.float32)
    for rate in (fedda.schedules.cosine(0.001, horizon=10), fedda.schedules.cosine(0.001, warmup=0.5)):
        first, *_, before, end = path(fedda.make(name, lr=rate, **words), problem, 14)
        assert end.isfinite().all() and not torch.equal(first, end)
        if rate.horizon and name in ("fedavg", "fedda-2-1", "fedda", "scaffold"):
            close(before, end, 1e-6)


@pytest.mark.parametrize("problem", [quadratic, digits], ids=["one_parameter", "network"])
def test_a_state_of_other_units_is_refused(problem):
    problem = problem()
    for mode, other in (("relative", "absolute"), ("absolute", "relative")):
        one, two = (fedda.make("fedda-2-1", lr_mode=m) for m in (mode, other))
        state = fedda.train(one, problem, rounds=2).state
        with pytest.raises(ValueError, match="train: the state is of a run with another lr_mode"):
            fedda.train(two, problem, rounds=4, state=state)


@pytest.mark.parametrize("name", ["fedda-mvr", "fedda-1-2", "fedda-cv-mvr"])
def test_the_default_c_of_a_schedule_is_that_of_its_start(name):
    made = fedda.make(name, lr=fedda.schedules.cosine(0.1, warmup=0.2))
    assert made.estimator.c == pytest.approx(0.5 / 0.1**2)
    assert fedda.train(made, quadratic(), rounds=5).x.isfinite().all()


def test_a_longer_run_from_a_state_says_that_its_rate_is_another():
    problem = digits()
    half = fedda.train(fedda.make("fedda"), problem, rounds=4)
    with pytest.warns(UserWarning, match="made for a run of 20 local steps, this one for 40: it does not continue"):
        fedda.train(fedda.make("fedda"), problem, rounds=8, state=half.state)
    fixed = fedda.make("fedda", lr=fedda.schedules.cosine(0.3, warmup=0.05, horizon=40))
    half = fedda.train(fixed, problem, rounds=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = fedda.train(fixed, problem, rounds=8, state=half.state)
    assert torch.equal(whole.x, fedda.train(fixed, problem, rounds=8).x)
