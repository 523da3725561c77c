"""Recipes: how much clients work in a round, how they step, which of them take part, and rates that change."""

import math

import pytest
import torch
from torch import nn

import fedda
from fedda import registry, rng
from fedda.engines.participation import CounterDraws, Participation, read_trace

SIZES = [5, 9, 17, 30, 3, 11]
NAMES = [entry.name for entry in registry.algorithms if not entry.alias_of]
EVERYTHING = {"epochs": 1.5, "stragglers": 0.4, "weight_decay": 0.1, "max_grad_norm": 0.5}


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    owner = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    x = torch.randn(len(owner), 4, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Dropout(0.2), nn.Linear(3, 2)).double()
    return fedda.problem(
        model, nn.functional.cross_entropy, x=x, y=(x.sum(1) > 0).long(), client=owner, batch=4,
        augment=fedda.augment.noise(0.1),
    )  # fmt: skip


def made(name, **params):
    work = {"work": "equal"} if name == "fednova" else {}
    return fedda.make(name, **registry.algorithms.find(name).example | work | params)


@pytest.mark.parametrize("name", NAMES)
def test_engines_agree_and_runs_resume(name, problem):
    away = [(k, k % 2, 9) for k in range(len(SIZES))]  # three clients come after the first round
    options = {"cohort": 4, "drop": 0.2, "sampling": "samples", "availability": away, "force": True}
    ends = {}
    for label, params in {"epochs": EVERYTHING, "proportional": {"steps": "proportional"}}.items():
        algorithm = made(name, **params)
        one = fedda.train(algorithm, problem, rounds=2, seed=1, engine="sequential", **options)
        both = fedda.train(algorithm, problem, rounds=2, seed=[0, 1], engine="vectorised", **options)
        assert torch.allclose(one.x, both.x[1], rtol=0, atol=1e-12)
        alone, together = one.history[-1], both.history[-1]
        assert [alone[k] for k in ("gradients", "dropped")] == [together[k] for k in ("gradients", "dropped")]
        half = fedda.train(algorithm, problem, rounds=1, seed=1, **options)
        resumed = fedda.train(algorithm, problem, rounds=2, seed=1, state=half.state, **options)
        whole = fedda.train(algorithm, problem, rounds=2, seed=1, **options)
        assert torch.equal(resumed.x, whole.x)
        ends[label] = one.x
    assert not torch.equal(ends["epochs"], ends["proportional"])


def test_an_epoch_uses_every_sample_once(problem):
    for client, size in enumerate(SIZES):
        ids, key = torch.tensor([client]), rng.key(torch.tensor([7]), rng.BATCH)
        draws = torch.arange(size)  # four epochs: batches of 4
        ys = [batch.x[0, :, 0] for batch in problem_without_noise(problem).shuffled(ids, key, draws)]
        seen = torch.cat(ys).view(4, size)
        own = problem.data.x[problem.offsets[client] :][:size, 0]
        for one in seen:
            assert torch.equal(one.sort().values, own.sort().values)
        if size > 5:
            assert not torch.equal(seen[0], seen[1])


def problem_without_noise(problem):
    import copy

    plain = copy.copy(problem)
    plain.augment = None
    return plain


def test_the_work_of_a_client():
    sizes = torch.tensor([3, 8, 16, 40])
    key = rng.key(torch.arange(4), rng.BATCH)
    assert made("fedavg", epochs=2).steps_of_clients(5, sizes, 8, key).flatten().tolist() == [1, 2, 4, 10]
    assert made("fedavg", epochs=0.5).steps_of_clients(5, sizes, 8, key).flatten().tolist() == [1, 1, 1, 3]
    proportional = made("fedavg", steps="proportional")
    assert proportional.steps_of_clients(5, sizes, 8, key).flatten().tolist() == [1, 1, 2, 5]
    assert made("fedavg").steps_of_clients(5, sizes, 8, key) is None
    many = torch.full((4000,), 8)
    late = made("fedavg", stragglers=0.5).steps_of_clients(5, many, 8, rng.key(torch.arange(4000), 0)).flatten()
    counts = torch.bincount(late, minlength=6)[1:] / 4000  # half of them take 5; the others 1 to 5
    assert torch.allclose(counts, torch.tensor([0.1, 0.1, 0.1, 0.1, 0.6]), atol=0.03)


