"""Any network, stacked over clients: the gradients are those of the loop, whatever its layers are."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedda
from conftest import path, stable
from fedda.problems.gradients import recurrent
from fedda.problems.gradients.vmap import StackedGradient


class Sequence(nn.Module):
    """A recurrent network whose output depends on all states, and on the last one by itself."""

    def __init__(self, cell, start=False, out=6, **options):
        super().__init__()
        self.cell, self.batch_first = cell(5, 6, **options), options.get("batch_first", False)
        sizes = (options.get("num_layers", 1) * (1 + options.get("bidirectional", False)), 1, 6)
        self.start = nn.Parameter(torch.randn(sizes)) if start else None
        self.out = nn.Linear(out * (1 + options.get("bidirectional", False)), 3)

    def forward(self, x):
        hx = None
        if self.start is not None:
            hx = self.start.expand(-1, len(x), -1).contiguous()
            hx = (hx, 0.5 * hx) if isinstance(self.cell, nn.LSTM) else hx
        out, last = self.cell(x if self.batch_first else x.transpose(0, 1), hx)
        last = last if isinstance(last, tuple) else (last,)
        return self.out(out).mean(1 if self.batch_first else 0) + sum(v[-1, :, :3] ** 2 for v in last)


class Stepwise(nn.Module):
    """A recurrent cell that the module steps by itself."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.out = cell, nn.Linear(6, 3)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.out(state[0] if isinstance(state, tuple) else state)


class Attention(nn.Module):
    def __init__(self, mask=None, **options):
        super().__init__()
        self.qkv, self.out, self.mask, self.options = nn.Linear(5, 24), nn.Linear(8, 3), mask, options

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        masks = {"bool": torch.ones(7, 7).tril() > 0, "float": torch.linspace(-1, 1, 49).view(7, 7).to(x)}
        h = F.scaled_dot_product_attention(q, k, v, masks.get(self.mask), **self.options)
        return self.out(h.transpose(1, 2).flatten(2).mean(1))


class Residual(nn.Module):
    def __init__(self, width, stride):
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, 2 * width, 3, stride, 1, bias=False), nn.GroupNorm(2, 2 * width)
        self.second = nn.Conv2d(2 * width, 2 * width, 3, 1, 1)
        self.skip = nn.Conv2d(width, 2 * width, 1, stride)

    def forward(self, x):
        return F.relu(self.skip(x) + self.second(F.relu(self.norm(self.first(x)))))


class Words(nn.Module):
    """Rows of a table; -1 is the last one."""

    def __init__(self, **options):
        super().__init__()
        self.table, self.out = nn.Embedding(3, 4, **options), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.table(x.long() % 3).mean(1))


class Plain(nn.Module):
    """The operator under an embedding, for which -1 is no padding."""

    def __init__(self, *options):
        super().__init__()
        self.table, self.out, self.options = nn.Linear(4, 3), nn.Linear(4, 3), options

    def forward(self, x):
        return self.out(torch.embedding(self.table.weight, x.long() % 3, *self.options).mean(1))


class Backwards(nn.Module):
    """A module that looks whether a gradient is taken, and one that changes it on its way back."""

    def __init__(self, hook):
        super().__init__()
        self.first, self.last, self.hook = nn.Linear(7, 4), nn.Linear(4, 3), hook

    def forward(self, x):
        h = self.first(x)
        if self.hook and h.requires_grad:
            h.register_hook(lambda g: -2 * g)
        return self.last(h * 2 if h.requires_grad else h)


