"""What the server takes of the replies of clients."""

import pytest
import torch

import fedda
from conftest import quadratic
from fedda import rng


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_a_reply_with_one_number_that_is_not_finite_is_left_out(engine, value):
    """One step, so that an infinite gradient is an infinite reply: after two it would be no number."""
    problem, algorithm = quadratic(clients=3, noise=0.0), fedda.make("fedavg", lr=0.1, steps=1)
    problem.b[1, 2] = value
    run = fedda.Run(algorithm, problem, engine=engine)
    run.advance()
    assert int(run.dropped) == 1
    kept = torch.tensor([0, 2])
    expected = 0.1 * (problem.A[kept] * problem.b[kept]).mean(0)  # a step from x_0 = 0
    torch.testing.assert_close(run.server.x[0], expected, rtol=1e-12, atol=1e-12)


class Full(type(fedda.make("fedavg"))):
    """One step along the gradient over all of a client's data."""

    @fedda.on_client
    def local(self, client, x, t):
        return (x - client.full_gradient(x),)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_client_in_a_cohort_has_its_own_data(engine):
    problem = quadratic(clients=6, noise=0.0)
    run = fedda.Run(Full(), problem, cohort=2, seed=1, engine=engine)
    ids = run.simulation.cohort(0, 2).ids
    assert ids.tolist() != [0, 1]  # else its place in the cohort and its number are the same
    run.advance()
    expected = (problem.A[ids] * problem.b[ids]).mean(0)
    torch.testing.assert_close(run.server.x[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_every_step_of_a_round_draws_a_batch_of_its_own(engine):
    """In the first round batches are drawn one by one, later in one go: they are the same draws 0, 1, 2."""

    class Spy(type(quadratic())):
        def batch(self, ids, key):
            self.keys.append(key.flatten()[0].item())
            return super().batch(ids, key)

    base = quadratic(clients=1)
    spy = Spy(base.A, base.b, noise=0.1)
    run = fedda.Run(fedda.make("fedavg", steps=3), spy, engine=engine)
    for tau in range(3):
        spy.keys = []
        run.advance()
        key = run.simulation.cohort(tau, 1).key
        assert spy.keys == [rng.fold(key, draw).item() for draw in range(3)]


def test_noise_with_a_seed_is_new_in_every_exchange_of_a_round():
    around = [fedda.aggregation.Noise(1.0, norm=1.0, seed=0)]
    run = fedda.Run(fedda.make("mime"), quadratic(clients=3, noise=0.0), aggregation=around)
    cohort = run._aggregated(run.simulation.cohort(0, 3), 0)
    (first,), (second,) = (cohort.average(run.algorithm.statistics, run.server.x) for _ in range(2))
    assert bool((first != second).all())  # the same gradients, and other noise in every coordinate