def test_the_server_counts_with_the_mean(problem):
    result = fedda.train(made("fedavg", epochs=1), problem, rounds=2)
    assert result.run.algorithm.steps == round(sum(math.ceil(n / 4) for n in SIZES) / 6)
    assert result.history[-1]["gradients"] == 2 * sum(math.ceil(n / 4) for n in SIZES)


def test_local_steps_by_hand():
    """Two clients on noiseless quadratics, with one and four samples: after one epoch, 1 and 4 steps."""
    problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]], sizes=[1, 4])
    result = fedda.train(fedda.make("fedavg", lr=0.5, epochs=1), problem, rounds=1, x0=torch.tensor([4.0]))
    assert result.x.item() == pytest.approx((2.0 + (2 + 2 * 0.5**4)) / 2)


def test_an_algorithm_that_counts_its_own_steps_is_refused():
    from fedda.algorithms.fedavg import FedAvg
    from fedda.core import on_client

    class Own(FedAvg):
        @on_client(model_replies=(0,))
        def local(self, client, x, t):
            for _ in range(self.steps):
                x = x - 0.1 * client.gradients(x)[0]
            return (x,)

    problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    fedda.train(Own(), problem, rounds=1)
    with pytest.raises(ValueError, match=r"Own: epochs, .* need a task that takes its steps by `for i, move in"):
        fedda.train(Own(stragglers=0.5), problem, rounds=1)
    with pytest.raises(ValueError, match=r"Own: weight_decay has no effect: its task must step from self.decayed"):
        fedda.train(Own(weight_decay=0.5), problem, rounds=1)


# -- weight decay and clipping --------------------------------------------------------------------------------------
def test_weight_decay_by_hand():
    problem = fedda.Quadratic(A=[[1.0]], b=[[0.0]])
    x0 = torch.tensor([2.0])
    result = fedda.train(fedda.make("fedavg", lr=0.1, steps=2, weight_decay=0.5), problem, rounds=1, x0=x0)
    assert result.x.item() == pytest.approx(2 * (1 - 0.05 - 0.1) ** 2)
    # FedDA: one step, H = eps: x = (x0 + z / H) / (1 + eta decay), whatever H is
    for eps in (1.0, 4.0):
        algorithm = fedda.make("fedda-2-1", lr=0.1, steps=1, eps=eps, weight_decay=0.5, momentum=0.0, beta=1.0)
        result = fedda.train(algorithm, problem, rounds=1, x0=x0)
        assert result.x.item() == pytest.approx((2 - 0.1 * 2 / eps) / (1 + 0.05))


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("local-adapt", {"server": "sgd", "server_lr": 1.0}),
        ("local-adapt", {"client": "adagrad", "client_v0": 0.1, "server": "sgd", "server_lr": 1.0}),
        ("local-amsgrad", {"v0": 0.5}),
        ("local-amsgrad", {"v0": 0.5, "state": "averaged"}),
        ("fafed", {"v0": 0.5}),
        ("mime", {"base": "adam"}),
        ("mimelite", {"base": "adam"}),
    ],
)
def test_the_decay_of_adaptive_clients_is_outside_their_metric(name, params):
    """Without gradients each of 2 x 3 steps multiplies the model by 1 - eta decay, whatever v is."""
    problem = fedda.Quadratic(A=[[0.0, 0.0]] * 3, b=[[0.0, 0.0]] * 3)
    x0 = torch.tensor([2.0, -3.0], dtype=torch.float64)
    algorithm = fedda.make(name, lr=0.1, steps=3, weight_decay=0.5, **params)
    assert torch.allclose(fedda.train(algorithm, problem, rounds=2, x0=x0).x, x0 * (1 - 0.05) ** 6, rtol=1e-12)


def test_adaptive_clients_with_decay_are_torch_s_adamw():
    problem = fedda.Quadratic(A=[[1.0, 3.0]], b=[[1.0, -2.0]])
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    other = torch.optim.AdamW([x], lr=0.1, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.2)
    for _ in range(4):
        other.zero_grad()
        (torch.tensor([1.0, 3.0]) * (x - torch.tensor([1.0, -2.0])) ** 2 / 2).sum().backward()
        other.step()
    params = {"client": "adam", "server": "sgd", "server_lr": 1.0, "eps": 1e-3, "weight_decay": 0.2}
    ours = fedda.train(fedda.make("local-adapt", lr=0.1, steps=4, **params), problem, rounds=1).x
    assert torch.allclose(ours, x.detach(), rtol=1e-12)


