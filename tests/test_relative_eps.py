"""H beyond the paper: an epsilon that follows the gradients' size, and H from the clients' squared gradients."""

import math

import pytest
import torch

import fedda
from conftest import close, digits, last, path, quadratic, stable
from fedda.rules.prox import L1, Box

A, B, X0 = ((2.0, 0.25), (0.5, 1.0)), ((1.0, 2.0), (-3.0, 0.5)), (0.4, -0.2)
D, K, STEPS = range(2), range(2), 2


def by_hand(
    rounds, mvr, cv, relative, v_input, scalar=False, lr=0.05, beta=0.8, kappa=0.7, eps=0.3, momentum=0.9, unit=1.0
):
    """Two clients, two steps, two coordinates, lists of floats; `lr` is constant, a = 0.1 also for MVR."""
    a = 1 - momentum
    x, c, own = list(X0), [0.0, 0.0], [[0.0, 0.0], [0.0, 0.0]]

    def g(k, x):
        return [A[k][j] * (x[j] - B[k][j]) for j in D]

    nu = [(g(0, x)[j] + g(1, x)[j]) / 2 for j in D]
    mu = [0.0] if scalar else [0.0, 0.0]
    for tau in range(rounds):
        root = [m / (1 - beta**tau) if relative and tau else m for m in mu]
        root = root if scalar else [math.sqrt(m) for m in root]
        h = [r + (kappa * sum(root) / len(root) if relative else eps) for r in root] * (2 if scalar else 1)
        h = [value / unit for value in h]
        still = relative and tau == 0
        zs, nus, qs, news = [], [], [], []
        for k in K:
            X, NU, Z, q, total = list(x), list(nu), [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
            for _ in range(STEPS):
                Z = [Z[j] - lr * NU[j] for j in D]
                old, X = X, list(x) if still else [x[j] + Z[j] / h[j] for j in D]
                now, then = g(k, X), g(k, old)
                q = [q[j] + now[j] ** 2 / STEPS for j in D]
                total = [total[j] + now[j] / STEPS for j in D]
                if cv:
                    now, then = ([v[j] - own[k][j] + c[j] for j in D] for v in (now, then))
                NU = [now[j] + (1 - a) * (NU[j] - then[j]) if mvr else a * now[j] + (1 - a) * NU[j] for j in D]
            zs.append(Z)
            nus.append(NU)
            qs.append(q)
            news.append(total)
        z, nu, q = ([(v[0][j] + v[1][j]) / 2 for j in D] for v in (zs, nus, qs))
        if not still:
            x = [x[j] + z[j] / h[j] for j in D]
        gain = 1 if relative else STEPS
        s = {"z": [z[j] / lr / STEPS * gain for j in D], "gradients": [gain * math.sqrt(q[j]) for j in D]}[v_input]
        moment = [math.hypot(*s)] if scalar else [v**2 for v in s]
        mu = [beta * m + (1 - beta) * new for m, new in zip(mu, moment, strict=True)]
        c = [c[j] + sum(news[k][j] - own[k][j] for k in K) / 2 for j in D]
        own = news
    return x, nu, mu


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("name", ["fedda-2-1", "fedda-mvr", "fedda-2-2", "fedda-1-2", "fedda-cv", "fedda-cv-mvr"])
@pytest.mark.parametrize("relative,v_input", [(True, "z"), (True, "gradients"), (False, "gradients")])
def test_three_rounds_by_hand(name, relative, v_input, engine):
    mvr, cv = name in ("fedda-mvr", "fedda-1-2", "fedda-cv-mvr"), "cv" in name
    words = {"steps": STEPS, "beta": 0.8, "kappa": 0.7, "eps": 0.3, "mu0": "zero", "v_input": v_input}
    words |= {"lr": lambda t: 0.05, "c": 40.0} if mvr else {"lr": 0.05, "momentum": 0.9}
    words |= {"eps_mode": "relative"} if relative else {}
    server = last(
        fedda.make(name, **words), fedda.Quadratic(A, B), 3, x0=torch.tensor(X0, dtype=torch.float64), engine=engine
    )
    expected = by_hand(3, mvr, cv, relative, v_input, scalar=name.endswith("-2"))
    for got, wanted in zip(server[:3], expected, strict=True):
        torch.testing.assert_close(got[0], torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["fedda-2-1", "fedda-mvr", "fedda-2-2", "fedda-1-2", "fedda-cv", "fedda-cv-mvr"])
@pytest.mark.parametrize("v_input", ["z", "nu", "gradients"])
def test_the_size_of_the_gradients_does_not_matter(name, v_input):
    """A loss times 1000 has the same path; with an absolute epsilon it has not. (MVR's c weighs steps, not gradients.)"""
    base = quadratic()
    large = fedda.Quadratic(1000 * base.A, base.b, noise=1000 * base.noise)
    for eps_mode, alike in (("relative", True), ("absolute", False)):
        algorithm = stable(name, eps_mode=eps_mode, v_input=v_input)
        a, b = (path(algorithm, problem, 6, cohort=3) for problem in (base, large))
        assert bool(torch.allclose(a, b, rtol=1e-9, atol=1e-12)) is alike


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("prox", [None, L1(0.05), Box(-0.2, 0.2)], ids=["free", "l1", "box"])
def test_the_first_round_only_measures(prox, engine):
    problem = digits()
    run = fedda.Run(stable("fedda-2-1", eps_mode="relative", prox=prox), problem, cohort=4, engine=engine)
    start = run.server
    first = run.step()
    assert torch.equal(first.x, start.x) and first.t == 5
    assert not torch.equal(first.nu, start.nu) and first.mu.count_nonzero() > 0.9 * (start.nu != 0).sum()
    assert not torch.equal(run.step().x, start.x)
    assert run.first_rates is None  # nothing can be said of the first rate before


def test_a_lost_first_round_measures_again():
    from test_training import Failing

    base = quadratic(clients=3, noise=0.0)
    late = fedda.Run(stable("fedda-2-1", eps_mode="relative"), Failing(base, [0, 1, 2], after=1, until=6))
    late.step()
    expected = fedda.Run(stable("fedda-2-1", eps_mode="relative"), base)
    for _ in range(3):
        close(late.step().x, expected.step().x)


def test_relative_takes_its_own_settings():
    made = fedda.make("fedda-1-2", eps_mode="relative")
    assert made.mu_scale == "mean" and made.preconditioner.bias_correction and made.preconditioner.mu0 == "zero"
    explicit = {"mu_scale": "mean", "bias_correction": True, "mu0": "zero"}
    assert fedda.make("fedda-2-1", eps_mode="relative", **explicit) == fedda.make("fedda-2-1", eps_mode="relative")
    plain = fedda.make("fedda-1-2")
    assert plain.mu_scale == "sum" and plain.preconditioner.mu0 == "nu0" and not plain.preconditioner.measures_first
    with pytest.raises(ValueError, match="FedDA: kappa must be > 0, got -1"):
        fedda.make("fedda-2-1", kappa=-1.0)


@pytest.mark.parametrize("name,up", [("fedda-2-1", 2), ("fedda-mvr", 2), ("fedda-cv", 3)])
def test_squared_gradients_are_one_vector_more(name, up):
    problem = quadratic()

    def sent(**words):
        history = fedda.train(stable(name, **words), problem, rounds=2, cohort=3, every=1).history
        return (history[2]["bytes_up"] - history[1]["bytes_up"]) / (3 * 8 * problem.d), history[2]["gradients"]

    assert sent()[0] == up and sent(v_input="gradients")[0] == up + 1
    assert sent()[1] == sent(v_input="gradients")[1]  # no gradient more


def test_a_grid_of_kappas_equals_separate_runs():
    grid = [0.3, 1.0, 3.0]
    words = {"lr": 0.02, "eps_mode": "relative"}
    kappas = torch.tensor(grid, dtype=torch.float64).view(3, 1, 1)
    together = last(fedda.make("fedda-cv", kappa=kappas, **words), quadratic(), 4, seed=[1, 1, 1])
    for i, kappa in enumerate(grid):
        close(together.x[i], last(fedda.make("fedda-cv", kappa=kappa, **words), quadratic(), 4, seed=1).x, 1e-12)


@pytest.mark.parametrize("v_input", ["z", "gradients"])
def test_fedda_cv_stays_exact(v_input):
    """E25 in this metric, three of six clients per round, with a penalty."""
    problem = quadratic(clients=6, noise=0.0, seed=5)
    words = {"v_input": v_input, "prox": L1(0.2)}
    end = last(fedda.make("fedda-cv", lr=0.01, eps_mode="relative", **words), problem, 1500, cohort=3).x[0]
    Abar = problem.A.mean(0)
    mean = (problem.A * problem.b).mean(0) / Abar
    best = mean.sign() * (mean.abs() - 0.2 / Abar).clamp(min=0)
    assert (end - best).norm() < 1e-6
