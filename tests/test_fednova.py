"""FedNova against its paper: by hand, in closed form, and where it is another method."""

import pytest
import torch

import fedda
from conftest import close, digits, last, path, quadratic, stable
from fedda.rules.schedules import CubeRoot

A, B, SIZES, X0 = (2.0, 0.5, 1.0), (1.0, -3.0, 4.0), (2, 10, 5), 0.5


def eta(t):
    return 0.2 / (8 + t) ** (1 / 3)


def closed_form(tau, momentum, mu, rates):
    """a_k as the paper prints it: for SGD, for momentum, and for a proximal term, one at a time."""
    if momentum:
        return (tau - momentum * (1 - momentum**tau) / (1 - momentum)) / (1 - momentum)
    a = 0.0
    for rate in rates[:tau]:
        a = (1 - rate * mu) * a + 1
    return a


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("momentum,mu", [(0.0, 0.0), (0.6, 0.0), (0.0, 0.7)])
def test_three_rounds_by_hand(momentum, mu, engine, weights):
    """Clients of 2, 10 and 5 samples take 1, 4 and 2 of at most 4 steps; the rate decays; half a server step."""
    taus, x = (1, 4, 2), X0
    p = [n / sum(SIZES) for n in SIZES] if weights == "samples" else [1 / 3] * 3
    for tau in range(3):
        changes, a = [], []
        for k in range(3):
            X, u = x, 0.0
            for i in range(taus[k]):
                u = momentum * u + A[k] * (X - B[k])
                X -= eta(4 * tau + i) * (u + mu * (X - x))
            a.append(closed_form(taus[k], momentum, mu, [eta(4 * tau + i) for i in range(4)]))
            changes.append((x - X) / a[k])
        tau_eff = sum(p[k] * a[k] for k in range(3))
        x -= 0.5 * tau_eff * sum(p[k] * changes[k] for k in range(3))
    problem = fedda.Quadratic([[v] for v in A], [[v] for v in B], sizes=SIZES)
    words = {"lr": CubeRoot(0.2, 8.0), "steps": 4, "server_lr": 0.5, "momentum": momentum, "mu": mu}
    x0 = torch.tensor([X0], dtype=torch.float64)
    got = last(fedda.make("fednova", **words), problem, 3, x0=x0, engine=engine, weights=weights)
    assert got.x.item() == pytest.approx(x, rel=1e-13)


def test_momentum_and_a_proximal_term_together():
    """a_k is the weight of the gradients: where all gradients are 1, the change of a client is eta a_k."""

    class Slope(fedda.Quadratic):
        def gradients(self, x, batch):
            return torch.ones_like(x)

        gradient = gradients

    problem = Slope([[1.0]] * 2, [[0.0]] * 2, sizes=[3, 7])
    words = {"lr": 0.1, "steps": 7, "momentum": 0.6, "mu": 2.0}
    seen = [0.0]
    for _ in range(7):  # a client that takes i steps
        s, a = 0.0, 0.0
        for _ in range(len(seen)):
            s = 0.6 * s + 1
            a = (1 - 0.1 * 2.0) * a + s
        seen.append(a)
    x = last(fedda.make("fednova", **words), problem, 1).x.item()
    assert x == pytest.approx(-0.1 * (seen[3] + seen[7]) / 2, rel=1e-13)


@pytest.mark.parametrize("problem,cohort", [(quadratic, 3), (digits, 4)])
def test_equal_work_is_fedavg(problem, cohort):
    for words in ({"lr": 0.05}, {"lr": CubeRoot(0.1, 8.0), "server_lr": 0.7}):
        nova, avg = fedda.make("fednova", work="equal", steps=3, **words), fedda.make("fedavg", steps=3, **words)
        how = {"cohort": cohort, "seed": 3}
        close(path(nova, problem(), 5, **how), path(avg, problem(), 5, **how), 1e-12)
    mean = last(fedda.make("fednova", work="equal", steps=1, mu=0.3), quadratic(), 1)
    close(mean.x, last(fedda.make("fedavg", steps=1), quadratic(), 1).x, 1e-12)  # no pull at x itself


def test_clients_of_one_size_do_equal_work():
    a, b = (path(fedda.make("fednova", work=work), quadratic(), 4, seed=2) for work in ("samples", "equal"))
    assert torch.equal(a, b)


def test_a_client_that_works_more_does_not_count_for_more():
    """With small steps it ends at the minimum of the mean, whatever the sizes; without a_k at another point."""
    base = quadratic(noise=0.0)
    problem = fedda.Quadratic(base.A, base.b, sizes=[1, 2, 5, 20, 40])
    end = last(fedda.make("fednova", lr=1e-3, steps=40), problem, 600).x[0]
    assert (end - problem.minimum).abs().max() < 0.02

    class Naive(type(fedda.make("fednova"))):
        def round(self, server, cohort):
            x, most, t = server
            (change,) = cohort.average(self.naive, x, most, t)
            return self.Server(x - change, most, t + self.steps)

        @fedda.on_client
        def naive(self, client, *down):
            change, a = self.local(client, *down)
            return (change * a,)

    assert (last(Naive(lr=1e-3, steps=40), problem, 300).x[0] - problem.minimum).abs().max() > 0.1


def test_random_work_is_drawn_from_one_to_all_steps():
    problem = quadratic(clients=600)
    history = fedda.train(stable("fednova", work="random", steps=4), problem, rounds=2, seed=[0, 1]).history
    used = [row["gradients"] for row in history if row["round"] == 1]
    assert used[0] != used[1] and all(abs(n / 600 - 2.5) < 0.15 for n in used)  # the mean of 1, 2, 3, 4


def test_gradients_and_bytes_are_those_of_the_work_done():
    problem = digits(dtype=torch.float32)
    start, first = fedda.train(stable("fednova", steps=7), problem, rounds=1, every=1).history
    sizes = problem.sizes.double()
    tau = (7 * sizes / sizes.max()).round().clamp(min=1)
    assert first["gradients"] == tau.sum() < 7 * 10
    assert (start["gradients"], start["bytes_up"], start["bytes_down"]) == (0, 10 * 4, 10 * 4 * problem.d)
    assert first["bytes_up"] - start["bytes_up"] == 10 * (4 * problem.d + 4)  # the change and a_k
