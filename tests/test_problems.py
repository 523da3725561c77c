"""Problems: flat vectors, batches, unequal clients, evaluation, and the modules that are refused or fall back."""

import copy
import json
import warnings
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedda
from conftest import close, digits, last, quadratic, stable
from fedda import registry, rng
from fedda.engines import Vectorised
from fedda.problems.evaluation import Evaluation
from fedda.problems.gradients import choose, tuning
from fedda.problems.neural import flatten

X = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
OWNER = torch.tensor([7] * 30 + [3] * 20 + [11] * 9 + [5])  # unequal, any numbers


def make(model=None, **more):
    return fedda.problem(model or nn.Linear(5, 3), F.cross_entropy, x=X, y=Y, client=OWNER, batch=4, **more)


def test_gradient_is_that_of_the_module_itself():
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    problem = make(model)
    reference = copy.deepcopy(model)
    F.cross_entropy(reference(X[:9]), Y[:9]).backward()
    expected = torch.cat([p.grad.flatten() for p in reference.parameters()])
    batch = type(problem.data)(X[:9], Y[:9])
    torch.testing.assert_close(problem.gradient(flatten(model), batch), expected)


def test_clients_are_sorted_and_keep_their_samples():
    problem = make()
    assert problem.sizes.tolist() == [20, 1, 30, 9]  # owners 3, 5, 7, 11
    torch.testing.assert_close(problem.everything(1).x, X[-1:])
    torch.testing.assert_close(problem.everything(2).x, X[:30])


def test_batches_are_a_client_s_own_with_replacement():
    problem = make()
    ids = torch.arange(4)
    seen = [set() for _ in ids]
    for draw in range(200):
        batch = problem.batch(ids, rng.fold(rng.fold(rng.key(0, rng.BATCH), ids), draw))
        assert batch.x.shape == (4, 4, 5)
        for k, rows in enumerate(batch.x):
            seen[k] |= {tuple(row.tolist()) for row in rows}
    for k in range(4):
        assert seen[k] == {tuple(row.tolist()) for row in problem.everything(k).x}


def test_evaluation_means_over_clients_then_samples():
    model = nn.Linear(5, 3)
    problem = make(model, test=(X[:7], Y[:7]))
    x = flatten(model)
    model.requires_grad_(False)
    losses = [float(F.cross_entropy(model(X[k == OWNER]), Y[k == OWNER])) for k in (3, 5, 7, 11)]
    hits = [float((model(X[k == OWNER]).argmax(1) == Y[k == OWNER]).double().mean()) for k in (3, 5, 7, 11)]
    uniform = problem.evaluate(x, torch.ones(4, dtype=torch.float64))
    assert float(uniform["train_loss"]) == pytest.approx(np.mean(losses), rel=1e-6)
    assert float(uniform["train_accuracy"]) == pytest.approx(np.mean(hits))
    assert float(uniform["test_loss"]) == pytest.approx(float(F.cross_entropy(model(X[:7]), Y[:7])), rel=1e-6)
    by_size = problem.evaluate(x, problem.sizes.double())
    assert float(by_size["train_loss"]) == pytest.approx(float(F.cross_entropy(model(X), Y)), rel=1e-6)
    both = problem.evaluate(torch.stack([x, 0 * x]), torch.ones(4, dtype=torch.float64))
    assert both["train_loss"].shape == (2,) and float(both["train_loss"][0]) == float(uniform["train_loss"])


def test_weights_by_samples():
    problem = make()
    g = [problem.gradient(problem.start(0), problem.everything(k)) for k in range(4)]

    class Full(type(stable("fedavg"))):
        @fedda.on_client
        def local(self, client, x, t):
            return (x - client.full_gradient(x),)

    for weights, p in (("uniform", [0.25] * 4), ("samples", [20 / 60, 1 / 60, 0.5, 9 / 60])):
        expected = problem.start(0) - sum(w * v for w, v in zip(p, g, strict=True))
        for engine in ("sequential", "vectorised"):
            got = last(Full(), problem, 1, weights=weights, engine=engine).x[0]
            torch.testing.assert_close(got, expected)


