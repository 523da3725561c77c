"""What the server takes of the replies of clients."""

import pytest
import torch

import fedda
from conftest import quadratic


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
