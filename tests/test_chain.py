"""Stacked gradients of known chains, written by hand: they are autograd's, and what is not known falls back."""

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import fedda
from conftest import stable
from fedda.engines import Vectorised
from fedda.problems.gradients import chain as chains
from fedda.problems.gradients.chain import Chain, native, pooling
from fedda.problems.gradients.chain.winograd import Winograd
from fedda.problems.models import binary_cross_entropy, cnn, cross_entropy, logistic, mlp
from fedda.problems.neural import flatten

BOUND = {torch.float64: 1e-12, torch.float32: 2e-5}  # of the largest number of a member's gradient


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def stack(model, g, dtype=torch.float64, seed=1):
    """Different members: the model's own parameters, moved."""
    x = flatten(model).to(dtype)
    return x + 0.2 * randn(g, len(x), seed=seed, dtype=dtype)


def truth(model, loss, x, inputs, targets):
    """A module for each member, backward, its gradients in a row."""
    rows = []
    for i, row in enumerate(x):
        one = copy.deepcopy(model).to(x.dtype)
        nn.utils.vector_to_parameters(row.clone(), one.parameters())
        loss(one(inputs[i % len(inputs)]), targets[i % len(inputs)]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in one.parameters()]))
    return torch.stack(rows)


def ways(chain, dtype=torch.float64):
    """Batched products of PyTorch and, if it knows all layers, C code."""
    return [way for way in (chain, chain.native(dtype)) if way is not None]


def equals_autograd(
    model, sample, loss=cross_entropy, classes=3, g=4, n=2, batch=5, dtype=torch.float64, inputs=None, chain_loss=None
):
    chain = Chain.of(model, chain_loss or loss, sample)
    assert chain is not None
    x = stack(model, g, dtype)
    inputs = randn(n, batch, *sample, seed=2, dtype=dtype) if inputs is None else inputs
    targets = torch.arange(n * batch).view(n, batch) % classes
    expected = truth(model, loss, x, inputs, targets)
    for way in ways(chain, dtype):
        error = (way.gradients(x, inputs, targets) - expected).abs().amax(1) / expected.abs().amax(1)
        assert float(error.max()) <= BOUND[dtype], error
        for row, output in zip(x, way.outputs(x, inputs[0]), strict=True):
            one = copy.deepcopy(model).to(dtype)
            nn.utils.vector_to_parameters(row.clone(), one.parameters())
            torch.testing.assert_close(output, one(inputs[0]).detach(), rtol=BOUND[dtype], atol=BOUND[dtype])
    return chain