def test_regression_and_binary_targets():
    values = fedda.problem(nn.Linear(5, 1), F.mse_loss, x=X.numpy(), y=X[:, :1].numpy(), client=OWNER.numpy())
    row = fedda.train(stable("fedavg"), values, rounds=20).history
    assert row[-1]["train_loss"] < row[0]["train_loss"] and "train_accuracy" not in row[0]
    cancer = fedda.load("breast-cancer", clients=4, model="logistic")
    assert cancer.d == 31
    row = fedda.train(stable("fedavg"), cancer, rounds=20).history[-1]
    assert row["test_accuracy"] > 0.9


def test_a_model_starts_at_its_own_parameters_and_is_left_alone():
    model = nn.Linear(5, 3)
    before = flatten(model).clone()
    problem = make(model)
    assert torch.equal(problem.start(0), before) and torch.equal(problem.start(9), before)
    last(stable("fedavg"), problem, 2)
    assert torch.equal(flatten(model), before)


def test_a_loaded_model_starts_by_the_seed():
    problem = digits()
    state = torch.random.get_rng_state()
    a, b, c = problem.start(0), problem.start(0), problem.start(1)
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(torch.random.get_rng_state(), state)  # the user's generator is untouched


@pytest.mark.parametrize("shape,classes,filters,d", [
    ((3, 28, 28), 9, 32, 28_937), ((3, 32, 32), 10, 64, 115_146), ((1, 28, 28), 62, 64, 115_454),
])  # fmt: skip
def test_the_paper_s_network_has_the_stated_size(shape, classes, filters, d):
    model, _ = registry.models.find("cnn").build(shape=shape, classes=classes, filters=filters)
    assert sum(p.numel() for p in model.parameters()) == d
    assert model(torch.zeros(2, *shape)).shape == (2, classes)


def test_losses_are_those_of_torch():
    from fedda.problems.models import binary_cross_entropy, cross_entropy

    output = torch.randn(7, 3)
    torch.testing.assert_close(cross_entropy(output, Y[:7]), F.cross_entropy(output, Y[:7]))
    expected = F.binary_cross_entropy_with_logits(output[:, 0], (Y[:7] > 0).float())
    torch.testing.assert_close(binary_cross_entropy(output[:, 0], Y[:7] > 0), expected)


def test_cnn_agrees_between_engines_and_learns():
    problem = fedda.load("digits", clients=3, model="cnn", filters=4, batch=4, dtype=torch.float64)
    a, b = (last(stable("fedda-mvr"), problem, 2, engine=e).x for e in ("sequential", "vectorised"))
    close(a, b, 1e-12)


@pytest.mark.parametrize("model,options", [("logistic", {}), ("mlp", {"hidden": [8, 8]}), ("cnn", {"filters": 2})])
def test_our_models_are_chains_and_are_never_traced(model, options):
    problem = fedda.load("digits", clients=5, model=model, batch=4, **options)
    last(stable("fedda-mvr"), problem, 3, cohort=3, engine="vectorised")
    assert problem.chain is not None and not problem.gradient_paths.stacked.by_shape


@pytest.mark.parametrize("model,options", [("logistic", {}), ("mlp", {"hidden": [8, 8]}), ("cnn", {"filters": 2})])
def test_other_models_are_traced_once_for_each_shape(model, options):
    """Ours, taken for unknown ones."""
    problem = fedda.load("digits", clients=5, model=model, batch=4, **options)
    last(stable("fedda-mvr"), problem, 3, cohort=3, engine=Vectorised(path="traced"))
    traced = problem._paths_by_name["traced", "auto"].stacked.by_shape
    assert len(traced) == 2  # nu_0 at five clients, then two points at three
    assert all(isinstance(graph, torch.fx.GraphModule) for graph in traced.values())


class Branching(nn.Linear):
    """Its control flow looks at the data, which vmap cannot take."""

    def forward(self, x):
        return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)


def test_what_vmap_cannot_take_runs_in_a_loop_and_says_so_once(memory):
    problem = make(Branching(5, 3))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fast = last(stable("fedda-mvr"), problem, 3, cohort=3, engine="vectorised", weights="uniform")
    assert len(seen) == 1 and str(seen[0].message).startswith("vmap cannot take this model, its clients run one by one")
    truth = last(stable("fedda-mvr"), problem, 3, cohort=3, engine="sequential")
    torch.testing.assert_close(fast.x, truth.x)