def images(channels, *body, pool=2):
    """The layers after a first convolution to `channels`, then a mean over the pixels."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), *body, nn.AdaptiveAvgPool2d(pool), nn.Flatten(), nn.LazyLinear(3)
    )


sequence, image = (7, 5), (3, 9, 9)
MODELS = {
    **{
        f"{cell.__name__.lower()}, {name}": (lambda cell=cell, options=options: Sequence(cell, **options), sequence)
        for cell in (nn.LSTM, nn.GRU, nn.RNN)
        for name, options in {
            "one layer": {},
            "two layers, both directions": {"num_layers": 2, "bidirectional": True, "batch_first": True},
            "no bias": {"bias": False},
            "from a state that is trained": {"num_layers": 2, "start": True},
        }.items()
    },
    "rnn with relu": (lambda: Sequence(nn.RNN, nonlinearity="relu"), sequence),
    "lstm with projections": (lambda: Sequence(nn.LSTM, out=3, proj_size=3), sequence),
    **{
        f"{cell.__name__}": (lambda cell=cell, options=options: Stepwise(cell(5, 6, **options)), sequence)
        for cell, options in ((nn.LSTMCell, {}), (nn.GRUCell, {"bias": False}), (nn.RNNCell, {}))
    },
    "attention": (Attention, sequence),
    "causal attention": (lambda: Attention(is_causal=True), sequence),
    "attention with a mask": (lambda: Attention("bool"), sequence),
    "attention with a bias": (lambda: Attention("float", scale=0.7), sequence),
    "encoder": (lambda: nn.Sequential(nn.TransformerEncoderLayer(5, 1, 8, 0.0, batch_first=True), nn.Flatten(), nn.Linear(35, 3)), sequence),
    "embedding": (Words, (7,)),
    "embedding with padding": (lambda: Words(padding_idx=1), (7,)),
    "embedding with padding in the last row": (lambda: Words(padding_idx=-1), (7,)),
    "embedding with mean gradients": (lambda: Words(padding_idx=0, scale_grad_by_freq=True), (7,)),
    "plain embedding": (lambda: Plain(-1, True), (7,)),
    "plain embedding with padding": (lambda: Plain(2), (7,)),
    "requires_grad": (lambda: Backwards(hook=False), (7,)),
    "hook": (lambda: Backwards(hook=True), (7,)),
    "stride 2": (lambda: images(4, nn.Conv2d(4, 6, 3, 2, 1), nn.ReLU()), image),
    "stride 3, 5x5": (lambda: images(4, nn.Conv2d(4, 5, 5, 3, 2), nn.ReLU()), image),
    "1x1": (lambda: images(4, nn.Conv2d(4, 7, 1), nn.ReLU()), image),
    "depthwise": (lambda: images(6, nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.ReLU(), nn.Conv2d(6, 4, 1)), image),
    "dilated": (lambda: images(4, nn.Conv2d(4, 4, 3, padding=2, dilation=2), nn.ReLU()), image),
    "grouped": (lambda: images(6, nn.Conv2d(6, 9, 3, (2, 1), (1, 0), groups=3), nn.ReLU()), image),
    "513 channels": (lambda: images(513, nn.ReLU(), nn.Conv2d(513, 2, 1), pool=1), image),
    "transposed": (lambda: images(4, nn.ConvTranspose2d(4, 3, 3, 2), nn.ReLU()), image),
    "residual with GroupNorm": (lambda: images(4, Residual(4, 2), Residual(8, 1)), image),
    "one dimension": (lambda: nn.Sequential(nn.Conv1d(7, 4, 3, 2), nn.GELU(), nn.Flatten(), nn.Linear(8, 3)), sequence),
}  # fmt: skip


def problem_of(make, shape, clients=3, batch=2, samples=None, **options):
    torch.manual_seed(0)
    n = samples or clients * max(2, batch)
    model = make().double()
    x = torch.randn(n, *shape, dtype=torch.float64)
    model(x[:2])  # lazy layers get their shapes
    y, owner = torch.arange(n) % 3, torch.arange(n) % clients
    return fedda.problem(model, F.cross_entropy, x=x, y=y, client=owner, batch=batch, **options)


def both_paths(problem, clients, points=2):
    """The gradients of a stack by vmap and by the loop, at points that differ."""
    x, batch = problem.example(clients)
    x = x + 0.1 * torch.randn(points, *x.shape, dtype=x.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a model that falls back to the loop
        traced = problem.with_path("traced", "auto", clients).gradients(x, batch)
    return traced, problem.with_path("loop", "auto", clients).gradients(x, batch)


def assert_equal(traced, loop):
    assert (traced - loop).abs().max() <= 1e-12 * loop.abs().max().clamp(min=1)


@pytest.mark.parametrize("name", MODELS)
def test_a_stack_has_the_gradients_of_the_loop(name):
    traced, loop = both_paths(problem_of(*MODELS[name]), 3)
    assert_equal(traced, loop)
    assert loop.abs().max() > 1e-4


@pytest.mark.parametrize("clients,batch", [(1, 1), (1, 128), (64, 1), (5, 3)])
@pytest.mark.parametrize("name", ["lstm, two layers, both directions", "causal attention", "stride 2"])
def test_for_any_number_of_clients_and_any_batch(name, clients, batch):
    problem = problem_of(*MODELS[name], clients=clients, batch=batch, samples=128)
    assert_equal(*both_paths(problem, clients, points=1))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_stack_that_is_too_large_for_the_cache_is_cut(kind, monkeypatch):
    problem = problem_of(lambda: Sequence(kind), sequence, clients=5)
    assert_equal(*both_paths(problem, 5))
    monkeypatch.setattr(recurrent, "CACHE", 2 * 4 * 6 * 6 * 8)  # two LSTMs
    assert_equal(*both_paths(problem, 5))


def test_all_time_steps_are_one_operation():
    """The recorded gradient does not grow with the length of the sequence."""
    lengths = []
    for length in (3, 30):
        problem = problem_of(lambda: Sequence(nn.LSTM), (length, 5))
        traced = problem.with_path("traced", "auto", 3)
        traced.gradients(*(lambda x, batch: (x[None], batch))(*problem.example(3)))
        (graph,) = traced.gradient_paths.stacked.by_shape.values()
        lengths.append(len(graph.graph.nodes))
    assert lengths[0] == lengths[1] < 200


@pytest.mark.parametrize("name", ["fedavg", "fedda-mvr", "scaffold"])
def test_engines_agree_on_a_recurrent_network(name):
    problem = problem_of(lambda: Sequence(nn.GRU), sequence, clients=4, batch=3)
    paths = [path(stable(name, steps=2), problem, 2, engine=engine) for engine in ("sequential", "vectorised")]
    torch.testing.assert_close(*paths, rtol=0, atol=1e-12)


def test_several_seeds_of_a_recurrent_network_are_evaluated_as_each_alone():
    problem = problem_of(lambda: Sequence(nn.LSTM), sequence, clients=4, batch=3)
    algorithm = stable("fedavg", steps=2)
    together = fedda.train(algorithm, problem, rounds=2, seed=[0, 1]).history
    alone = [row for seed in (0, 1) for row in fedda.train(algorithm, problem, rounds=2, seed=seed).history]
    for row in alone:
        (same,) = (r for r in together if (r["round"], r["seed"]) == (row["round"], row["seed"]))
        assert same["train_loss"] == pytest.approx(row["train_loss"], abs=1e-12)


# -- frozen parts ------------------------------------------------------------------------------------------------------
def frozen_body():
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(245, 6), nn.ReLU(), nn.Linear(6, 3))


def test_a_frozen_part_is_computed_once_for_all_points_and_clients():
    problem = problem_of(frozen_body, image, clients=4, batch=3, trainable="5.*")
    traced, loop = both_paths(problem, 4, points=2)
    assert_equal(traced, loop)
    (graph,) = problem._paths_by_name["traced", "auto"].stacked.by_shape.values()
    convolutions = [node for node in graph.graph.nodes if "convolution" in str(node.target)]
    # One convolution of all clients' batches with one set of weights, and none in the backward pass.
    assert [tuple(node.meta["tensor"].shape) for node in convolutions] == [(4 * 3, 5, 7, 7)]


def test_a_frozen_part_in_the_middle_passes_gradients_on():
    problem = problem_of(frozen_body, image, clients=4, batch=3, trainable=["0.*", "5.*"])
    assert_equal(*both_paths(problem, 4, points=2))


def test_the_loop_takes_over_with_one_warning_if_vmap_fails():
    def objective(x, batch):
        return x.sum() * (1.0 if float(batch.sum()) > 0 else 2.0)  # looks at a number

    stacked = StackedGradient(objective)
    x, batch = torch.ones(4, 2, dtype=torch.float64), torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    with pytest.warns(UserWarning, match="its clients run one by one"):
        gradients = stacked(x, batch)
    assert gradients.tolist() == [[1, 1], [2, 2]] * 2


def test_the_residual_network_has_groups_and_no_statistics():
    """ResNet-8 on CIFAR-10's shape: the parameters, counted by hand, and the engines agree."""
    model, _ = fedda.registry.models.find("resnet8")(shape=(3, 32, 32), classes=10)
    convolutions = 27 * 16 + 2 * 144 * 16 + 144 * 32 + 288 * 32 + 16 * 32 + 288 * 64 + 576 * 64 + 32 * 64
    norms = 2 * (16 + 2 * 16 + 2 * 32 + 2 * 64)
    assert sum(p.numel() for p in model.parameters()) == convolutions + norms + 64 * 10 + 10 and not list(
        model.buffers()
    )
    problem = fedda.load("digits", clients=3, model="resnet8", width=4, groups=2, batch=4)
    algorithm = fedda.make("fedavg", lr=0.1, steps=2)
    xs = [fedda.train(algorithm, problem, 2, engine=engine).x for engine in ("sequential", "vectorised")]
    torch.testing.assert_close(*xs)
    with pytest.raises(ValueError, match="width must be a multiple of groups"):
        fedda.load("digits", clients=3, model="resnet8", width=4, groups=3)
