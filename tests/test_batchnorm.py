"""BatchNorm: batch statistics in training, estimated ones in evaluation, the same in every engine."""

import copy
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import fedda
from conftest import close, stable
from fedda import rng
from fedda.problems import batchnorm
from fedda.problems.gradients.chain import Chain
from fedda.problems.neural import flatten, unflatten

SAMPLES = 90
GENERATOR = torch.Generator().manual_seed(3)
X = 2 + 3 * torch.randn(SAMPLES, 1, 6, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.arange(SAMPLES) % 3
OWNER = torch.tensor([0] * 40 + [1] * 30 + [2] * 15 + [3] * 4 + [4])  # the last has one sample
TEST = (X[:11], Y[:11])
S = nn.Sequential


class Twice(nn.Module):
    """One BatchNorm in two places, called by its keyword in one of them; another one nowhere."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(36, 5), nn.Linear(5, 3)
        self.norm, self.unused = nn.BatchNorm1d(5), nn.BatchNorm1d(7)

    def forward(self, x):
        h = self.norm(self.first(x.flatten(1)))
        return self.last(self.norm(input=h.relu()))


class Looks(nn.Module):
    """Looks at a number, which vmap cannot take."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(36, 4), nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        h = self.norm(self.linear(x.flatten(1)))
        return self.last(h if float(h.detach().abs().sum()) > -1 else -h)


MODELS = {
    "BatchNorm1d": lambda: S(nn.Flatten(), nn.Linear(36, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Linear(5, 3)),
    "sequences": lambda: S(nn.Flatten(2), nn.BatchNorm1d(1), nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(68, 3)),
    "BatchNorm2d": lambda: S(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)),
    "BatchNorm3d": lambda: S(nn.Unflatten(1, (1, 1)), nn.Conv3d(1, 2, (1, 3, 3)), nn.BatchNorm3d(2), nn.Flatten(), nn.Linear(32, 3)),
    "without affine": lambda: S(nn.Flatten(), nn.Linear(36, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3)),
    "twice": Twice,
    "two": lambda: S(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3, eps=0.1), nn.Flatten(), nn.Linear(12, 3)),
    "not under vmap": Looks,
}  # fmt: skip


def model(name="BatchNorm2d"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]().double()


def make(module=None, **more):
    more = {"x": X, "y": Y, "client": OWNER, "batch": 6, "test": TEST} | more
    return fedda.problem(module or model(), F.cross_entropy, **more)


def away(problem, n=1):
    """Points away from the start, [n, d]."""
    noise = torch.randn(n, problem.d, generator=torch.Generator().manual_seed(7), dtype=problem.dtype)
    return problem.point() + 0.3 * noise


def plainly(problem, module, x, weights):
    """The buffers by a second program: the module as it was given, one client and one batch after the other."""
    wanted = min(batchnorm.SAMPLES, int(problem.sizes.sum()))
    draws = -(-wanted // (problem.clients * problem.batch_size))
    moments = {}
    for k, draw in itertools.product(range(problem.clients), range(draws)):
        key = rng.fold(rng.fold(rng.key(0, rng.STATISTICS), k), draw)
        batch = problem.batch(torch.tensor([k]), key[None])
        one = copy.deepcopy(module)
        inputs = {}

        def keep(layer, args, kwargs, name, inputs=inputs):
            inputs.setdefault(name, []).append((*args, *kwargs.values())[0])

        for name, layer in one.named_modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.register_forward_pre_hook(partial(keep, name=name), with_kwargs=True)
        functional_call(one, unflatten(one, x), (problem.standardised(batch).x[0].clone(),), tie_weights=False)
        for name, seen in inputs.items():
            columns = torch.cat([v.movedim(1, 0).flatten(1) for v in seen], dim=1)
            share = weights[k] / weights.sum() / draws
            mean, square = moments.get(name, (0, 0))
            moments[name] = mean + share * columns.mean(1), square + share * (columns**2).mean(1)
    return {
        f"{name}.running_{word}": value
        for name, (mean, square) in moments.items()
        for word, value in (("mean", mean), ("var", square - mean**2))
    }


WEIGHTS = torch.tensor([40, 30, 15, 4, 1], dtype=torch.float64)


@pytest.mark.parametrize("name", MODELS)
def test_statistics_are_those_of_a_plain_loop(name):
    module = model(name)
    problem = make(module)
    x = away(problem)[0]
    with torch.no_grad():
        for weights in (torch.ones(5, dtype=torch.float64), WEIGHTS):
            expected = plainly(problem, module, x, weights)
            found = problem.statistics(x, weights)
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=1e-11, atol=1e-12)
    assert set(found) - set(expected) <= {"unused.running_mean", "unused.running_var"}
    state = module.state_dict()
    assert all(state[key].shape == value.shape for key, value in found.items())
    equal = problem.statistics(x)
    assert all(torch.equal(equal[k], v) for k, v in problem.statistics(x, torch.ones(5).double()).items())