def test_frozen_parameters_stay_as_they_are():
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    problem = make(model)
    assert problem.d == 15 and [name for name, _ in problem.layout] == ["2.weight", "2.bias"]
    for engine in ("sequential", "vectorised"):
        end = last(stable("fedda-mvr"), problem, 2, engine=engine).x[0]
        torch.testing.assert_close(problem.forward(end, X), model[1](model[0](X)) @ end[:12].view(3, 4).T + end[12:])


@pytest.mark.parametrize("loss", [
    nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 5.0])),
    lambda output, target: F.cross_entropy(output, target) * (2.0 if target.sum() > -1 else 1.0),
])  # fmt: skip
def test_losses_that_are_no_mean_of_samples_are_evaluated_client_by_client(loss):
    model = nn.Linear(5, 3).requires_grad_(True)
    problem = fedda.problem(model, loss, x=X, y=Y, client=OWNER, batch=4, test=(X[:7], Y[:7]))
    row = problem.evaluate(flatten(model), torch.ones(4, dtype=torch.float64))
    with torch.no_grad():
        expected = np.mean([float(loss(model(X[k == OWNER]), Y[k == OWNER])) for k in (3, 5, 7, 11)])
        assert float(row["train_loss"]) == pytest.approx(expected, rel=1e-5)
        assert float(row["test_loss"]) == pytest.approx(float(loss(model(X[:7]), Y[:7])), rel=1e-5)
    assert 0 <= float(row["train_accuracy"]) <= 1


def test_clients_may_have_names():
    names = np.array(["north", "east"])[(np.arange(60) % 3 > 0).astype(int)]
    assert fedda.problem(nn.Linear(5, 3), F.cross_entropy, x=X, y=Y, client=names).sizes.tolist() == [40, 20]


def test_running_buffers_are_refused_with_the_cure():
    model = nn.Sequential(nn.Linear(5, 4), nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True))
    model = nn.Sequential(*model, nn.Flatten(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"changes the buffer '2.running_mean'.*BatchNorm or GroupNorm"):
        make(model)
    assert make(copy.deepcopy(model).eval()).d == 39  # frozen statistics are constants
    fedda.problem(
        nn.Sequential(nn.Linear(5, 4), nn.GroupNorm(2, 4), nn.Linear(4, 3)),
        F.cross_entropy,
        x=X,
        y=Y,
        client=OWNER,
    )


def test_numbers_from_outside_of_pytorch_are_refused():
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x) + float(np.random.default_rng().normal())

    with pytest.raises(ValueError, match="two forward passes on the same input differ: the model draws random numbers"):
        make(Noisy(5, 3))