S, C, P = nn.Sequential, nn.Conv2d, nn.MaxPool2d
torch.manual_seed(0)  # made at import, before any fixture: a network whose last relu is dead has no gradient to compare
TABLE = {
    "linear": (nn.Linear(5, 3), (5,)),
    "logistic": (logistic((1, 4, 4), 3)[0], (1, 4, 4)),
    "mlp": (mlp((7,), 3, hidden=[6, 5])[0], (7,)),
    "no bias": (S(nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False)), (5,)),
    "nested, identity, dropout": (S(S(nn.Linear(5, 4), nn.Dropout()), S(S(nn.Identity(), nn.ReLU())), nn.Linear(4, 3)).eval(), (5,)),
    "two linear maps, flat twice": (S(nn.Flatten(), nn.Linear(6, 4), nn.Flatten(), nn.Linear(4, 3), nn.ReLU()), (2, 3)),
    "relu first": (S(nn.ReLU(), nn.Linear(5, 3)), (5,)),
    "the paper's": (cnn((3, 16, 16), 3, filters=8, layers=3)[0], (3, 16, 16)),
    "down to one pixel": (cnn((1, 8, 8), 3, filters=8)[0], (1, 8, 8)),
    "odd sizes": (cnn((2, 15, 13), 3, filters=9, layers=3)[0], (2, 15, 13)),
    "winograd without bias and relu": (S(C(8, 5, 3, padding=1, bias=False), P(2), nn.Flatten(), nn.Linear(5 * 6, 3)), (8, 5, 6)),
    "pool then relu": (S(C(8, 5, 3, padding="same"), P(2), nn.ReLU(), C(5, 4, 3, padding=1), P(2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)), (8, 5, 4)),
    "pool after conv without relu": (S(C(2, 4, 3), P(2), nn.Flatten(), nn.Linear(16, 3)), (2, 6, 7)),
    "stride 2, 5x5": (S(C(2, 4, 5, stride=2, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)), (2, 8, 7)),
    "1x1": (S(C(3, 20, 1), nn.ReLU(), C(20, 2, 1), nn.Flatten(), nn.Linear(2 * 12, 3)), (3, 3, 4)),
    "even kernel, same": (S(C(2, 3, (2, 4), padding="same"), nn.ReLU(), C(3, 2, (4, 1), padding="same"), nn.Flatten(), nn.Linear(2 * 20, 3)), (2, 4, 5)),
    "valid, uneven": (S(C(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)), P((1, 2)), nn.Flatten(), nn.Linear(3 * 3 * 2, 3)), (2, 5, 6)),
    "3x3 pool, odd rest": (S(C(1, 4, 3, padding=1), nn.ReLU(), P(3), nn.Flatten(), nn.Linear(16, 3)), (1, 7, 8)),
    "pools and relus alone": (S(P(2), nn.ReLU(), C(2, 3, 3, padding=1), P(2), P(2), nn.ReLU(), nn.Flatten(), nn.Linear(3, 3)), (2, 9, 8)),
    "wide first layer": (S(C(3, 17, 3, padding=1), nn.ReLU(), P(2), nn.Flatten(), nn.Linear(17 * 4, 3)), (3, 4, 4)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", TABLE)
def test_equals_autograd(name, dtype):
    model, sample = TABLE[name]
    chain = equals_autograd(model.to(dtype), sample, dtype=dtype)
    assert chain.native(dtype) is not None


def test_the_table_has_winograd_in_it():
    chain = Chain.of(*TABLE["the paper's"][:1], cross_entropy, (3, 16, 16))
    assert [isinstance(stage, Winograd) for stage in chain.stages[:3]] == [False, True, True]


@pytest.mark.parametrize("cache", [1, 100_000, 1 << 40])
@pytest.mark.parametrize("g,n", [(1, 1), (3, 3), (6, 3), (6, 1), (10, 5)])
def test_points_share_batches_however_the_stack_is_cut(monkeypatch, cache, g, n):
    monkeypatch.setattr(chains, "CACHE", cache)
    for name in ("mlp", "the paper's"):
        model, sample = TABLE[name]
        equals_autograd(model.double(), sample, g=g, n=n)


def test_stacks_of_other_sizes_one_after_the_other():
    """What is kept between calls, its memory, carries nothing over."""
    model, sample = TABLE["odd sizes"]
    chain, loss = Chain.of(model.double(), cross_entropy, sample), cross_entropy
    for g, batch in ((3, 4), (1, 7), (5, 2), (3, 4)):
        x, inputs, y = stack(model, g, seed=g), randn(g, batch, *sample, seed=batch), torch.zeros(g, batch).long()
        expected = truth(model, loss, x, inputs, y)
        for way in ways(chain):
            torch.testing.assert_close(way.gradients(x, inputs, y), expected, rtol=1e-10, atol=1e-12)


def test_members_that_are_the_same_point_need_no_copy():
    model, sample = TABLE["mlp"]
    x = stack(model.double(), 1)
    inputs, y = randn(4, 5, *sample), torch.zeros(4, 5).long()
    for way in ways(Chain.of(model, cross_entropy, sample)):
        assert torch.equal(way.gradients(x.expand(4, -1), inputs, y), way.gradients(x.repeat(4, 1), inputs, y))


@pytest.mark.parametrize("loss", [cross_entropy, F.cross_entropy, nn.CrossEntropyLoss(), nn.CrossEntropyLoss().eval()])
def test_losses(loss):
    equals_autograd(TABLE["mlp"][0].double(), (7,), loss)


def test_one_logit():
    model, loss = logistic((2, 3), 2)
    assert loss is binary_cross_entropy
    equals_autograd(model.double(), (2, 3), loss, classes=2)


@pytest.mark.parametrize("loss", [F.mse_loss, nn.MSELoss()])
def test_one_number(loss):
    model = S(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1), nn.Flatten(0))
    equals_autograd(model.double(), (5,), lambda y, t: loss(y, t.double()), chain_loss=loss, classes=9)