@pytest.mark.parametrize("name", MODELS)
def test_metrics_are_those_of_the_module_in_eval_mode_with_them(name):
    module = model(name)
    problem = make(module)
    x = away(problem)[0]
    row = problem.evaluate(x, WEIGHTS)
    ready = copy.deepcopy(module).eval()
    ready.load_state_dict(unflatten(ready, x) | problem.statistics(x, WEIGHTS), strict=False)
    with torch.no_grad():
        losses = [float(F.cross_entropy(ready(X[k == OWNER]), Y[k == OWNER])) for k in range(5)]
        assert float(row["train_loss"]) == pytest.approx(np.average(losses, weights=WEIGHTS), rel=1e-11)
        assert float(row["test_loss"]) == pytest.approx(float(F.cross_entropy(ready(TEST[0]), TEST[1])), rel=1e-11)
        hits = (ready(TEST[0]).argmax(1) == TEST[1]).double().mean()
    assert float(row["test_accuracy"]) == pytest.approx(float(hits))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:vmap cannot take")
def test_engines_agree_and_nothing_is_left_in_the_module(name):
    module = model(name)
    before = copy.deepcopy(module.state_dict())
    problem = make(module)
    for algorithm in ("fedda-mvr", "scaffold", "mime"):
        results = [
            fedda.train(stable(algorithm), problem, rounds=3, cohort=3, engine=engine)
            for engine in ("sequential", "vectorised")
        ]
        close(results[0].x, results[1].x, 1e-12)
        for a, b in zip(*(result.history for result in results), strict=True):
            assert all(a[k] == pytest.approx(b[k], rel=1e-12) for k in ("train_loss", "test_loss", "test_accuracy"))
    for state in (module.state_dict(), problem.model.state_dict()):
        assert all(torch.equal(before[key], value) for key, value in state.items())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:vmap cannot take")
def test_replicas_are_evaluated_as_each_alone(name):
    problem = make(model(name))
    x, weights = away(problem, 3), torch.ones(5, dtype=torch.float64)
    together, statistics = problem.evaluate(x, weights), problem.statistics(x)
    for i in range(3):
        for key, value in problem.evaluate(x[i], weights).items():
            assert float(together[key][i]) == pytest.approx(float(value), rel=1e-12)
        for key, value in problem.statistics(x[i]).items():
            torch.testing.assert_close(statistics[key][i], value, rtol=1e-12, atol=1e-13)
    seeds = fedda.train(stable("fedavg"), problem, rounds=2, cohort=3, seed=[0, 5])
    alone = fedda.train(stable("fedavg"), problem, rounds=2, cohort=3, seed=5)
    close(seeds.x[1], alone.x, 1e-12)
    assert seeds.history[-1]["test_loss"] == pytest.approx(alone.history[-1]["test_loss"], rel=1e-12)


def test_a_gradient_is_that_of_the_module_in_training():
    module = model("two")
    problem = make(module)
    F.cross_entropy(module(X[:9]), Y[:9]).backward()
    expected = torch.cat([p.grad.flatten() for p in module.parameters()])
    torch.testing.assert_close(problem.gradient(problem.point(), type(problem.data)(X[:9], Y[:9])), expected)


def test_chunks_change_nothing(monkeypatch):
    problem = make(model("two"))
    x = away(problem, 2)
    before = problem.statistics(x)
    monkeypatch.setattr(batchnorm, "AT_ONCE", 13)
    for key, value in problem.statistics(x).items():
        torch.testing.assert_close(value, before[key], rtol=1e-13, atol=1e-13)


def test_few_samples_are_enough(monkeypatch):
    """Many samples are not all looked at, and each client has its weight all the same."""
    monkeypatch.setattr(batchnorm, "SAMPLES", 30)
    problem = make(model("BatchNorm1d"))
    seen = []
    forward = type(problem).forward
    monkeypatch.setattr(type(problem), "forward", lambda self, x, v: seen.append(v.shape[0]) or forward(self, x, v))
    problem._evaluation.__dict__["stacks_batches"] = False  # one batch after the other, so that they are seen
    problem.statistics(problem.point())
    assert seen == [6] * 5


@pytest.mark.parametrize("cut", [0, 2, 5])
def test_several_processes_agree_on_the_statistics(cut):
    """Each looks at its clients, and the sums are exchanged before anything is evaluated."""
    whole = make(model("two"))
    x, weights = away(whole, 2), WEIGHTS
    parts = [slice(0, cut), slice(cut, 5)]
    sums = []
    for part in parts:  # as two ranks would: what each of them adds
        with pytest.raises(StopIteration):
            whole.totals(x, weights, lambda n, part=part: part, lambda v: sums.append(v[0].clone()) or next(iter(())))
    held = [whole.only(part) if 0 < cut < 5 else whole for part in parts]
    spans = [[parts[i], [slice(0, 4), slice(4, 11)][i]] for i in range(2)]
    found = [
        problem.totals(x, weights, lambda n, i=i: spans[i][n == 11], lambda v: [sums[0] + sums[1]])
        for i, problem in enumerate(held)
    ]
    for name, value in whole.evaluate(x, weights).items():
        total, weight = (sum(f[name][i] for f in found) for i in range(2))
        torch.testing.assert_close(total / weight, value, rtol=1e-12, atol=0)