@pytest.mark.parametrize("bad,line", [
    (lambda: fedda.problem(nn.Linear(5, 3), F.cross_entropy, x=X, y=Y[:5]), "x and y must hold the same number of samples"),
    (lambda: fedda.problem(nn.Linear(5, 3), F.cross_entropy, x=X, y=Y, client=[0]), "client must be 60 whole numbers"),
    (lambda: fedda.problem(nn.Linear(5, 3), F.cross_entropy, x=X, y=Y, client=OWNER.double()),
     r"client must be 60 whole numbers or names, one per sample, got float64 \[60\]"),
    (lambda: fedda.problem(nn.Linear(4, 3), F.cross_entropy, x=X, y=Y), "the model and the loss cannot take this data"),
    (lambda: fedda.problem(nn.Linear(5, 2), F.cross_entropy, x=X, y=Y), "the model and the loss cannot take this data"),
    (lambda: fedda.problem(nn.Linear(5, 3), nn.CrossEntropyLoss, x=X, y=Y), "got the class CrossEntropyLoss"),
    (lambda: fedda.problem(nn.Linear(5, 3), nn.CrossEntropyLoss(reduction="none"), x=X, y=Y), r"one number.*shape \[60\]"),
    (lambda: fedda.problem(nn.Linear(5, 3), F.cross_entropy, x=X / 0, y=Y), "x and y must be finite numbers"),
    (lambda: fedda.problem(nn.Linear(5, 3), F.cross_entropy, x=X, y=Y, test=X), r"test must be a pair \(x, y\), got Tensor"),
    (lambda: fedda.load("digits", rho=0.8), "no option 'rho' with iid and mlp; it belongs to dominant_class"),
    (lambda: fedda.problem(nn.ReLU(), F.cross_entropy, x=X, y=Y), "the model has no parameter to train"),
    (lambda: fedda.problem(nn.Linear(5, 3), F.cross_entropy, x=X, y=Y, batch=0),
     "problem: batch must be a whole number >= 1, got 0"),
    (lambda: fedda.load("digit"), "unknown data set 'digit'; did you mean 'digits'?"),
    (lambda: fedda.load("digits", model="mpl"), "unknown model 'mpl'; did you mean 'mlp'?"),
    (lambda: fedda.load("digits", roh=0.8), "load: no option 'roh'"),
    (lambda: fedda.load("digits", hidden="wide"),
     "mlp: hidden must be a whole number >= 1, or a list of them, got 'wide'"),
    (lambda: fedda.load("digits", hidden=[8, 0]), "mlp: hidden must be a whole number >= 1, got 0"),
    (lambda: fedda.load("digits", model="cnn", filters=0), "cnn: filters must be a whole number >= 1, got 0"),
    (lambda: fedda.load("digits", partition="dominant_class", rho=1.8),
     r"dominant_class: rho must be in \[0, 1\], got 1.8"),
    (lambda: fedda.load("digits", clients=0), "load: clients must be a whole number >= 1, got 0"),
    (lambda: fedda.load("breast-cancer", model="cnn"), r"cnn: the data must be images"),
    (lambda: fedda.Quadratic([[1.0]], [[1.0, 2.0]]),
     r"Quadratic: A and b must be of one shape .* got \[1, 1\] and \[1, 2\]"),
    (lambda: fedda.Quadratic([[1.0]], [[1.0]], noise=-1), "Quadratic: noise must be >= 0, got -1"),
])  # fmt: skip
def test_bad_problems_are_refused(bad, line):
    with pytest.raises(ValueError, match=line):
        bad()


def test_quadratic_noise_and_minimum():
    problem = quadratic(clients=2, noise=0.5)
    ids = torch.arange(2)
    x = torch.ones(2, 4, dtype=torch.float64)
    draws = torch.stack([
        problem.gradients(x, problem.batch(ids, rng.fold(rng.fold(rng.key(0, rng.BATCH), ids), n))) for n in range(4000)
    ])  # fmt: skip
    noise = draws - problem.A * (x - problem.b)
    assert abs(noise.mean()) < 4 * 0.5 / 32_000**0.5 and abs(noise.std() - 0.5) < 0.01
    a, b = problem.gradients(torch.stack([x, 2 * x]), problem.batch(ids, rng.key(torch.tensor([0, 1]), rng.BATCH)))
    close(b - a, problem.A)  # the noise of one batch cancels
    g = (problem.A * (problem.minimum - problem.b)).sum(0)
    assert g.abs().max() < 1e-14


def test_memory_budget_makes_chunks():
    from fedda.engines import Vectorised

    problem = digits(dtype=torch.float32)
    per_client = problem.bytes_per_client()
    assert per_client > 16 * 4 * problem.d
    run = fedda.Run(stable("fedavg"), problem, engine=Vectorised(memory_gb=3.5 * per_client / 1e9))
    cohort = run.simulation.cohort(0, 10)
    assert run.simulation.engine.chunk_size(cohort) == 3
    assert Vectorised(memory_gb=1e-9).chunk_size(cohort) == 1  # at least one client, whatever the budget


# -- images as bytes, standardised where they are used -------------------------------------------------------------------
def images(n=60, clients=3, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, 3, 4, 4), dtype=torch.uint8, generator=g)
    y, owner = torch.arange(n) % 5, torch.arange(n) % clients
    mean, std = x.double().mean((0, 2, 3))[:, None, None], x.double().std((0, 2, 3))[:, None, None]
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 5)).to(dtype)
    return network, x, y, owner, mean, std


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_bytes_with_a_scale_are_the_standardised_numbers(engine):
    network, x, y, owner, mean, std = images()
    loss = torch.nn.functional.cross_entropy
    raw = fedda.problem(network, loss, x=x, y=y, client=owner, batch=4, test=(x[:10], y[:10]), scale=(mean, std))
    z = (x.double() - mean) / std
    ready = fedda.problem(network, loss, x=z, y=y, client=owner, batch=4, test=(z[:10], y[:10]))
    assert raw.data.x.dtype == raw.test.x.dtype == torch.uint8
    for name in ("fedavg", "fedda-mvr", "mime"):  # Mime takes full gradients
        a, b = (fedda.train(fedda.make(name, lr=0.01), p, rounds=3, seed=1, engine=engine) for p in (raw, ready))
        torch.testing.assert_close(a.x, b.x, rtol=1e-12, atol=1e-12)
        for key in ("train_loss", "test_loss", "test_accuracy"):
            assert a.history[-1][key] == pytest.approx(b.history[-1][key], rel=1e-12)
    half = raw.to(dtype=torch.float32)
    assert half.data.x.dtype == torch.uint8 and half.scale.mean.dtype == torch.float32