def test_weight_decay_goes_with_constraints_that_are_vectors():
    problem = fedda.Quadratic(A=[[1.0, 1.0]], b=[[3.0, 3.0]])
    box = fedda.prox.Box(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, 2.0]))
    algorithm = fedda.make("fedda-2-1", lr=0.1, eps=0.5, weight_decay=0.1, prox=box)
    result = fedda.train(algorithm, problem, rounds=40, seed=[0, 1])
    assert torch.allclose(result.x[0], torch.tensor([0.5, 2.0], dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_shrinks_the_model_of_every_algorithm(name):
    """With gradients that are zero everywhere nothing else moves the model."""
    problem = fedda.Quadratic(A=[[0.0, 0.0]] * 3, b=[[0.0, 0.0]] * 3)
    x0 = torch.tensor([2.0, -3.0])
    entry = registry.algorithms.find(name)
    params = {"gamma": 0.0} if name == "fedavg-subgradient" else {"prox": None} if "prox" in entry.defaults else {}
    ends = [
        fedda.train(made(name, weight_decay=decay, **params), problem, rounds=3, x0=x0, force=True).x
        for decay in (0.0, 0.3)
    ]
    assert torch.allclose(ends[0], x0.double(), atol=1e-4)  # a first moment may start above zero
    assert bool((ends[1].abs() < ends[0].abs()).all())


def test_clipping_by_hand(problem):
    quadratic = fedda.Quadratic(A=[[1.0, 1.0]], b=[[0.0, 0.0]])
    result = fedda.train(
        fedda.make("fedavg", lr=1.0, steps=1, max_grad_norm=1.0), quadratic, rounds=1, x0=torch.tensor([3.0, 4.0])
    )
    assert result.x.tolist() == pytest.approx([3 - 0.6, 4 - 0.8])
    # both gradients of a variance-reduced step are scaled by one factor, so that equal points still cancel
    run = fedda.Run(fedda.make("stem", max_grad_norm=0.01), problem, engine="sequential")
    cohort = run.simulation.cohort(0, 6)

    @fedda.on_client
    def task(client, x):
        a, b = client.gradients(x, x)
        (full,) = (client.full_gradient(x),)
        return a, b, full

    (a, b, full), _ = cohort.replies(task, run.server.x)
    assert torch.equal(a, b) and torch.allclose(a.norm(dim=-1), torch.full((6,), 0.01, dtype=torch.float64))
    assert bool((full.norm(dim=-1) <= 0.01 + 1e-15).all())


# -- who takes part --------------------------------------------------------------------------------------------------
def test_a_share_of_the_clients(problem):
    assert fedda.Run(made("fedavg"), problem, cohort=0.5).cohort == 3
    assert fedda.Run(made("fedavg"), problem, cohort=0.01).cohort == 1
    assert fedda.Run(made("fedavg"), problem, cohort=1).cohort == 1
    assert fedda.Run(made("fedavg"), problem, cohort=1.0).cohort == 6
    with pytest.raises(
        ValueError, match=r"cohort must be a whole number or a share of the clients, up to 1.0, got 2.5"
    ):
        fedda.Run(made("fedavg"), problem, cohort=2.5)


def test_sampling_by_samples():
    sizes = torch.tensor([1.0, 2.0, 5.0])
    draws = CounterDraws(torch.arange(2000)[:, None], Participation("samples"), sizes)
    ids, _ = draws.cohort(3, 3, 1)
    shares = torch.bincount(ids.flatten(), minlength=3) / 2000
    assert torch.allclose(shares, torch.tensor([1, 2, 5]) / 8, atol=0.03)
    two, _ = draws.cohort(4, 3, 2)
    assert bool((two[:, 0] < two[:, 1]).all())


def test_sampling_by_samples_evaluates_the_weighted_objective():
    problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]], sizes=[1, 3])
    losses = [
        fedda.train(made("fedavg"), problem, rounds=1, **options).history[0]["train_loss"]
        for options in ({"sampling": "samples"}, {"weights": "samples"}, {})
    ]
    assert losses == pytest.approx([1.5, 1.5, 1.0])
    with pytest.raises(ValueError, match=r"would count twice: sampling or weights must be 'uniform'"):
        fedda.train(made("fedavg"), problem, rounds=1, sampling="samples", weights="samples")


