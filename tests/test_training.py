"""Runs: history, traffic, the start-up guard, clients that fail, mistakes that are refused."""

import math
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

import fedda
from conftest import NAMES, digits, last, quadratic, stable
from fedda import registry
from fedda.aggregation.dry_run import dry_run
from fedda.engines import Vectorised
from fedda.run import PATIENCE


class Watched(fedda.Quadratic):
    """Counts the gradients and the full passes that it is asked for."""

    taken = passes = 0

    def gradients(self, x, batch):
        self.taken += x.numel() // self.d
        return super().gradients(x, batch)

    def everything(self, client):
        self.passes += 1
        return super().everything(client)


def messages(algorithm, d):
    """Bytes down and up, for one client, at the start and in a round: of the tensors that one client sees."""
    seen = []
    start, _ = dry_run(algorithm, torch.zeros(1, d), lambda task, down, replies: seen.append((down, replies)))
    for part in (seen[: len(start)], seen[len(start) :]):
        sent, kept = 0, set()  # a client keeps what it got in an earlier exchange of the round
        for down, _ in part:
            sent += sum(4 * v.shape[-1] for v in down if id(v) not in kept)
            kept |= set(map(id, down))
        yield sent, sum(4 * v.shape[-1] for _, up in part for v in up)


def test_rows_count_what_travels_and_what_is_computed(name):
    """What each method costs by its paper stands in docs/algorithms/README.md, which test_docs.py holds against the counts."""
    base, clients, cohort = quadratic(clients=10), 10, 4
    problem = Watched(base.A, base.b, noise=0.1).to(dtype=torch.float32)
    options = {"work": "equal"} if "work" in registry.algorithms.find(name).defaults else {}
    algorithm = stable(name, steps=3, **options)
    run = fedda.Run(algorithm, problem, cohort=cohort)
    at_start, in_a_round = messages(algorithm, problem.d)
    taken = [(problem.taken, problem.passes)]
    rows = run.evaluate()
    for _ in range(2):
        run.step()
        rows += run.evaluate()
        taken.append((problem.taken, problem.passes))
    assert [(row["gradients"], row["full_gradients"]) for row in rows] == taken
    assert (rows[0]["bytes_down"], rows[0]["bytes_up"]) == tuple(clients * n for n in at_start)
    for before, after in pairwise(rows):
        travelled = tuple(after[key] - before[key] for key in ("bytes_down", "bytes_up"))
        assert travelled == tuple(cohort * n for n in in_a_round)
    assert taken[2][0] + taken[2][1] > taken[1][0] + taken[1][1] and in_a_round[1] >= 4 * problem.d


def test_history_rows():
    problem = digits(dtype=torch.float32)
    result = fedda.train(stable("fedda-mvr"), problem, rounds=7, cohort=3, seed=[4, 5], every=3)
    assert [(r["round"], r["seed"]) for r in result.history] == [(r, s) for r in (0, 3, 6, 7) for s in (4, 5)]
    row = result.history[-1]
    assert row["steps"] == 35 and row["seconds"] > 0 and row["dropped"] == 0
    metrics = {
        "train_loss",
        "train_accuracy",
        "test_loss",
        "test_accuracy",
        "density",
        "nonzero",
        "max_x",
        "h_min",
        "h_max",
    }
    assert metrics <= set(row)
    assert result.x.shape == (2, problem.d)
    assert row["max_x"] == float(result.x[1].abs().max())
    alone = fedda.train(stable("fedda-mvr"), problem, rounds=7, cohort=3, seed=5)
    assert alone.x.shape == (problem.d,) and [r["round"] for r in alone.history] == list(range(8))


def test_history_to_pandas_says_what_it_needs():
    history = fedda.train(stable("fedavg"), quadratic(), rounds=1).history
    try:
        import pandas
    except ImportError:
        with pytest.raises(ImportError, match="pandas"):
            history.to_pandas()
    else:
        assert isinstance(history.to_pandas(), pandas.DataFrame)