@pytest.mark.parametrize("scale", [(0.0, 0.0), (0.0, -1.0), (float("nan"), 1.0), 3.0, (1.0,)])
def test_bad_scales_are_refused(scale):
    network, x, y, owner, *_ = images()
    with pytest.raises(ValueError, match="problem: scale must be"):
        fedda.problem(network, torch.nn.functional.cross_entropy, x=x, y=y, client=owner, scale=scale)


def test_load_takes_a_file_all_its_clients_and_their_test_samples(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (40, 6, 6), dtype=np.uint8)
    owner = np.repeat(["a", "b", "c", "d"], 10)
    arrays = {"x": x, "y": np.arange(40) % 2, "client": owner, "x_test": x[::5], "y_test": np.arange(8) % 2}
    np.savez(tmp_path / "mine.npz", **arrays, client_test=owner[::5])
    everyone = fedda.load(str(tmp_path / "mine.npz"), partition="by_client", model="cnn", filters=2, layers=2)
    assert everyone.clients == 4 and len(everyone.test.y) == 8 and everyone.data.x.dtype == torch.uint8
    few = fedda.load(str(tmp_path / "mine.npz"), clients=2, partition="by_client", model="logistic")
    assert few.clients == 2 and len(few.test.y) == 4  # those of a and d
    assert fedda.load(str(tmp_path / "mine.npz"), model="logistic").clients == 10
    assert fedda.train(fedda.make("fedavg", lr=0.01), few, rounds=2).history[-1]["test_loss"] < 10


def test_a_test_part_of_other_classes_is_said_and_can_be_divided_anew(tmp_path):
    """As where a file is sorted by class within its owners, and the last of each are for testing."""
    x = np.random.default_rng(0).normal(size=(100, 3))
    y, client = np.tile(np.arange(10) // 5, 10), np.repeat(np.arange(10), 10)
    last = np.arange(100) % 10 >= 6
    parts = {"x": x[~last], "y": y[~last], "client": client[~last]}
    np.savez(tmp_path / "sorted.npz", **parts, x_test=x[last], y_test=y[last], client_test=client[last])
    how = {"partition": "by_client", "model": "logistic"}
    with pytest.warns(UserWarning, match="its test part has other classes than its training part"):
        fedda.load(str(tmp_path / "sorted.npz"), **how)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        anew = fedda.load(str(tmp_path / "sorted.npz"), resplit=True, **how)
    assert anew.clients == 10 and len(anew.test.y) == 10 and set(anew.sizes.tolist()) == {9}
    assert sorted(torch.cat([anew.data.x, anew.test.x]).tolist()) == sorted(torch.tensor(x).float().tolist())


@pytest.mark.parametrize("replicas", [1, 3])
def test_replicas_are_evaluated_as_one_by_one(replicas):
    problem = digits(model="mlp")
    x = torch.stack([problem.start(s) for s in range(replicas)])
    weights = torch.ones(problem.clients, dtype=torch.float64)
    together = problem.evaluate(x, weights)
    for i in range(replicas):
        for name, value in problem.evaluate(x[i], weights).items():
            torch.testing.assert_close(together[name][i], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", ["sorted", "mixed"])
@pytest.mark.parametrize("zero", [True, False])
def test_a_loss_with_class_weights_is_never_taken_for_a_mean_of_samples(order, zero):
    """Neither where the first samples are of one class, nor where the model starts constant."""
    y = (torch.arange(60) % 2).sort().values if order == "sorted" else torch.arange(60) % 2
    network = nn.Linear(5, 2)
    if zero:
        nn.init.zeros_(network.weight), nn.init.zeros_(network.bias)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 10.0]))
    problem = fedda.problem(network, loss, x=X, y=y, client=torch.zeros(60, dtype=torch.long), batch=4)
    x = torch.randn(problem.d, generator=torch.Generator().manual_seed(1))
    found = problem.evaluate(x, torch.ones(1, dtype=torch.float64))["train_loss"]
    assert float(found) == pytest.approx(float(problem.objective(x, X, y)), rel=1e-6)