def test_lost_replies():
    problem = fedda.Quadratic(A=[[1.0]] * 50, b=[[float(k)] for k in range(50)])
    result = fedda.train(made("fedavg"), problem, rounds=20, drop=0.3)
    assert result.history[-1]["dropped"] == pytest.approx(300, abs=60)
    alone = fedda.Quadratic(A=[[1.0]], b=[[1.0]])
    few = fedda.train(made("fedavg", lr=0.1, steps=1), alone, rounds=40, drop=0.9)  # most rounds change nothing
    done = 40 - few.history[-1]["dropped"]
    assert 0 < done < 20 and few.x.item() == pytest.approx(1 - 0.9**done)


def test_availability(tmp_path):
    """Client 0 is there in rounds 0 and 1, client 1 from round 1; nobody is there in round 3 of 4."""
    rows = [(0, 0, 2), (1, 1, 3)]
    file = tmp_path / "trace.csv"
    file.write_text("client,on,off\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    for engine in ("sequential", "vectorised"):
        for source in (rows, str(file)):
            states = list(
                fedda.rounds(
                    fedda.make("fedavg", lr=0.5, steps=1), problem, rounds=4, x0=torch.tensor([4.0]), engine=engine,
                    availability=source,
                )
            )  # fmt: skip
            assert [s.x.item() for s in states] == [2.0, (1.0 + 2.0) / 2, 1.75, 1.75]
    run = fedda.train(fedda.make("fedavg", lr=0.5, steps=1), problem, rounds=4, availability=rows)
    assert run.history[-1]["gradients"] == 4 and run.history[-1]["dropped"] == 0
    one = fedda.Run(fedda.make("fedavg"), problem, cohort=1, availability=rows)
    assert [one.simulation.cohort(tau, 1).ids.item() for tau in (0, 2)] == [0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n", r"the columns must be client, on, off, got \['a', 'b'\]"),
        (
            "client,on,off\n0,1,x\n",
            r"row 1 must be \(client, on, off\), a client and two whole numbers, got \('0', '1', 'x'\)",
        ),
        ("client,on,off\n0,0,5\n2,0,5\n", r"row 2: there is no client '2'; known: 0, 1"),
        ("client,on,off\n0,5,5\n", r"row 1 must have 0 <= on < off"),
        ("client,on,off\n0,0,5\n", r"every client needs a row; client 1 has none \(1 of 2\)"),
    ],
)
def test_a_bad_trace_is_refused(text, message, tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(file, [0, 1])
    with pytest.raises(ValueError, match=r"missing.csv: cannot be read: No such file"):
        read_trace(tmp_path / "missing.csv", [0, 1])


def test_privacy_needs_uniform_cohorts(problem):
    from fedda.aggregation import Clip, Noise

    with pytest.raises(ValueError, match=r"privacy is accounted for cohorts drawn uniformly"):
        fedda.Run(made("fedavg"), problem, cohort=3, sampling="samples", aggregation=[Clip(1.0), Noise(1.0, norm=1.0)])


def test_sizes_that_differ_much_are_said_once():
    problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]], sizes=[1, 10])
    with pytest.warns(
        UserWarning, match=r"clients have 1 to 10 samples and the same weight: weights='samples'"
    ) as seen:
        fedda.train(made("fedavg"), problem, rounds=3)
    assert len(seen) == 1
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedda.train(made("fedavg"), problem, rounds=1, weights="uniform")


# -- rates -------------------------------------------------------------------------------------------------------------
def test_rates_from_tables():
    problem = fedda.Quadratic(A=[[1.0]], b=[[0.0]])
    table = {"kind": "linear", "start": 0.5}
    x0 = torch.tensor([1.0])
    both = [
        fedda.train(fedda.make("fedavg", lr=lr, steps=1), problem, rounds=2, x0=x0).x.item()
        for lr in (table, fedda.schedules.linear(0.5))
    ]
    assert both == [pytest.approx(0.5 * 0.75)] * 2
    server = fedda.make("fedavg", lr=1.0, steps=1, server_lr=table)
    assert fedda.train(server, problem, rounds=2, x0=x0).x.item() == pytest.approx(0.5 * 0.75)
    with pytest.raises(ValueError, match=r"unknown schedule 'cos'; did you mean 'cosine'\?"):
        fedda.make("fedavg", lr={"kind": "cos", "start": 0.1})
    with pytest.raises(ValueError, match=r"lr: a table needs a kind, such as"):
        fedda.make("fedavg", lr={"start": 0.1})
    with pytest.raises(ValueError, match=r"cosine: start is missing"):
        fedda.make("fedda-mvr", lr={"kind": "cosine"})