@pytest.mark.parametrize("loss", [F.l1_loss, nn.MSELoss(reduction="sum"), nn.CrossEntropyLoss(label_smoothing=0.1)])
def test_other_losses_are_not_known(loss):
    width = 3 if isinstance(loss, nn.CrossEntropyLoss) else 1
    assert Chain.of(S(nn.Linear(5, width), *([] if width == 3 else [nn.Flatten(0)])), loss, (5,)) is None


# -- ties and numbers that are not finite ----------------------------------------------------------------------------------
@pytest.mark.parametrize("channels", [2, 8])  # by windows, by Winograd
@pytest.mark.parametrize("pattern", ["constant", "rows", "columns", "blocks", "whole numbers"])
def test_of_equal_maxima_the_first_is_taken(channels, pattern):
    i, j = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    whole = torch.randint(0, 2, (12, 12), generator=torch.Generator().manual_seed(3)).double()
    image = {
        "constant": 0 * i + 0.7,
        "rows": i % 3,
        "columns": j % 3,
        "blocks": (i // 6 + j // 6),
        "whole numbers": whole,
    }
    inputs = image[pattern].double().expand(2, 5, channels, 12, 12).contiguous()
    # Two layers: where a gradient goes in the second is seen in the first.
    model = S(
        C(channels, 8, 3, padding=1),
        nn.ReLU(),
        C(8, 8, 3, padding=1),
        P(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 3),
    ).double()
    if pattern == "whole numbers":
        with torch.no_grad():
            for p in model.parameters():
                p.copy_((10 * p).round().clamp(-2, 2))
        x = flatten(model).expand(2, -1)
        y = torch.arange(10).view(2, 5) % 3
        expected = truth(model, cross_entropy, x, inputs, y)
        for way in ways(Chain.of(model, cross_entropy, (channels, 12, 12))):
            torch.testing.assert_close(way.gradients(x, inputs, y), expected, rtol=1e-11, atol=1e-11)
    else:
        equals_autograd(model, (channels, 12, 12), inputs=inputs)


def test_the_slope_of_relu_at_zero_is_zero():
    model = S(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x = torch.zeros(2, flatten(model).numel(), dtype=torch.float64)
    inputs, y = randn(2, 5, 4), torch.zeros(2, 5).long()
    for way in ways(Chain.of(model, cross_entropy, (4,))):
        got = way.gradients(x, inputs, y)
        torch.testing.assert_close(got, truth(model, cross_entropy, x, inputs, y), rtol=1e-14, atol=0)
        assert not got[:, :30].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
@pytest.mark.parametrize("name", ["mlp", "the paper's", "odd sizes", "3x3 pool, odd rest", "pools and relus alone"])
def test_a_member_that_diverged_is_not_finite_and_the_others_are_as_they_were(name, value):
    model, sample = TABLE[name]
    inputs, y = randn(1, 5, *sample), torch.zeros(1, 5).long()
    x = stack(model.double(), 3)
    for way in ways(Chain.of(model, cross_entropy, sample)):
        fine = way.gradients(x, inputs, y)
        for place in (0, x.shape[1] // 2, x.shape[1] - 1):
            bad = x.clone()
            bad[1, place] = value
            got, expected = way.gradients(bad, inputs, y), truth(model, cross_entropy, bad, inputs, y)
            assert bool(got[1].isfinite().all()) == bool(expected[1].isfinite().all())
            assert torch.equal(got[::2], fine[::2])
        bad = x.clone()
        bad[1] = value
        assert not way.gradients(bad, inputs, y)[1].isfinite().all()


# -- chains drawn at random ---------------------------------------------------------------------------------------------
@st.composite
def drawn(draw):
    shape = [draw(st.sampled_from([1, 3, 8])), draw(st.integers(1, 9)), draw(st.integers(1, 9))]
    sample, layers, images = tuple(shape), [], draw(st.booleans())
    for _ in range(draw(st.integers(0, 4)) if images else 0):
        kind = draw(st.sampled_from(["conv", "winograd", "pool", "relu"]))
        if kind == "pool" and min(shape[1:]) >= 2:
            layers.append(P(2))
            shape[1:] = [n // 2 for n in shape[1:]]
        elif kind == "winograd" and min(shape[1:]) >= 2:
            layers += [C(shape[0], 8, 3, padding=1, bias=draw(st.booleans())), nn.ReLU(), P(2)]
            shape = [8, *(n // 2 for n in shape[1:])]
        elif kind == "relu":
            layers.append(nn.ReLU())
        elif kind == "conv":
            k = [draw(st.integers(1, 3)) for _ in "hw"]
            pad, stride = draw(st.integers(0, 2)), draw(st.integers(1, 2))
            sizes = [(n + 2 * pad - a) // stride + 1 for n, a in zip(shape[1:], k, strict=True)]
            if min(sizes) >= 1 and all(n + 2 * pad >= a for n, a in zip(shape[1:], k, strict=True)):
                filters = draw(st.sampled_from([1, 4, 16]))
                layers.append(C(shape[0], filters, k, stride=stride, padding=pad, bias=draw(st.booleans())))
                shape = [filters, *sizes]
    features, layers = shape[0] * shape[1] * shape[2], [*layers, nn.Flatten()]
    for width in draw(st.lists(st.integers(1, 6), max_size=2)):
        layers += [nn.Linear(features, width, bias=draw(st.booleans())), nn.ReLU()]
        features = width
    return (
        S(*layers, nn.Linear(features, 3)),
        sample,
        draw(st.sampled_from([(1, 1), (3, 3), (4, 2)])),
        draw(st.integers(1, 4)),
    )


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(drawn())
def test_chains_drawn_at_random_equal_autograd(case):
    model, sample, (g, n), batch = case
    equals_autograd(model.double(), sample, g=g, n=n, batch=batch)


# -- what is not known ----------------------------------------------------------------------------------------------------
class Custom(nn.Linear):
    pass


class Own(nn.Module):
    """Two layers, and a `forward` that is given."""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in (layers or {"a": nn.Linear(5, 4), "b": nn.Linear(4, 3)}).items():
            setattr(self, name, layer)
        self.function = forward

    def forward(self, x, unused=2.0):
        return self.function(self, x)


def frozen():
    model = S(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    model[0].bias.requires_grad_(False)
    return model


def tied():
    layer = nn.Linear(5, 5)
    return S(layer, nn.ReLU(), layer, nn.Linear(5, 3))


def tied_parameter():
    model = S(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.Linear(5, 3))
    model[2].weight = model[0].weight
    return model


def hooked(where=lambda model: model):
    model = S(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    where(model).register_forward_hook(lambda module, args, output: 2 * output)
    return model


def patched():
    model = S(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    model[0].forward = lambda x: F.linear(x, 2 * model[0].weight)
    return model


def extra():
    model = S(nn.Linear(5, 3))
    model[0].register_parameter("more", nn.Parameter(torch.zeros(2)))
    return model


class Twice(Own):
    """More than its `forward`."""

    def __call__(self, x):
        return 2 * super().__call__(x)


class Buffer(Own):
    """A warm-up by a buffer."""

    def __init__(self):
        super().__init__(lambda m, x: m.b(m.a(x)) if m.calls < 100 else m.b(torch.relu(m.a(x))))
        self.register_buffer("calls", torch.zeros(()))


def counts(m, x):
    m.calls = getattr(m, "calls", 0) + 1
    return m.b(m.a(x)) if m.calls < 100 else m.b(torch.relu(m.a(x)))


def without_gradient(m, x):
    with torch.no_grad():
        h = m.a(x)
    return m.b(h)


def with_hook(m, x):
    h = m.a(x)
    if getattr(h, "requires_grad", False) is True:  # not in tracing
        h.register_hook(lambda g: 2 * g)
    return m.b(h)


def in_place(m, x):
    h = m.a(x)
    torch._foreach_mul_([h], 2.0)  # returns nothing
    return m.b(h)


def partly_in_evaluation():
    model = Own(lambda m, x: m.b(m.a(x)) if m.a.training == m.b.training else m.b(torch.relu(m.a(x))))
    model.a.eval()
    return model


def wakes_its_dropout():
    def forward(m, x):
        m.drop.train(m.training)
        return m.b(m.drop(m.a(x)))

    return Own(forward, a=nn.Linear(5, 4), drop=nn.Dropout().eval(), b=nn.Linear(4, 3))


UNKNOWN = {
    "frozen": frozen,
    "tied": tied,
    "tied parameter": tied_parameter,
    "batch norm in eval": lambda: S(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval(),
    "a subclass": lambda: S(Custom(5, 3)),
    "a function that is nearly the identity": lambda: Own(lambda m, x: m.b(torch.relu(m.a(x)).clamp(max=1e6))),
    "a skip": lambda: Own(lambda m, x: m.b(torch.relu(m.a(x))) + x[:, :3]),
    "layers in another order": lambda: Own(lambda m, x: m.a(torch.relu(m.b(x))), a=nn.Linear(4, 3), b=nn.Linear(5, 4)),
    "a layer twice": lambda: Own(lambda m, x: m.b(m.a(m.a(x))), a=nn.Linear(5, 5), b=nn.Linear(5, 3)),
    "a layer that is not used": lambda: Own(lambda m, x: m.a(x), a=nn.Linear(5, 3), b=nn.Linear(5, 3)),
    "other outputs in evaluation": lambda: Own(lambda m, x: m.b(m.a(x)) if m.training else m.b(m.a(x)).relu()),
    "a branch that depends on the data": lambda: Own(lambda m, x: m.b(m.a(x if x.sum() > 0 else -x))),
    "several outputs": lambda: Own(lambda m, x: (m.b(m.a(x)), x)),
    "an earlier value": lambda: Own(lambda m, x: (m.a(x), m.b(m.a(x)))[0], a=nn.Linear(5, 3), b=nn.Linear(3, 3)),
    "softmax at the end": lambda: Own(lambda m, x: m.b(m.a(x)).softmax(-1)),
    "samples that mix": lambda: Own(lambda m, x: m.b(m.a(x).view(4, -1).view(-1, 4))),
    "dropout as a function": lambda: Own(lambda m, x: m.b(F.dropout(m.a(x), 0.5, m.training))),
    "more than its forward": lambda: Twice(lambda m, x: m.b(m.a(x))),
    "a buffer that changes": Buffer,
    "a counter": lambda: Own(counts),
    "rare random numbers": lambda: Own(lambda m, x: m.b(m.a(x if torch.rand(()) < 0.9999 else -x))),
    "rare random numbers of Python": lambda: Own(lambda m, x: m.b(m.a(x if random.random() < 0.9999 else -x))),
    "rare random numbers of NumPy": lambda: Own(lambda m, x: m.b(m.a(x if np.random.rand() < 0.9999 else -x))),
    "a layer without gradient": lambda: Own(without_gradient),
    "a hook of a value": lambda: Own(with_hook),
    "other outputs with autograd": lambda: Own(lambda m, x: m.b(m.a(x).relu() if torch.is_grad_enabled() else m.a(x))),
    "other outputs in tracing": lambda: Own(lambda m, x: m.b(m.a(x).relu() if isinstance(x, torch.Tensor) else m.a(x))),
    "the first samples": lambda: Own(lambda m, x: m.b(m.a(x)[:32])),
    "the last samples": lambda: Own(lambda m, x: m.b(m.a(x)[-32:])),
    "some samples": lambda: Own(lambda m, x: m.b(m.a(x)[[0, 1, 2]])),
    "a batch of one size": lambda: Own(lambda m, x: m.b(m.a(x).view(3, 4))),
    "no batch for one sample": lambda: Own(lambda m, x: m.b(m.a(x)).squeeze()),
    "a value changed in place": lambda: Own(in_place),
    "a layer in evaluation": partly_in_evaluation,
    "a dropout that it wakes": wakes_its_dropout,
    "gelu": lambda: S(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3)),
    "dropout in training": lambda: S(nn.Dropout(), nn.Linear(5, 3)),
    "hook": hooked,
    "hook inside": lambda: hooked(lambda model: model[1]),
    "parametrised": lambda: S(weight_norm(nn.Linear(5, 3))),
    "forward of its own": patched,
    "a parameter more": extra,
    "no parameters": lambda: S(nn.ReLU()),
    "layer norm": lambda: S(nn.LayerNorm(5), nn.Linear(5, 3)),
    "another shape": lambda: nn.Linear(4, 3),
}
IMAGES = {
    "groups": lambda: C(4, 4, 3, groups=2),
    "dilation": lambda: C(4, 4, 3, dilation=2),
    "reflect": lambda: C(4, 4, 3, padding=1, padding_mode="reflect"),
    "overlapping pool": lambda: P(3, stride=2),
    "padded pool": lambda: P(2, padding=1),
    "ceil": lambda: P(2, ceil_mode=True),
    "average pool": lambda: nn.AvgPool2d(2),
    "linear on the last axis": lambda: nn.Linear(7, 7),
    "flatten in part": lambda: nn.Flatten(2),
}


class Block(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.conv, self.relu = C(inner, outer, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, x):
        return F.max_pool2d(self.relu(self.conv(x)), kernel_size=2)


def network():
    def forward(m, x):
        return m.b(m.a(m.blocks(x)).relu().view(x.size(0), -1))

    return Own(forward, blocks=S(Block(2, 8), Block(8, 4)), a=C(4, 5, 1), b=nn.Linear(20, 3))


CUSTOM = {
    "a perceptron": (lambda: Own(lambda m, x: m.b(torch.relu(m.a(x)))), (5,)),
    "inside a sequence": (lambda: S(Own(lambda m, x: m.a(x).relu_()), nn.Linear(4, 3)), (5,)),
    "blocks, and the size of the batch": (network, (2, 8, 8)),
    "flat by shape": (lambda: Own(lambda m, x: m.b(F.relu(m.a(x.reshape(x.shape[0], -1))))), (1, 5)),
    "flat by number": (lambda: Own(lambda m, x: m.b(F.relu(m.a(x.view(-1, 5))))), (5, 1)),
    "torch.flatten": (lambda: Own(lambda m, x: m.b(m.a(torch.flatten(x, start_dim=1)))), (5, 1, 1)),
    "pool with arguments": (lambda: Own(lambda m, x: m.a(F.max_pool2d(x, 2, 2).flatten(1)), a=nn.Linear(8, 3)), (2, 4, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", CUSTOM)
def test_a_module_with_its_own_forward_is_a_chain_of_its_layers(name):
    make, sample = CUSTOM[name]
    torch.manual_seed(1)
    model = make()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    if name == "inside a sequence":
        model[0].b = nn.Identity()
    equals_autograd(model.double(), sample)
    assert model.training and all(v.float().equal(state[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    "last", [lambda y: y.squeeze(-1), lambda y: y.view(-1), lambda y: y[:, 0], lambda y: y.flatten()]
)
def test_one_logit_of_a_module_with_its_own_forward(last):
    model = Own(lambda m, x: last(m.b(torch.relu(m.a(x)))), a=nn.Linear(5, 4), b=nn.Linear(4, 1))
    equals_autograd(model.double(), (5,), binary_cross_entropy, classes=2)


def test_the_rounds_of_such_a_module_are_those_of_the_loop():
    torch.manual_seed(1)
    problem = fedda.problem(
        network().double(), cross_entropy, x=randn(60, 2, 8, 8), y=torch.arange(60) % 3, client=torch.arange(60) % 4,
        batch=4, test=(randn(20, 2, 8, 8, seed=3), torch.arange(20) % 3),
    )  # fmt: skip
    assert problem.chain is not None
    runs = [
        fedda.train(stable("fedda-mvr"), problem, 3, cohort=3, engine=e)
        for e in ("sequential", Vectorised(path="native"), Vectorised(path="traced"))
    ]
    for run in runs[1:]:
        torch.testing.assert_close(run.x, runs[0].x, rtol=1e-11, atol=1e-11)
        assert run.history[-1]["test_loss"] == pytest.approx(runs[0].history[-1]["test_loss"], rel=1e-11)


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_model_is_no_chain(name):
    assert Chain.of(UNKNOWN[name](), cross_entropy, (5,)) is None


@pytest.mark.parametrize("name", IMAGES)
def test_an_unknown_layer_for_images_is_no_chain(name):
    model = S(IMAGES[name](), nn.Flatten())
    with torch.no_grad():
        features = model(torch.zeros(1, 4, 7, 7)).shape[1]
    assert Chain.of(S(*model, nn.Linear(features, 3)), cross_entropy, (4, 7, 7)) is None


@pytest.mark.parametrize("loss", [
    nn.CrossEntropyLoss(weight=torch.ones(3)), nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(reduction="sum"),
    nn.CrossEntropyLoss(ignore_index=1), F.mse_loss, nn.NLLLoss(), lambda output, y: F.cross_entropy(output, y), binary_cross_entropy,
])  # fmt: skip
def test_an_unknown_loss_is_no_chain(loss):
    assert Chain.of(nn.Linear(5, 3), loss, (5,)) is None


def test_a_class_that_torch_leaves_out_is_no_chain():
    y = torch.arange(60) % 3
    chain = Chain.of(nn.Linear(5, 3), F.cross_entropy, (5,))
    assert chain.takes(y)
    y[7] = -100
    assert not chain.takes(y)


@pytest.mark.parametrize(
    "name", ["frozen", "tied", "tied parameter", "batch norm in eval", "a subclass", "gelu", "parametrised"]
)
def test_what_is_not_known_runs_as_before(name):
    problem = fedda.problem(
        UNKNOWN[name]().double(),
        cross_entropy,
        x=randn(60, 5),
        y=torch.arange(60) % 3,
        client=torch.arange(60) % 4,
        batch=4,
    )
    assert problem.chain is None
    runs = [
        list(fedda.rounds(stable("fedda-mvr"), problem, 2, cohort=3, engine=e)) for e in ("sequential", "vectorised")
    ]
    torch.testing.assert_close(runs[0][-1].x, runs[1][-1].x, rtol=1e-11, atol=1e-11)


# -- the memory of the C code ---------------------------------------------------------------------------------------------
def test_a_result_of_the_c_code_is_the_caller_s():
    model, sample = TABLE["mlp"]
    way = Chain.of(model.double(), cross_entropy, sample).native(torch.float64)
    x, inputs, y = stack(model, 3), randn(3, 5, *sample), torch.zeros(3, 5).long()
    first = way.gradients(x, inputs, y)
    kept = first.clone()
    second = way.gradients(x + 1, inputs, y)
    assert first.equal(kept) and first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("batch", [1, 7, 8, 9, 16, 17, 40])  # around the number of samples in a vector
@pytest.mark.parametrize("name", ["mlp", "odd sizes", "stride 2, 5x5"])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_batches_of_any_size(name, dtype, batch):
    model, sample = TABLE[name]
    equals_autograd(model.to(dtype), sample, dtype=dtype, batch=batch)


@pytest.mark.parametrize("name", ["mlp", "the paper's"])
def test_threads_do_not_change_a_bit(monkeypatch, name):
    model, sample = TABLE[name]
    way = Chain.of(model.double(), cross_entropy, sample).native(torch.float64)
    x, inputs, y = stack(model, 10), randn(5, 20, *sample), torch.arange(100).view(5, 20) % 3
    one = way.gradients(x, inputs, y), way.outputs(x, inputs.flatten(0, 1))
    monkeypatch.setattr(native, "THREAD_WORK", 1)
    for threads in (2, 3, 8, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert way.gradients(x, inputs, y).equal(one[0]) and way.outputs(x, inputs.flatten(0, 1)).equal(one[1])
    assert len(way.free) > 1  # several threads had memory of their own


def test_unusual_inputs_of_the_c_code():
    """Rows that are not contiguous, targets of another type, images that are a view."""
    model, loss = logistic((2, 3), 2)
    way = Chain.of(model.double(), loss, (2, 3)).native(torch.float64)
    x, inputs, y = stack(model, 2), randn(2, 5, 2, 3), torch.arange(10).view(2, 5) % 2
    plain = way.gradients(x, inputs, y)
    turned = inputs.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert way.gradients(x.mT.contiguous().mT, turned, y.double()).equal(plain)
    whole = inputs.mul(10).round()
    assert way.gradients(x, whole.to(torch.int16), y).equal(way.gradients(x, whole, y))


# -- the tests can fail -------------------------------------------------------------------------------------------------
def last_wins(slabs):
    """A pool that takes the last of equal maxima."""
    *earlier, top = slabs
    for slab in reversed(earlier):
        before = top.clone()
        torch.maximum(slab, top, out=top)
        torch.gt(slab, before, out=slab)
    return top


@pytest.mark.parametrize("channels", [2, 8])
def test_the_test_of_ties_can_fail(monkeypatch, channels):
    for module in ("convolution", "winograd"):
        monkeypatch.setattr(f"fedda.problems.gradients.chain.{module}.pool", last_wins)
    torch.manual_seed(0)  # the model's own weights, which can be such that no tie matters
    with pytest.raises(AssertionError):
        test_of_equal_maxima_the_first_is_taken(channels, "whole numbers")


def test_the_test_of_gradients_can_fail(monkeypatch):
    def skewed(g, choices, out):
        pooling.unpool(g, choices, out)
        out[0].mul_(1 + 1e-9)

    monkeypatch.setattr("fedda.problems.gradients.chain.winograd.unpool", skewed)
    with pytest.raises(AssertionError):
        equals_autograd(TABLE["the paper's"][0].double(), (3, 16, 16))