def test_outputs_that_are_no_classes_have_no_accuracy():
    network = nn.Sequential(nn.Linear(5, 6), nn.Unflatten(1, (3, 2)))
    problem = fedda.problem(network, lambda out, y: (out[..., 0].sum(-1) - y).square().mean(), x=X, y=Y, batch=4)
    assert set(problem.evaluate(problem.start(0), torch.ones(1, dtype=torch.float64))) == {"train_loss"}


# -- which path is taken -------------------------------------------------------------------------------------------------
@pytest.fixture
def memory(tmp_path, monkeypatch):
    """Nothing measured yet, and a place of its own to remember in."""
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path))
    return tmp_path / "measured.json"


def clock(monkeypatch, *ticks):
    """Measured times as given, in the order in which ways are run."""
    ticks, order = iter(ticks), []

    def seconds(way, device):
        order.append(way())
        return next(ticks)

    monkeypatch.setattr(tuning, "seconds", seconds)
    return order


CPU = torch.device("cpu")
AB = {"a": lambda: "a", "b": lambda: "b"}


@pytest.mark.parametrize("times,best", [
    ([0, 0, 9, 1, 1, 1], "a"),  # a is disturbed once, and is as fast at its best
    ([0, 0, 2, 1, 2, 1], "b"),
    ([9, 9, 1, 1 / 1.05, 1, 1], "a"),  # too close for the later one
    ([9, 9, 1, 1 / 1.15, 1, 1], "b"),
])  # fmt: skip
def test_ways_are_warmed_up_then_measured_in_turn_by_their_least_time(monkeypatch, times, best):
    monkeypatch.setattr(tuning, "PASSES", 2)
    order = clock(monkeypatch, *times)
    assert tuning.measure(AB, CPU) == best
    assert order == ["a", "b"] * 3


def test_a_larger_margin_keeps_the_first(monkeypatch):
    clock(monkeypatch, *[1.25, 1] * (tuning.PASSES + 1))
    assert tuning.measure(AB, CPU, margin=1.3) == "a"


def test_a_slow_measurement_ends_after_two_passes(monkeypatch):
    monkeypatch.setattr(tuning, "PATIENCE", 0.0)
    order = clock(monkeypatch, *[1.0] * 6)
    assert tuning.measure(AB, CPU) == "a" and len(order) == 6


def test_a_way_that_fails_is_out_and_the_answer_is_remembered(memory):
    assert tuning.autotune({"bad": lambda: 1 / 0, "good": lambda: 0}, CPU, "it") == "good"
    assert list(json.loads(memory.read_text()).values()) == ["good"]
    assert tuning.autotune({"bad": lambda: 1 / 0, "good": pytest.fail}, CPU, "it") == "good"
    assert tuning.autotune({"bad": lambda: 1 / 0, "worse": lambda: 1 / 0}, CPU, "it") == "worse"


