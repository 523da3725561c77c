"""Random layers take their numbers from the counter: the right law, the same bits for a client alone and in a stack."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from fedda.problems.gradients.vmap import StackedGradient, gradient
from fedda.problems.randomness import SELU, CounterRandom


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(8, 2, 0.3, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.out(self.attention(x, x, x, attn_mask=causal, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self, cell, **options):
        super().__init__()
        self.cell = cell(8, 6, 3, dropout=0.3, batch_first=True, **options)
        self.out = nn.LazyLinear(3)

    def forward(self, x):
        return self.out(self.cell(x)[0][:, -1])


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        x = (
            x
            + 0.1 * torch.randn_like(x)
            + 0.1 * torch.rand(x.shape, dtype=x.dtype)
            + 0.1 * torch.randn(5, dtype=x.dtype)
        )
        return self.out(x * torch.bernoulli(torch.full_like(x, 0.8)))


flat, image, sequence = (5,), (1, 5, 5), (5, 8)
MODELS = {
    "dropout": (lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3)), flat),
    "in place": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.5, inplace=True), nn.Linear(8, 3)), flat),
    "channels": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(36, 3)), image),
    "alpha": (lambda: nn.Sequential(nn.Linear(5, 8), nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(8, 3)), flat),
    "encoder": (lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True), nn.Flatten(), nn.Linear(40, 3)), sequence),
    "attention": (Attention, sequence),
    "lstm": (lambda: Recurrent(nn.LSTM, bidirectional=True, proj_size=4), sequence),
    "gru": (lambda: Recurrent(nn.GRU), sequence),
    "rnn": (lambda: Recurrent(nn.RNN), sequence),
    "noise": (Noisy, flat),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_stack_gets_what_each_client_gets_alone(name):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    x, y, key = torch.randn(4, 6, *shape, dtype=torch.float64), torch.randint(0, 3, (4, 6)), torch.arange(4) * 7919
    model(x[0])
    layout = [(n, p.shape) for n, p in model.named_parameters()]
    point = torch.cat([p.detach().flatten() for p in model.parameters()])

    def objective(point, inputs, targets, key):
        parts = point.split([shape.numel() for _, shape in layout])
        named = {n: part.view(shape) for (n, shape), part in zip(layout, parts, strict=True)}
        with CounterRandom(key):
            return F.cross_entropy(functional_call(model, named, (inputs,)), targets)

    alone = torch.stack([gradient(objective, point, x[i], y[i], key[i]) for i in range(4)])
    stacked = StackedGradient(objective)
    points = point.expand(4, -1).contiguous()
    together = stacked(points, x, y, key)
    assert not stacked.warned  # no fall back to the loop
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(stacked(points, x, y, key + 1), alone, atol=1e-3)  # other numbers for another key
    assert torch.equal(stacked(points, x, y, key), together)


def test_dropout_has_its_law():
    ones = torch.ones(400, 500)
    with CounterRandom(torch.tensor(3)):
        for p in (0.1, 0.5, 0.9):
            kept = F.dropout(ones, p)
            assert kept.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])
            assert abs((kept > 0).double().mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / kept.numel())
        assert F.dropout(ones, 1.0).count_nonzero() == 0 and F.dropout(ones, 0.0) is ones
        assert F.dropout(ones, 0.5, training=False) is ones
        channels = F.dropout2d(torch.ones(50, 40, 3, 3), 0.5)
        assert (
            torch.equal(channels.amin((2, 3)), channels.amax((2, 3))) and 800 < (channels[..., 0, 0] > 0).sum() < 1200
        )
        one, other = F.dropout(ones, 0.5), F.dropout(ones, 0.5)
    agree = ((one > 0) == (other > 0)).double().mean()
    assert abs(agree - 0.5) < 5 * 0.5 / math.sqrt(one.numel())  # two calls are independent


def test_normal_uniform_and_alpha_have_their_moments():
    with CounterRandom(torch.tensor(5)):
        normal, uniform = torch.randn(200_000, dtype=torch.float64), torch.rand(200_000, dtype=torch.float64)
        alpha = F.alpha_dropout(normal, 0.3, training=True)
        chosen = torch.bernoulli(torch.full((200_000,), 0.25))
    for values, mean, var in ((normal, 0, 1), (uniform, 0.5, 1 / 12), (alpha, 0, 1)):
        assert abs(values.mean() - mean) < 0.012 and abs(values.var() - var) < 0.02
    assert abs(chosen.mean() - 0.25) < 0.006
    assert -F.selu(torch.tensor(-1e9)).item() == pytest.approx(SELU)


@pytest.mark.parametrize("mask", ["none", "bool", "float", "causal"])
def test_attention_is_that_of_pytorch_where_nothing_is_dropped(mask):
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64)
    given = {"bool": torch.rand(6, 6) < 0.8, "float": torch.randn(6, 6, dtype=torch.float64)}.get(mask)
    expected = F.scaled_dot_product_attention(q, k, v, given, is_causal=mask == "causal")
    with CounterRandom(torch.tensor(0)):
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, given, 1e-12, mask == "causal"), expected)


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_are_those_of_pytorch_where_nothing_is_dropped(cell, bidirectional):
    module = cell(8, 6, 3, dropout=1e-12, batch_first=True, bidirectional=bidirectional).double()
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    expected, last = module.eval()(x)
    with CounterRandom(torch.tensor(0)):
        out, state = module.train()(x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(state, last)


def test_other_random_functions_are_refused():
    with (
        CounterRandom(torch.tensor(0)),
        pytest.raises(ValueError, match="the model calls randint, which has no counter"),
    ):
        torch.randint(0, 3, (2,))