def test_rounds_gives_one_state_a_round_and_takes_a_start():
    x0 = torch.full((4,), 3.0, dtype=torch.float64)
    states = list(fedda.rounds(stable("fedavg"), quadratic(), rounds=5, cohort=2, seed=0, x0=x0, engine="auto"))
    assert len(states) == 5 and states[0].x.shape == (1, 4)
    assert torch.equal(fedda.Run(stable("fedavg"), quadratic(), x0=x0).server.x[0], x0)
    assert torch.equal(fedda.Run(stable("fedavg"), quadratic()).server.x, torch.zeros(1, 4, dtype=torch.float64))


def test_the_same_cohorts_and_batches_for_every_algorithm():
    """Common random numbers: what clients take part, and on which samples, depends on no algorithm."""

    class Spy(type(quadratic())):
        def batch(self, ids, key):
            self.log.append((ids.tolist(), key.tolist()))
            return super().batch(ids, key)

    def draws(name):
        base = quadratic(clients=9)
        spy = Spy(base.A, base.b, noise=0.1)
        spy.log = []
        run = fedda.Run(stable(name, steps=2), spy, cohort=3, seed=7)
        for _ in range(3):
            spy.log.clear()
            run.step()
            yield list(spy.log)

    expected = list(draws("fedavg"))
    assert len({str(ids) for log in expected for ids, _ in log}) == 3  # a fresh cohort every round
    for name in registry.algorithms.entries:
        for log, reference in zip(draws(name), expected, strict=True):
            assert log[:2] == reference  # some draw more in a round, but never others


# -- the start ---------------------------------------------------------------------------------------------------------
def test_an_absurd_first_rate_is_refused_on_networks():
    """N4: with mu_0 = 0 the paper's FedDA-1-2 starts at eta_0 / eps = 5.85."""
    problem = digits()
    with pytest.raises(ValueError, match=r"FedDA: the first effective rate eta_0 / min h = 5.85 must be <= 1"):
        fedda.Run(fedda.make("fedda-1-2", mu0="zero"), problem)
    forced = fedda.Run(fedda.make("fedda-1-2", mu0="zero"), problem, force=True)
    assert forced.first_rates[0] == pytest.approx(5.848, rel=1e-3)
    assert fedda.Run(fedda.make("fedda-1-2"), problem).first_rates[0] < 1
    assert fedda.Run(fedda.make("fedda-mvr"), problem).first_rates[0] == pytest.approx(0.0928, rel=1e-3)
    assert fedda.Run(fedda.make("fedda-mvr", scale=2.0), problem).first_rates[0] == pytest.approx(2 * 0.0928, rel=1e-3)
    fedda.Run(fedda.make("fedda-1-2", mu0="zero"), quadratic())  # a quadratic has no such limit


def test_an_infeasible_start_is_projected_and_said():
    box = fedda.prox.Box(-0.5, 0.5)
    x0 = torch.tensor([3.0, 0.1, -1.0, 0.0], dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"FedDA: x_0 lies outside the Box; projected, moved by 2.55"):
        run = fedda.Run(stable("fedda-mvr", prox=box), quadratic(), x0=x0)
    assert run.server.x.tolist() == [[0.5, 0.1, -0.5, 0.0]]


# -- clients that fail -------------------------------------------------------------------------------------------------
class Failing(fedda.Quadratic):
    """Clients in `bad` give NaN (or infinity) from their call number `after` on."""

    def __init__(self, base, bad, after=0, until=10**9, value=float("nan")):
        super().__init__(base.A, base.b, base.noise)
        self.bad, self.after, self.until, self.value = torch.tensor(bad), after, until, value
        self.calls = torch.zeros(base.clients, dtype=torch.int64)

    def batch(self, ids, key):
        A, b, xi = super().batch(ids, key)
        calls = self.calls[ids]
        self.calls[ids] += 1
        broken = torch.isin(ids, self.bad) & (calls >= self.after) & (calls < self.until)
        return A, torch.where(broken[..., None], self.value, b), xi

    def everything(self, client):
        A, b, xi = super().everything(client)
        calls = int(self.calls[client])
        broken = client in self.bad.tolist() and self.after <= calls < self.until
        return A, torch.full_like(b, self.value) if broken else b, xi