def test_after_a_failed_capture_a_way_runs_as_it_is(monkeypatch):
    """With stand-ins for a GPU: the end of the capture fails too, and leaves its stream and its memory pool in use."""
    cuda, streams, ended, calls = torch.cuda, ["main"], [], []

    @contextmanager
    def stream(name):
        before = streams[:]
        streams.append(name)
        try:
            yield
        finally:
            streams[:] = before

    @contextmanager
    def graph(graph, pool, stream):
        streams.append(stream)
        yield
        raise RuntimeError(f"capture of {pool}")

    names = {"current_device": 3, "graph_pool_handle": "pool", "Stream": "own", "CUDAGraph": None, "synchronize": None}
    for name, value in names.items():
        monkeypatch.setattr(cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(cuda, "current_stream", lambda device: streams[-1])
    monkeypatch.setattr(cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(cuda, "stream", stream)
    monkeypatch.setattr(cuda, "graph", graph)
    monkeypatch.setattr(tuning, "no_synchronisation", nullcontext)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *about: ended.append(about), raising=False)
    way = tuning.replayed(lambda: calls.append(streams[-1]), torch.device("cuda"))
    way()
    way()
    assert calls == ["main", "main", "own", "main", "main"] and ended == [(3, "pool")]


def convolution(**options):
    return fedda.load("digits", clients=5, model="cnn", filters=2, batch=4, **options)


@pytest.mark.parametrize("fastest", ["native", "chain"])
def test_on_a_cpu_a_chain_of_convolutions_is_measured_against_the_loop_alone(fastest, memory, monkeypatch):
    if fastest == "chain":
        monkeypatch.setattr("fedda.problems.gradients.chain.native.library", lambda *_: None)  # no C compiler
    problem = convolution()
    seen = []
    monkeypatch.setattr(choose, "autotune", lambda ways, device, *about: seen.append(list(ways)) or "loop")
    assert problem.with_path("auto", "auto", 3).gradient_paths.chosen == "loop" and seen == [["loop", fastest]]
    assert problem.with_path("traced", "auto", 3).gradient_paths.chosen == "traced"
    # Without convolutions nothing is open.
    assert digits().with_path("auto", "auto", 3).gradient_paths.chosen == fastest and len(seen) == 1
    problem.chain = None
    problem._rebuild_caches()
    problem.with_path("auto", "auto", 3)
    assert seen[1] == ["loop", "traced"]
    d = digits().d
    for clients, open_choice in ((5, False), (6, True)):  # linear layers: only larger stacks
        seen.clear()
        monkeypatch.setattr(choose, "SMALL", 5 * d)
        digits().with_path("auto", "auto", clients)
        assert seen == [["loop", fastest]] * open_choice


def test_where_kernels_fit_only_the_chain_is_measured_beside_them():
    own = convolution().gradient_paths
    own.paths = {name: own.by_loop for name in choose.PATHS if name != "native"}  # which is for CPUs
    assert list(own.candidates(3)) == ["kernels", "chain"]


def test_paths_are_measured_with_one_thread(memory, monkeypatch):
    seen = []
    monkeypatch.setattr(tuning, "measure", lambda *_: seen.append(torch.get_num_threads()) or "chain")
    with tuning.threads(2):
        convolution().with_path("auto", "auto", 3)
        assert torch.get_num_threads() == 2
    assert seen == [1]


def test_a_run_keeps_its_path_whatever_later_runs_choose(memory, monkeypatch):
    problem, answers = convolution(), iter(["chain", "loop"])
    monkeypatch.setattr(choose, "autotune", lambda *_: next(answers))
    first = fedda.Run(stable("fedavg"), problem, cohort=2)
    second = fedda.Run(stable("fedavg"), problem, cohort=3)
    assert (first.problem.gradient_paths.chosen, second.problem.gradient_paths.chosen) == ("chain", "loop")
    assert (
        first.problem.gradient_paths.stacked is second.problem.gradient_paths.stacked is problem.gradient_paths.stacked
    )


# -- files that are mapped into memory, and parts of a problem ---------------------------------------------------------
@pytest.fixture
def mapped(tmp_path):
    """The same samples twice: as a mapped file, of which some rows count, and as an array."""
    rows, owner = np.random.default_rng(0).permutation(60)[:50], np.arange(50) % 7
    images = np.random.default_rng(1).integers(0, 255, (60, 2, 4, 4), dtype=np.uint8)
    np.save(tmp_path / "x.npy", images)
    file, y = np.load(tmp_path / "x.npy", mmap_mode="r"), np.arange(50) % 3
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 3))
    how = {"y": y, "client": owner, "batch": 4, "scale": (np.full((2, 1, 1), 120.0), np.full((2, 1, 1), 60.0))}
    test = (images[:9], np.arange(9) % 3)
    problems = [
        fedda.problem(model, nn.functional.cross_entropy, x=x, rows=r, test=test, **how)
        for x, r in ((file, rows), (images[rows], None))
    ]
    return problems, file