@pytest.mark.parametrize("name", [n for n in NAMES if "server_lr" in registry.algorithms.find(n).defaults])
def test_the_server_s_rate_may_change(name):
    problem = fedda.Quadratic(A=[[1.0], [0.5]], b=[[0.0], [2.0]])
    number = made(name).server_lr
    same = made(name, server_lr=lambda t: number + 0 * t)
    falling = made(name, server_lr={"kind": "linear", "start": number, "end": 0.5 * number})
    usual, constant, other = (fedda.train(a, problem, rounds=3, force=True).x for a in (made(name), same, falling))
    assert torch.allclose(usual, constant, rtol=0, atol=1e-14) and not torch.allclose(usual, other, atol=1e-6)


# -- files ---------------------------------------------------------------------------------------------------------------
TOML = """
name = "recipe"
rounds = 4
cohort = 0.5
drop = 0.2
availability = "{trace}"

[problem]
data = "digits"
clients = 4
partition = "dirichlet"
alpha = 0.5
model = "mlp"
hidden = 4

[algorithms.fedavg]
lr = {{kind = "cosine", start = 0.1, warmup = 0.1}}
epochs = 0.5
weight_decay = 0.01

[algorithms.scaffold]
steps = "proportional"
stragglers = 0.5
server_lr = {{kind = "steps", start = 1.0, at = [0.5]}}
"""


def test_recipes_in_a_file(tmp_path):
    from commands import fedda as run

    trace = tmp_path / "trace.csv"
    trace.write_text("client,on,off\n" + "".join(f"{k},{k % 2},9\n" for k in range(4)))
    file = tmp_path / "recipe.toml"
    file.write_text(TOML.format(trace="trace.csv"))  # relative to the file
    whole, again = tmp_path / "whole", tmp_path / "again"
    first = run("run", file, "--out", whole)
    assert first.returncode == 0, first.stderr
    repeated = run("run", whole / "config.toml", "--out", again)
    assert repeated.returncode == 0, repeated.stderr
    assert (whole / "metrics.jsonl").read_bytes() == (again / "metrics.jsonl").read_bytes()
    longer = run("run", file, "--out", whole, "--resume", "--rounds", "6")
    assert longer.returncode == 2 and "the rate of fedavg depends on the number of rounds, 4" in longer.stderr

    import json

    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    result = fedda.train(
        fedda.make("fedavg", lr=fedda.schedules.cosine(0.1, warmup=0.1), epochs=0.5, weight_decay=0.01),
        fedda.load("digits", clients=4, partition="dirichlet", alpha=0.5, model="mlp", hidden=4),
        rounds=4, cohort=0.5, drop=0.2, availability=str(trace), weights="uniform",
    )  # fmt: skip
    last = next(row for row in reversed(rows) if row["algorithm"] == "fedavg")
    assert last["train_loss"] == pytest.approx(result.history[-1]["train_loss"], rel=1e-5)
    assert last["gradients"] == result.history[-1]["gradients"]


def test_a_sweep_over_what_every_algorithm_takes(tmp_path):
    """Numbers run as replicas of one program; epochs, which decide the number of steps, do not."""
    from fedda.experiments import config
    from fedda.experiments.grid import points
    from fedda.experiments.sweep import stack_points

    file = tmp_path / "recipe.toml"
    file.write_text(TOML.format(trace="trace.csv").replace("availability", "# availability"))
    experiment = config.read(file)
    chosen = points(experiment, ["*.weight_decay=0.0,0.1", "*.epochs=0.5,1.0"], None)
    assert {label: len(tried) for label, tried in chosen.items()} == {"fedavg": 4, "scaffold": 4}
    assert [[point["weight_decay"] for point in stack.points] for stack in stack_points(chosen)] == [[0.0, 0.1]] * 4