# The server state of the others counts absent clients: they are tested by themselves below.
ONLY_PRESENT = [name for name in NAMES if not type(stable(name)).means_of_memory]


@pytest.mark.parametrize("name", ONLY_PRESENT)
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_client_that_fails_is_left_out_and_counted(name, engine, value):
    base = quadratic(clients=4)
    algorithm = stable(name, steps=2)
    whole = fedda.Quadratic(base.A[1:], base.b[1:])
    expected = last(algorithm, whole, 3, engine=engine)
    base.noise = 0.0
    history = fedda.train(algorithm, Failing(base, [0], value=value), rounds=3, engine=engine).history
    got = last(algorithm, Failing(base, [0], value=value), 3, engine=engine)
    torch.testing.assert_close(got.x, expected.x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-12, atol=1e-12)  # nu too, not only x
    assert history[-1]["dropped"] == 3


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_client_that_fails_in_the_first_exchange_is_out_of_the_second(engine):
    """Mime's statistics of client 0 fail, its local steps would not: it must not come back within the round."""

    class Statistics(fedda.Quadratic):
        def everything(self, client):
            A, b, xi = super().everything(client)
            return A, torch.full_like(b, float("nan")) if client == 0 else b, xi

    base, algorithm = quadratic(clients=4, noise=0.0), stable("mime")
    expected = last(algorithm, fedda.Quadratic(base.A[1:], base.b[1:]), 3, engine=engine)
    got = last(algorithm, Statistics(base.A, base.b), 3, engine=engine)
    torch.testing.assert_close(got.x, expected.x, rtol=1e-12, atol=1e-12)


def test_a_replica_that_has_been_silent_too_long_stays_so_even_after_a_resume():
    """Its clients fail for three rounds and would be fine again: it is over all the same, and a resumed run knows."""
    problem = quadratic(clients=2)

    class Sometimes(fedda.Quadratic):
        on = False

        def batch(self, ids, key):
            A, b, xi = super().batch(ids, key)
            dead = torch.zeros(ids.shape, dtype=torch.bool)
            dead[0] = self.on  # the first replica alone
            return A, torch.where(dead[..., None], float("nan"), b), xi

    flaky = Sometimes(problem.A, problem.b)
    run = fedda.Run(stable("fedavg"), flaky, seed=[0, 1])
    run.step()
    flaky.on = True
    for _ in range(PATIENCE):
        run.step()
    flaky.on = False
    frozen = run.server.x[0].clone()
    for again in (fedda.Run(stable("fedavg"), flaky, seed=[0, 1], state=run.state()), run):
        assert again.silent.tolist() == [PATIENCE, 0] and again.dropped.tolist() == [2 * PATIENCE, 0]
        before = again.server.x[1].clone()
        server = again.step()
        assert torch.equal(server.x[0], frozen) and not torch.equal(server.x[1], before)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_means_over_clients_are_taken_in_float64(engine):
    """Values 1e8 and -1e8 and small ones: a float32 sum would lose the small ones."""
    b = torch.tensor([[1e8], [3.0], [-1e8], [1.0]], dtype=torch.float64)
    problem = fedda.Quadratic(torch.ones(4, 1), b).to(dtype=torch.float32)
    assert last(fedda.make("fedavg", lr=1.0, steps=1), problem, 1, engine=engine).x.item() == 1.0


def test_density_counts_what_is_above_a_hundredth():
    x0 = torch.tensor([0.0, 0.0099, -0.0101, 5.0], dtype=torch.float64)
    row = fedda.Run(stable("fedavg"), quadratic(), x0=x0).evaluate()[0]
    assert (row["density"], row["nonzero"], row["max_x"]) == (0.5, 0.75, 5.0)