def test_a_mapped_file_gives_the_same_run_and_stays_on_disk(mapped):
    (ours, theirs), file = mapped
    assert ours.rows is not None and ours.data.x.data_ptr() == file.ctypes.data  # no copy
    results = [fedda.train(fedda.make("fedavg", lr=0.1), p, rounds=5, cohort=3, every=1) for p in (ours, theirs)]
    assert torch.equal(results[0].x, results[1].x)
    strip = [[{k: v for k, v in row.items() if k != "seconds"} for row in result.history] for result in results]
    assert strip[0] == strip[1]
    assert torch.equal(ours.everything(3).x, theirs.everything(3).x)
    for engine in ("sequential", "vectorised"):
        double = [p.to(dtype=torch.float64) for p in (ours, theirs)]
        assert torch.equal(*(fedda.train(fedda.make("mime"), p, rounds=2, engine=engine).x for p in double))


@pytest.mark.parametrize("number", [0, 1])
def test_a_part_of_a_problem_holds_its_clients_alone(mapped, number):
    whole = mapped[0][number]
    parts = [whole.only(part) for part in (slice(0, 3), slice(3, 7))]
    assert [len(p.data.y) for p in parts] == [22, 28] and all(p.clients == 7 for p in parts)
    x, weights = whole.start(0) + 0.1, torch.arange(1.0, 8.0, dtype=torch.float64)
    for part, clients in zip(parts, (range(3), range(3, 7)), strict=True):
        for k in clients:
            ids, key = torch.tensor([k]), torch.tensor([77])
            assert all(torch.equal(a, b) for a, b in zip(part.batch(ids, key), whole.batch(ids, key), strict=True))
            assert torch.equal(part.everything(k).x, whole.everything(k).x)
        point, batch = part.example(5)
        assert len(point) == len(batch.y) == 5
    spans = [[slice(0, 3), slice(3, 7)], [slice(0, 4), slice(4, 9)]]
    found = [
        part.totals(x, weights, lambda n, i=i: spans[n == 9][i]) for i, part in enumerate(parts)
    ]  # as two ranks would look
    for name, value in whole.evaluate(x, weights).items():
        total, weight = (sum(f[name][i] for f in found) for i in range(2))
        assert float(total / weight) == pytest.approx(float(value), rel=1e-6)


def test_rows_are_refused_where_they_say_nothing(mapped):
    (ours, _), file = mapped
    how = {"y": np.zeros(2, dtype=int), "scale": (np.zeros((2, 1, 1)), np.ones((2, 1, 1)))}
    for x, rows, words in (
        (file, [0, 60], "rows must be"),
        (file, [0.5, 1], "rows must be"),
        (np.array(file), [0, 1], "mapped"),
    ):
        with pytest.raises(ValueError, match=words):
            fedda.problem(ours.model, nn.functional.cross_entropy, x=x, rows=rows, **how)


def test_rounded_outputs_do_not_make_a_loss_no_mean(monkeypatch):
    """In bfloat16 outputs are off by a hundredth, of a batch as of its samples: clients are still evaluated together."""
    problem = fedda.problem(
        nn.Linear(5, 3), nn.functional.cross_entropy, x=X, y=torch.arange(60) % 3, client=torch.arange(60) % 4
    )
    exact = Evaluation.outputs
    monkeypatch.setattr(Evaluation, "outputs", lambda *a: exact(*a).bfloat16().float() * 1.01)
    assert problem._evaluation.loss_is_mean


def test_a_loss_that_is_no_mean_is_shared_out_too():
    """Class weights: evaluated client by client, and on the test set by one process at once."""
    torch.manual_seed(0)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.0, 5.0, 0.2]))  # of the first class alone it is 0 / 0
    problem = fedda.problem(
        nn.Linear(5, 3),
        loss,
        x=X,
        y=torch.arange(60) % 3,
        client=torch.arange(60) % 4,
        test=(X[:8], torch.arange(8) % 3),
    )
    x, weights = problem.start(0), torch.ones(4, dtype=torch.float64)
    assert not problem._evaluation.loss_is_mean
    for cut in (2, 0, 4):  # the last two leave one process without clients
        found = [
            problem.totals(x, weights, lambda n, i=i, cut=cut: [slice(0, min(cut, n)), slice(min(cut, n), n)][i])
            for i in range(2)
        ]
        assert found[0].keys() == found[1].keys()
        for name, value in problem.evaluate(x, weights).items():
            total, weight = (sum(f[name][i] for f in found) for i in range(2))
            assert float(total / weight) == pytest.approx(float(value), rel=1e-6), (cut, name)