def test_the_path_is_the_general_one_and_can_be_captured():
    """No chain and no kernels for such a network; what is recorded looks at no number and has fixed shapes."""
    problem = fedda.load("digits", model="cnn", filters=16, layers=2, norm="batch", dtype=torch.float64)
    assert problem.chain is None and Chain.of(problem.model, problem.loss, (1, 8, 8)) is None
    assert problem.gradient_paths.kernels is None and list(problem.gradient_paths.paths) == ["traced", "loop"]
    assert problem.with_path("auto", "auto", 4).gradient_paths.chosen in ("traced", "loop")
    x, batch = problem.example(3)
    graph = problem.gradient_paths.stacked.record(x, *problem.standardised(batch))
    assert isinstance(graph, torch.fx.GraphModule)  # the recorder refuses a function that looks at a number
    calls = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    shaped = {op for op in calls if hasattr(op, "tags") and torch.Tag.dynamic_output_shape in op.tags}
    assert not shaped
    truth = torch.stack([problem.gradient(x[i], problem.pick(batch, i)) for i in range(3)])
    torch.testing.assert_close(graph(x, *problem.standardised(batch)), truth, rtol=1e-10, atol=1e-13)


def test_synchronised_statistics_are_refused():
    for module in (S(nn.Flatten(), nn.Linear(36, 3), nn.SyncBatchNorm(3)).double(), nn.SyncBatchNorm(3).double()):
        with pytest.raises(ValueError, match=r"problem: .* is a SyncBatchNorm.*use BatchNorm1d") as why:
            make(module)
        assert "\n" not in str(why.value)


def test_other_running_state_is_refused_still():
    module = S(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.InstanceNorm2d(2, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    with pytest.raises(ValueError, match=r"changes the buffer '2.running_mean'.*use BatchNorm or GroupNorm"):
        make(module.double())


def test_a_batch_of_one_is_refused_where_it_has_no_variance():
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        make(model("BatchNorm1d"), batch=1)
    assert make(model("BatchNorm2d"), batch=1).d == make().d  # over the pixels it has


def test_frozen_statistics_stay_constants():
    module = model("BatchNorm1d").eval()
    module[2].running_mean += 1
    problem = make(module)
    assert problem.statistics(problem.point()) == {} and not problem.batch_norms.layers
    row = problem.evaluate(problem.point(), torch.ones(5, dtype=torch.float64))
    with torch.no_grad():
        assert float(row["test_loss"]) == pytest.approx(float(F.cross_entropy(module(TEST[0]), TEST[1])), rel=1e-12)


def test_statistics_follow_the_problem_s_dtype():
    problem = make(model("two"))
    x = away(problem, 2)
    single = problem.to(dtype=torch.float32)
    for key, value in single.statistics(x.float()).items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), problem.statistics(x)[key], rtol=1e-4, atol=1e-5)


# -- the paper's network with it ---------------------------------------------------------------------------------
@pytest.mark.parametrize("shape,classes,filters,more,d", [
    ((3, 32, 32), 10, 64, {"norm": "batch"}, 115_146 + 4 * 128),
    ((1, 28, 28), 62, 64, {"norm": "batch"}, 115_454 + 4 * 128),
    ((3, 28, 28), 9, 32, {"norm": "batch"}, 28_937 + 4 * 64),
    ((3, 32, 32), 10, 64, {"norm": "batch", "pool": "stride"}, 115_146 + 4 * 128),  # 2x2 pixels are left, as of the pool
    ((3, 28, 28), 9, 32, {"pool": "stride"}, 28_937 + 9 * 32 * 3),  # 2x2 pixels, where the pool leaves one
    ((1, 8, 8), 10, 4, {"pool": "stride"}, 40 + 3 * 148 + 50),  # 8, 4, 2, 1, and no stride beyond
])  # fmt: skip
def test_the_network_has_the_layers_that_are_asked_for(shape, classes, filters, more, d):
    from fedda.problems.models import cnn

    network, _ = cnn(shape, classes, filters, **more)
    assert flatten(network).numel() == d
    assert network(torch.zeros(2, *shape)).shape == (2, classes)
    kinds = [type(layer).__name__ for layer in network]
    block = ["Conv2d", "ReLU"] + ["BatchNorm2d"] * ("norm" in more) + ["MaxPool2d"] * ("pool" not in more)
    assert kinds == block * 4 + ["Flatten", "Linear"]


@pytest.mark.parametrize("word,value", [("norm", "layer"), ("norm", 1), ("pool", "mean")])
def test_other_norms_and_pools_are_refused(word, value):
    with pytest.raises(ValueError, match=rf"cnn: {word} must be one of .*got {value!r}"):
        fedda.load("digits", model="cnn", **{word: value})


@pytest.mark.parametrize("pool", ["max", "stride"])
def test_the_network_learns(pool):
    problem = fedda.load("digits", clients=5, model="cnn", filters=8, layers=3, norm="batch", pool=pool)
    result = fedda.train(fedda.make("fedavg", lr=0.05), problem, rounds=25, cohort=5)
    assert result.history[-1]["test_accuracy"] > 0.8