def test_objective_and_distance_to_the_set():
    x0 = torch.tensor([1.0, -2.0, 0.0, 0.0], dtype=torch.float64)
    row = fedda.Run(stable("fedda-2-1", prox=fedda.prox.L1(0.1)), quadratic(), x0=x0).evaluate()[0]
    assert row["objective"] == pytest.approx(row["train_loss"] + 0.3) and row["infeasible"] == 0.0


def test_bias_correction_counts_rounds():
    """Two rounds of two steps by hand: mu / (1 - beta^n) after n ROUNDS."""
    A, b, beta, eps, eta, x = 2.0, 3.0, 0.8, 0.1, 0.05, 0.0
    nu, mu = A * (x - b), 0.0
    for n in range(3):
        h = (mu / (1 - beta**n)) ** 0.5 + eps if n else eps
        X, z = x, 0.0
        for _ in range(2):
            z -= eta * nu
            X = x + z / h
            nu = 0.1 * A * (X - b) + 0.9 * nu
        x, mu = X, beta * mu + (1 - beta) * (z / eta) ** 2
    words = {"lr": eta, "steps": 2, "beta": beta, "eps": eps, "bias_correction": True}
    got = last(fedda.make("fedda-2-1", **words), fedda.Quadratic([[A]], [[b]]), 3)
    assert got.x.item() == pytest.approx(x, rel=1e-13)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize(
    "name,state,memory", [(name, *pair) for name in NAMES for pair in type(stable(name)).means_of_memory.items()]
)
def test_server_states_stay_the_mean_of_the_clients_also_after_a_failure(name, state, memory, weights):
    """c = sum_k p_k c_k (and h = sum_k p_k g_k), r of K clients, one of which fails for a while."""
    problem = Failing(quadratic(clients=6), [2], after=4, until=9)
    problem.sizes = torch.tensor([1, 2, 3, 4, 5, 6])
    run = fedda.Run(stable(name), problem, cohort=4, weights=weights)
    p = problem.sizes.double() if weights == "samples" else torch.ones(6, dtype=torch.float64)
    for _ in range(8):
        server = run.step()
        expected = (p[:, None] * run.simulation.memory[memory]).sum(0) / p.sum()
        torch.testing.assert_close(getattr(server, state)[0], expected, rtol=1e-10, atol=1e-12)
    assert run.dropped > 0


def test_a_silent_first_round_changes_nothing(name):
    """Time stands still too: a run whose first round is lost makes the same first step as one that lost nothing."""
    base = quadratic(clients=3, noise=0.0)
    after = int(fedda.Run(stable(name), base).counts.gradients > 0)  # let the start itself succeed
    late = fedda.Run(stable(name), Failing(base, [0, 1, 2], after=after, until=after + 1))
    start = late.server.x
    late.step()
    assert torch.equal(late.server.x, start)
    while torch.equal(late.server.x, start):
        late.step()
    rounds = 2 if name == "fedda" else 1  # its first round only measures
    torch.testing.assert_close(late.server.x, last(stable(name), base, rounds).x, rtol=1e-12, atol=1e-12)


def test_a_failed_client_keeps_its_old_memory():
    from test_engines import Remembering

    base = quadratic(clients=3)
    run = fedda.Run(Remembering(), Failing(base, [1], after=1))
    run.step()
    before = run.simulation.memory["c"].clone()
    run.step()
    after = run.simulation.memory["c"]
    assert torch.equal(after[1], before[1]) and not torch.equal(after[0], before[0])


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_three_silent_rounds_end_the_run(name, engine):
    problem = Failing(quadratic(clients=3), [0, 1, 2], after=7)
    run = fedda.Run(stable(name, steps=2), problem, engine=engine)
    rounds = 0
    with pytest.raises(fedda.Diverged, match=r"no client gave a finite reply in 3 rounds in a row .* lower lr"):
        while True:
            server = run.server
            run.step()
            rounds += 1
    assert torch.equal(run.server.x, server.x) and run.server.x.isfinite().all()  # the state was kept
    assert run.dropped == 3 * PATIENCE


