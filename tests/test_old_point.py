"""Where the first old gradient of a round is taken: at the client's own last point, or at the x that is sent."""

import pytest
import torch

import fedda
from conftest import close, last, quadratic, stable
from fedda.engines import Vectorised
from fedda.rules.estimators import Mvr
from fedda.rules.preconditioners import Fixed
from fedda.rules.prox import Box
from test_identities import D4, LR, Oracle, fedda_of
from test_training import Failing

STEPS, C = 3, 2.0


def by_hand(problem, rounds, cohort, seed, old_point, h=1.0, prox=None, failing=()):
    """STEM (with h and prox: FedDA-MVR) as a plain loop. `before` is a table of who took part in the round before,
    with the point of each; in the rounds named by `failing` as (round, client) a client's reply is lost."""
    g = Oracle(problem, seed)
    x, xs, before = problem.start(seed), [], {}
    nu = g.nu0(x)
    for tau in range(rounds):
        ends = {}
        for k in g.cohort(tau, cohort).tolist():
            X, NU, Z, S = x, nu, torch.zeros_like(x), 0.0
            old = before.get(k, x) if old_point == "own" else x
            for i in range(STEPS):
                eta = float(LR(torch.tensor(tau * STEPS + i, dtype=torch.float64)))
                Z, S = Z - eta * NU, S + eta
                X = x + Z / h if prox is None else prox(x + Z / h, torch.as_tensor(h), S)
                new, previous = g(tau, k, i, X, old)
                NU, old = new + (1 - min(1.0, C * eta**2)) * (NU - previous), X
            if (tau, k) not in failing:
                ends[k] = (X, NU, Z)
        before = {k: X for k, (X, _, _) in ends.items()}
        _, nu, z = (torch.stack(v).mean(0) for v in zip(*ends.values(), strict=True))
        x = x + z / h if prox is None else prox(x + z / h, torch.as_tensor(h), S)
        xs.append(x)
    return torch.stack(xs)


ENGINES = ["sequential", "vectorised", Vectorised(chunk=2)]


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("cohort", [6, 3, 1])
@pytest.mark.parametrize("old_point", ["own", "server"])
def test_stem_by_hand(old_point, cohort, engine):
    """With three of six clients some come back after a pause: those look at x."""
    problem = quadratic(clients=6)
    cohorts = [set(Oracle(problem, 4).cohort(tau, 3).tolist()) for tau in range(6)]
    pauses = [k for k in range(6) if any(k in a and k not in b and k in c for a, b, c in zip(cohorts, cohorts[1:], cohorts[2:], strict=False))]  # fmt: skip
    assert pauses
    algorithm = fedda.make("stem", lr=LR, c=C, steps=STEPS, old_point=old_point)
    got = [server.x[0] for server in fedda.rounds(algorithm, problem, 6, cohort=cohort, seed=4, engine=engine)]
    close(torch.stack(got), by_hand(problem, 6, cohort, 4, old_point))


@pytest.mark.parametrize("prox", [None, Box(-0.2, 0.3)], ids=str)
@pytest.mark.parametrize("old_point", ["own", "server"])
def test_fedda_mvr_by_hand(old_point, prox):
    problem = quadratic(clients=6)
    algorithm = fedda_of(Mvr(C), Fixed(D4), steps=STEPS, old_point=old_point, **({"prox": prox} if prox else {}))
    got = [server.x[0] for server in fedda.rounds(algorithm, problem, 6, cohort=3, seed=4)]
    close(torch.stack(got), by_hand(problem, 6, 3, 4, old_point, h=D4, prox=prox))


@pytest.mark.parametrize("name,words", [("stem", {}), ("fedda-mvr", {"old_point": "own"})])
def test_replicas_with_different_cohorts_and_a_resume(name, words):
    """Each replica has cohorts of its own, so the same client may have taken part in one and not in the other."""
    problem = quadratic(clients=6)
    algorithm = stable(name, **words)
    run = fedda.Run(algorithm, problem, cohort=3, seed=[4, 9])
    for tau in range(6):
        if tau == 3:
            run = fedda.Run(algorithm, problem, cohort=3, seed=[4, 9], state=run.state())
        run.step()
    for i, seed in enumerate((4, 9)):
        close(run.server.x[i], last(algorithm, problem, 6, cohort=3, seed=seed, engine="sequential").x, 1e-12)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_client_whose_reply_was_lost_looks_at_x(engine):
    """Client 2 fails in its second round, so that its point is no part of x."""
    base = quadratic(clients=4, noise=0.0)
    problem = Failing(base, [2], after=1 + STEPS, until=1 + 2 * STEPS)  # one call for nu_0
    algorithm = fedda.make("stem", lr=LR, c=C, steps=STEPS)
    got = [server.x[0] for server in fedda.rounds(algorithm, problem, 4, engine=engine)]
    close(torch.stack(got), by_hand(base, 4, 4, 0, "own", failing=[(1, 2)]))
    with pytest.raises(AssertionError):
        close(torch.stack(got), by_hand(base, 4, 4, 0, "own"))


def test_after_a_round_without_any_reply_the_own_points_still_count():
    """Nothing has changed in such a round, so that x is still the mean of the clients' own points."""
    base = quadratic(clients=3, noise=0.0)
    problem = Failing(base, [0, 1, 2], after=1 + STEPS, until=1 + 2 * STEPS)
    algorithm = fedda.make("stem", lr=LR, c=C, steps=STEPS)
    run = fedda.Run(algorithm, problem)
    xs = [run.step().x[0] for _ in range(4)]
    assert torch.equal(xs[0], xs[1])
    close(torch.stack([xs[0], *xs[2:]]), by_hand(base, 3, 3, 0, "own"))


def test_a_client_keeps_a_point_and_a_number():
    run = fedda.Run(fedda.make("stem"), quadratic(), seed=[0, 1])
    assert {name: tuple(v.shape) for name, v in run.simulation.memory.items()} == {"X": (2, 5, 4), "t": (2, 5, 1)}
    assert fedda.Run(fedda.make("stem", old_point="server"), quadratic()).simulation.memory == {}
    assert fedda.make("fedda-mvr").memory == ()
    with pytest.raises(ValueError, match="fedda-2-1: no parameter 'old_point'"):  # momentum takes no old gradient
        fedda.make("fedda-2-1", old_point="own")
    with pytest.raises(ValueError, match="Stem: old_point must be one of 'own', 'server', got 'x'"):
        fedda.make("stem", old_point="x")


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_own_points_take_most_of_the_drift_away(seed):
    """Different Hessians, no noise, eta = 0.2, a = 0.01: at least three times nearer to the minimum."""
    problem = quadratic(noise=0.0, seed=seed)

    def bias(name, **words):
        end = last(fedda.make(name, steps=5, lr=lambda t: 0.2, **words), problem, 400).x[0]  # it moves no more
        return float((end - problem.minimum).norm())

    own, server = (bias("stem", c=0.25, old_point=old_point) for old_point in ("own", "server"))
    assert own < server / 3 and bias("fedavg") > 10 * own