def test_one_silent_round_keeps_the_state_and_goes_on(name):
    problem = Failing(quadratic(clients=3), [0, 1, 2], after=3, until=4)
    run = fedda.Run(stable(name, steps=1), problem)
    states = [run.server]
    for _ in range(5):
        states.append(run.step())
    moved = [not torch.equal(a.x, b.x) for a, b in pairwise(states)]
    # MimeLite's full gradients, after its draws, see the count of the next round fail too.
    # The first round of "fedda" only measures.
    assert moved.count(False) == (2 if name in ("mimelite", "fedda") else 1) and moved[-1]


def test_a_replica_that_dies_does_not_take_the_others_along():
    """lr = 1e200 blows up; its replica stays where it was, the other equals its separate run."""
    problem = quadratic()
    lr = torch.tensor([0.1, 1e200], dtype=torch.float64).view(2, 1, 1)
    both = fedda.train(fedda.make("fedavg", lr=lr), problem, rounds=8, seed=[3, 3])
    alone = fedda.train(fedda.make("fedavg", lr=0.1), problem, rounds=8, seed=3)
    torch.testing.assert_close(both.x[0], alone.x, rtol=1e-12, atol=1e-12)
    assert both.x.isfinite().all()
    assert both.history[-1]["dropped"] > both.history[-2]["dropped"] == 0
    assert both.history[-2]["train_loss"] == pytest.approx(alone.history[-1]["train_loss"], rel=1e-12)
    assert math.isnan(both.history[-1]["train_loss"])  # where it stands is no result


def test_nothing_finite_at_the_start_is_said():
    with pytest.raises(fedda.Diverged, match="no client gave a finite reply at the start"):
        fedda.Run(stable("fedda-mvr"), Failing(quadratic(), list(range(5))))


# -- mistakes ----------------------------------------------------------------------------------------------------------
def test_bad_hyper_parameters_are_refused_by_name(name):
    owner = registry.algorithms.find(name).owner
    for word, value, words in (("lr", -0.1, "> 0"), ("lr", float("nan"), "> 0"), ("lr", "x", "> 0"),
                               ("lr", True, "> 0"),
                               ("steps", 0, "a whole number >= 1"), ("steps", 1.5, "a whole number >= 1")):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{owner}: {word} must be {words}, got {value!r}$"):
            fedda.make(name, **{word: value})
    with pytest.raises(ValueError, match=f"^{name}: no parameter 'stepz'; did you mean 'steps'"):
        fedda.make(name, stepz=3)
    with pytest.raises(
        ValueError, match=rf"^{owner}: lr must be a number or a tensor \[replicas, 1, 1\], got shape \[3\]"
    ):
        fedda.make(name, lr=torch.tensor([0.1, 0.2, 0.3]))


@pytest.mark.parametrize("bad,line", [
    (lambda: fedda.make("fedav"), "unknown algorithm 'fedav'; did you mean 'fedavg'?"),
    (lambda: fedda.make("fedda-mvr", eps=0), "FedDA: eps must be > 0, got 0"),
    (lambda: fedda.make("fedda-mvr", beta=2), r"FedDA: beta must be in \[0, 1\], got 2"),
    (lambda: fedda.make("fedda-mvr", momentum=0.9), "fedda-mvr: no parameter 'momentum'"),
    (lambda: fedda.make("fedda-2-1", w=3), "fedda-2-1: no parameter 'w'"),
    (lambda: fedda.make("fedda-2-1", averaging="both"), "FedDA: averaging must be one of 'dual', 'primal', got 'both'"),
    (lambda: fedda.train(stable("fedavg"), quadratic(), rounds=0), "train: rounds must be a whole number >= 1, got 0"),
    (lambda: fedda.train(stable("fedavg"), quadratic(), rounds=2, cohort=6),
     "train: cohort must be a whole number from 1 to 5, got 6"),
    (lambda: fedda.train(stable("fedavg"), quadratic(), rounds=2, seed=-1), "train: seed must be a whole number >= 0"),
    (lambda: fedda.train(stable("fedavg"), quadratic(), rounds=2, seed=[]), "train: seed must be a whole number >= 0"),
    (lambda: fedda.train(stable("fedavg"), quadratic(), rounds=2, engine="vectorized"),
     "unknown engine 'vectorized'; did you mean 'vectorised'?"),
    (lambda: fedda.train(stable("fedavg"), quadratic(), rounds=2, weights="size"), "train: weights must be one of"),
    (lambda: fedda.train(stable("fedavg"), quadratic(), rounds=2, x0=torch.zeros(3)),
     "train: x0 must be a flat vector of 4 finite numbers, got shape \\[3\\]"),
    (lambda: fedda.train(stable("fedavg"), quadratic(), rounds=2, x0=[0.0, 1.0, float("nan"), 0.0]), "4 finite numbers"),
    (lambda: fedda.train(stable("fedavg"), quadratic(), rounds=2, seed=1.5), "train: seed must be a whole number >= 0"),
    (lambda: fedda.train(stable("fedavg"), quadratic(), rounds=2, seed=None), "train: seed must be a whole number >= 0"),
    (lambda: fedda.train(stable("fedavg"), quadratic(), rounds="3"), "train: rounds must be a whole number >= 1, got '3'"),
    (lambda: fedda.train(stable("fedavg"), quadratic(), rounds=2, engine=None), "engine must be a name or an engine object"),
    (lambda: fedda.train(stable("fedavg"), quadratic(), rounds=2, engine=Vectorised), "engine must be a name or an engine"),
    (lambda: fedda.train("fedavg", quadratic(), rounds=2), "train: the algorithm must be an object, as fedda.make gives"),
    (lambda: fedda.train(stable("fedavg"), quadratic(), rounds=2, cohorts=3), "no argument 'cohorts'; did you mean 'cohort'"),
    (lambda: fedda.train(stable("fedavg"), quadratic(), rounds=2, device="gpu"), "device 'gpu' cannot be used here"),
    (lambda: fedda.train(fedda.make("fedavg", lr=torch.full((3, 1, 1), 0.1)), quadratic(), rounds=2, seed=[0, 1]),
     "FedAvg: lr has 3 values but there are 2 seeds"),
    (lambda: fedda.train(fedda.make("fedda-2-1", prox=fedda.prox.L1(torch.ones(3))), quadratic(), rounds=2),
     "L1: gamma must have 4 entries, as the model, got 3"),
    (lambda: fedda.make("fedadam", bias_correction="yes"), "FedAdam: bias_correction must be one of True, False, 'keras', got 'yes'"),
    (lambda: fedda.make("fedda-11"), "unknown algorithm 'fedda-11'; did you mean 'fedda-1-1'?"),
])  # fmt: skip
def test_mistakes_are_refused(bad, line):
    with pytest.raises(ValueError, match=line):
        bad()


def test_import_needs_torch_and_numpy_alone():
    """In a process that can import nothing else but the standard library and what torch itself imports."""
    code = """
import sys, torch, numpy
known = set(sys.modules) | {"fedda"}
class Guard:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top in ("safetensors", "pydantic", "typer", "rich", "matplotlib", "jinja2", "sklearn", "pandas", "scipy"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Guard())
import fedda
problem = fedda.Quadratic(A=[[1.0]], b=[[2.0]])
print(fedda.train(fedda.make("fedavg"), problem, rounds=2).x.shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "torch.Size([1])\n", done.stderr


def test_a_path_or_precision_that_a_problem_has_not_is_refused():
    for engine in (Vectorised(path="chain"), Vectorised(precision="tf32")):
        with pytest.raises(ValueError, match="are for networks, a Quadratic has neither"):
            fedda.Run(fedda.make("fedavg"), quadratic(), engine=engine)
    with pytest.raises(
        ValueError, match="path 'kernels' does not fit this problem; these do: native, chain, traced, loop"
    ):
        fedda.Run(fedda.make("fedavg"), digits(), engine=Vectorised(path="kernels"))
    with pytest.raises(ValueError, match="path must be one of"):
        fedda.Run(fedda.make("fedavg"), digits(), engine=Vectorised(path="fast"))
