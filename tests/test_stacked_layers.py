"""Embeddings, linear layers and the last step of a gradient, of a stack of models, against autograd in float64: on a GPU where there is one, else in
Triton's interpreter, which computes in float32 whatever the precision, but for bfloat16."""

import os

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional as F

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read where the kernels are defined: before they are imported
pytest.importorskip("triton", reason="needs Triton")

import fedda  # noqa: E402
from fedda.problems.gradients import embedding, linear  # noqa: E402
from fedda.problems.gradients.joining import join_parts  # noqa: E402
from fedda.problems.gradients.kernels import embedding as embedding_kernels  # noqa: E402
from fedda.problems.gradients.kernels import join, products, row_norm  # noqa: E402
from fedda.problems.gradients.stackable import stackable  # noqa: E402
from fedda.problems.gradients.vmap import StackedGradient  # noqa: E402
from fedda.problems.sequences import transformer  # noqa: E402
from fedda.recording import record  # noqa: E402
from test_kernels import bfloat16_products  # noqa: E402, F401
from test_layers import compiled, error, operators, results, scalar_bounds  # noqa: E402, F401

DEVICE = "cuda" if CUDA else "cpu"
BOUND = {"float32": 1e-6, "tf32": 1e-3, "bf16": 1e-2}


@pytest.fixture
def calls(monkeypatch):
    """The kernels that were called, by their names."""
    called = []

    def count(module, name):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: called.append(name) or kernel(*args))

    count(embedding_kernels, "weight_gradient")
    count(products, "weight_gradient")
    return called


# -- embeddings --------------------------------------------------------------------------------------------------------
def tables(precision, n, table, tokens, shared=False, number=None, **how):
    """Rows and gradients of tables by our kernel, and by PyTorch in float64, one model after the other."""
    torch.manual_seed(0)
    w, rows = torch.randn(n, *table), torch.randint(number or table[0], (*(() if shared else (n,)), *tokens))
    d = torch.randn(n, *tokens, table[1])

    def ours(w, rows):
        return embedding.embedding(rows, w, **how, kernels=precision)

    def table_results(function, w, rows, d):
        w = w.detach().requires_grad_()
        out = function(w, rows)
        return out.detach().cpu(), torch.autograd.grad(out, w, d)[0]

    def of_model(i):
        r = rows if shared else rows[i]
        return table_results(lambda w, r: F.embedding(r, w, **how), w[i].double(), r, d[i].double())

    got = table_results(vmap(ours, (0, None if shared else 0)), *(v.to(DEVICE) for v in (w, rows, d)))
    return got, [torch.stack(v) for v in zip(*map(of_model, range(n)), strict=True)]


TABLES = {
    "sentences": (2, (7, 5), (2, 3), {}),
    "one row": (2, (1, 3), (5,), {}),
    "one token": (2, (3, 1), (), {}),
    "80 rows, one model": (1, (80, 64), (3, 70), {}),
    "80 rows, more than 64 columns": (2, (80, 65), (9,), {}),
    "3000 rows": (2, (3000, 2), (130,), {}),
    "3000 rows, few of them used": (2, (3000, 2), (70,), {"number": 3}),
    "the stack shares the tokens": (3, (7, 5), (2, 33), {"shared": True}),
    "padding": (2, (3, 5), (2, 9), {"padding_idx": 0}),
    "padding in the last row": (2, (3, 5), (2, 9), {"padding_idx": -1}),
    "mean gradients": (2, (5, 5), (2, 9), {"scale_grad_by_freq": True}),
    "mean gradients and padding": (2, (3, 5), (2, 9), {"scale_grad_by_freq": True, "padding_idx": 1, "shared": True}),
}


@pytest.mark.parametrize("case", TABLES)
def test_gradients_of_tables_equal_autograd_in_float64(case, calls):
    n, table, tokens, how = TABLES[case]
    (out, dw), (rows, expected) = tables("float32", n, table, tokens, **how)
    assert dw.shape == expected.shape and dw.dtype == torch.float32
    torch.testing.assert_close(out, rows.float(), rtol=0, atol=1e-6 if "scale_grad_by_freq" in how else 0)
    assert error(dw, expected) < BOUND["float32"] and calls == ["weight_gradient"]
    assert not dw.cpu()[expected == 0].any()


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_gradients_of_tables_are_sums_of_rounded_numbers(precision, calls):
    (_, dw), (_, expected) = tables(precision, 2, (520, 33), (2, 70))
    assert error(dw, expected) < BOUND[precision] and calls
    if CUDA or precision == "bf16":
        assert error(dw, expected) > 1e-5


def test_a_vocabulary_is_skipped_where_no_token_is():
    """Programs with a branch give the same sums."""
    d, rows = torch.randn(2, 70, 3, device=DEVICE), torch.randint(1030, (2, 70), device=DEVICE)
    small, large = (embedding_kernels.weight_gradient(d, rows, number, "float32") for number in (1024, 1030))
    rows = rows[..., None].expand(d.shape).cpu()
    expected = torch.zeros(2, 1030, 3, dtype=torch.float64).scatter_add(1, rows, d.cpu().double())
    assert torch.equal(small, large[:, :1024]) and error(large, expected) < BOUND["float32"]


def test_gradients_of_tables_repeat_to_the_bit():
    first, second = (tables("tf32", 2, (7, 5), (2, 70))[0][1] for _ in range(2))
    assert torch.equal(first, second)


def test_tables_that_do_not_fit_stay_pytorch_s(calls, monkeypatch):
    def gradient(w, rows, function=F.embedding, **how):
        w = w.requires_grad_()
        return torch.autograd.grad(vmap(stackable(lambda w, r: function(r, w, **how), "tf32"))(w, rows).sum(), w)[0]

    w, rows = torch.randn(2, 4, 3, device=DEVICE), torch.tensor([[0, 3], [1, 1]], device=DEVICE)
    counts = torch.tensor([[1.0, 0, 0, 1], [0, 2, 0, 0]], device=DEVICE)[..., None].expand(2, 4, 3)
    assert torch.equal(gradient(w, rows, lambda r, w: torch.embedding(w, r)), counts) and calls.pop()
    assert torch.equal(gradient(w, rows.int()), counts) and calls.pop()
    assert torch.equal(gradient(w.double(), rows), counts.double())
    frozen = vmap(stackable(F.embedding, "tf32"), (0, None))(rows, w[0])
    monkeypatch.setattr(embedding, "MAX_LOOKS", 7)
    assert torch.equal(gradient(w, rows), counts)
    assert torch.equal(frozen, w[0][rows]) and not calls


# -- linear layers -----------------------------------------------------------------------------------------------------
def layers(precision, n, tokens, outputs, inputs, bias=True, shared=False):
    """Outputs and gradients of a stack by ours, and by PyTorch in float64, one model after the other."""
    torch.manual_seed(0)
    x = torch.randn(*(() if shared else (n,)), *tokens, inputs)
    w, b = torch.randn(n, outputs, inputs) / inputs**0.5, torch.randn(n, outputs) if bias else None
    d = torch.randn(n, *tokens, outputs)

    def ours(x, w, b):
        return linear.linear(precision, x, w, b)

    def of_model(i):
        single = (x if shared else x[i], w[i], b[i] if bias else None, d[i])
        return results(F.linear, *(None if v is None else v.double() for v in single))

    expected = [torch.stack(v) for v in zip(*map(of_model, range(n)), strict=True)]
    if shared:
        expected[1] = expected[1].sum(0)
    x, w, b, d = (None if v is None else v.to(DEVICE) for v in (x, w, b, d))
    dims = None if shared else 0, 0, 0 if bias else None
    return results(vmap(ours, dims), x, w, b, d.bfloat16() if precision == "bf16" else d), expected


LINEAR = {
    "16 tokens": (2, (16,), 5, 3, {}),
    "sentences": (2, (3, 7), 5, 3, {}),
    "one model, no bias": (1, (2, 3, 4), 3, 5, {"bias": False}),
    "one input": (2, (17,), 4, 1, {}),
    "one output": (2, (17,), 1, 4, {}),
    "many inputs": (1, (33,), 3, 130, {}),
    "many outputs": (2, (18,), 65, 66, {}),
    "many tokens, in shares": (2, (3, 200), 5, 6, {}),
    "many tokens, no bias": (1, (257,), 5, 6, {"bias": False}),
    "the stack shares the input": (3, (2, 9), 5, 3, {"shared": True}),
}


@pytest.mark.parametrize("shape", [(1,), (1, 4), ()])
def test_biases_that_are_broadcast_are_pytorch_s(shape, calls):
    x, w, b = (
        torch.randn(2, 16, 3, device=DEVICE),
        torch.randn(2, 4, 3, device=DEVICE),
        torch.randn(2, *shape, device=DEVICE),
    )
    got = vmap(stackable(lambda x, w, b: F.linear(x, w, b), "float32"))(x, w, b)
    torch.testing.assert_close(got, x @ w.mT + b.view(2, 1, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", LINEAR)
def test_linear_layers_equal_autograd_in_float64(case, calls):
    n, tokens, outputs, inputs, how = LINEAR[case]
    got, expected = layers("float32", n, tokens, outputs, inputs, **how)
    assert len(got) == 4 - (not how.get("bias", True)) and calls == ["weight_gradient"]
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == torch.float32 and error(a, b) < BOUND["float32"]


def test_linear_layers_round_their_products_to_tf32():
    """The bias's gradient is summed up as it is. The interpreter and PyTorch's products on a CPU do not round."""
    got, expected = layers("tf32", 2, (40,), 20, 33)
    assert all(error(a, b) < BOUND["tf32"] for a, b in zip(got, expected, strict=True))
    assert error(got[3], expected[3]) < BOUND["float32"]
    assert not CUDA or error(got[2], expected[2]) > 1e-5


def test_linear_layers_behave_as_under_autocast(monkeypatch):
    """The output is bfloat16; gradients have the dtypes of the arguments."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    got, expected = layers("bf16", 2, (40,), 20, 33)
    assert [v.dtype for v in got] == [torch.bfloat16] + 3 * [torch.float32]
    assert all(1e-5 < error(a, b) < BOUND["bf16"] for a, b in zip(got, expected, strict=True))


def test_the_shares_of_the_tokens_are_added_in_a_fixed_order(monkeypatch):
    x, d = torch.randn(2, 600, 6, device=DEVICE), torch.randn(2, 600, 5, device=DEVICE)
    shares, empty = [], products.empty
    monkeypatch.setattr(products, "empty", lambda shape, *rest: shares.append(shape[0]) or empty(shape, *rest))
    first, second = (products.weight_gradient(x, d, True, "tf32") for _ in range(2))
    assert all(map(torch.equal, first, second)) and shares == [3, 3]


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_only_the_wanted_gradients_of_a_linear_layer_are_computed(wanted, calls):
    values = {"x": torch.randn(2, 17, 3), "weight": torch.randn(2, 4, 3), "bias": torch.randn(2, 4)}
    values = {k: v.to(DEVICE).requires_grad_(k == wanted) for k, v in values.items()}
    got, expected = (
        torch.autograd.grad(function(*values.values()).pow(2).sum(), values[wanted])[0]
        for function in (vmap(stackable(F.linear, "float32")), lambda x, w, b: x @ w.mT + b[:, None])
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert calls == ([] if wanted == "x" else ["weight_gradient"])


def test_linear_layers_that_do_not_fit_stay_pytorch_s(calls):
    x, w = torch.randn(2, 16, 3, device=DEVICE), torch.randn(2, 4, 3, device=DEVICE, requires_grad=True)

    def gradient(x, w, dims=0):
        return torch.autograd.grad(vmap(stackable(F.linear, "tf32"), dims)(x, w).sum(), w)[0]

    gradient(x[:, :15], w)
    gradient(x[:, 0], w)
    gradient(x, w[0], (0, None))
    gradient(x.double(), w.double())
    assert not calls
    with pytest.raises(RuntimeError, match=r"shape|size"):
        gradient(x[..., :2], w)


# -- the last step of a gradient ---------------------------------------------------------------------------------------
def test_parts_are_added_up_and_put_side_by_side():
    """More parts than one kernel takes, of all forms: short and long, with few and many shares, any strides."""
    torch.manual_seed(0)
    sizes = [(1, 1), (1, 3000), (5, 7), (70, 64), (256, 1), (3, 1025), *[(2, 4 + i) for i in range(40)]]
    parts = [torch.randn(shares, 2, length, device=DEVICE) for shares, length in sizes]
    parts[3] = torch.randn(2, 70, 64, device=DEVICE).movedim(1, 0)
    parts[4] = torch.randn(256, 2, 9, device=DEVICE)[..., 3:4]
    got = join.joined(parts)
    assert error(got, torch.cat([v.cpu().double().sum(0) for v in parts], 1)) < 1e-6
    assert torch.equal(got, join.joined(parts))


def test_a_gradient_ends_with_one_kernel():
    """The sums that it ends with are part of the kernel. All else stays an operation of its own."""

    def parts(x):  # of a stack of two models
        return [
            x.sum(0).view(2, 15),
            x.sum(2),  # another axis
            x.sum((0, 2)),  # two axes
            x.sum(0, keepdim=True)[0].flatten(1),
            x.bfloat16().sum(0, dtype=torch.float32).flatten(1),
            x.repeat(100, 1, 1, 1).sum(0).flatten(1),  # too many shares
            x[0].mT.flatten(1),
            x[0, :, :0].flatten(1),  # no numbers
            x[:0].sum(0).flatten(1),  # no shares
        ]

    def gradient(x):
        return torch.cat([v.reshape(2, -1) for v in parts(x)], 1).view(1, 2, -1).flatten(0, 1)

    def names(graph):
        return [str(node.target).split(".")[1] for node in graph.graph.nodes if node.op == "call_function"]

    x = torch.randn(4, 2, 3, 5, device=DEVICE)
    graph = record(gradient, x)
    before = names(graph)
    join_parts(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    after = names(graph)
    assert error(graph(x + 1), gradient(x + 1).double().cpu()) < 1e-6
    assert [(before.count(k), after.count(k)) for k in ("sum", "cat", "join")] == [(7, 5), (1, 0), (0, 1)]


def test_a_sum_of_what_is_changed_later_stays_where_it_is():
    def gradient(x):
        y = x * 2
        total = y.sum(0)
        y.add_(1)
        return torch.cat([total, y[0]], 1)

    x = torch.randn(3, 2, 4, device=DEVICE)
    graph = record(gradient, x)
    join_parts(graph)
    graph.recompile()
    assert operators(graph) == ["join"] and error(graph(x), gradient(x).double().cpu()) < 1e-6


@pytest.mark.parametrize(
    "gradient",
    [
        lambda x: torch.cat([x, x]),
        lambda x: torch.cat([x, x], 1).double(),
        lambda x: torch.cat([x.bfloat16()] * 2, 1),
        lambda x: x * 2,
    ],
    ids=["another axis", "more after it", "bfloat16", "no concatenation"],
)
def test_other_recordings_are_not_joined(gradient):
    x = torch.randn(2, 3, device=DEVICE)
    graph = record(gradient, x)
    join_parts(graph)
    assert not operators(graph)


# -- whole networks ----------------------------------------------------------------------------------------------------
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(7, 6, padding_idx=0), nn.Linear(6, 3)
        self.body = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6, bias=False))

    def forward(self, x):
        x = self.table(x)
        return self.out((x + self.body(x)).mean(1))


class Attending(Words):
    def __init__(self, need_weights=True):
        super().__init__()
        self.body = nn.MultiheadAttention(6, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x):
        x = self.table(x)
        x, _ = self.body(x, x, x, need_weights=self.need_weights)
        x, _ = self.body(x[:, :8], x, x, need_weights=self.need_weights)  # the packed weight is split
        return self.out(x.mean(1))


def stack_of(model):
    """The objective of a network, the points of a stack and a batch for each."""
    torch.manual_seed(0)
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def objective(x, tokens, targets):
        parts = x.split([shape.numel() for shape in shapes.values()])
        named = {name: v.view(shape) for v, (name, shape) in zip(parts, shapes.items(), strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, named, (tokens,)), targets)

    x = torch.cat([p.detach().flatten() for p in model.parameters()])
    arguments = x + 0.3 * torch.randn(2, len(x)), torch.randint(7, (2, 2, 9)), torch.randint(3, (2, 2))
    return objective, *(v.to(DEVICE) for v in arguments)


@pytest.mark.parametrize(
    ("make", "number"),
    [(Words, 2), (Attending, 5), (lambda: Attending(need_weights=False), 5)],
    ids=["linear", "attention", "fused attention"],
)
def test_a_stack_of_networks_has_the_gradients_of_the_loop(make, number):
    """Recorded, and replayed with other numbers. The last layer has too few rows."""
    objective, x, tokens, targets = stack_of(make())
    stacked = StackedGradient(objective, kernels="float32")
    graph = stacked.record(x, tokens, targets)
    got, truth = graph(x + 0.1, 6 - tokens, targets), stacked.loop((x + 0.1).double(), 6 - tokens, targets)
    assert error(got, truth.cpu()) < 1e-5
    names = operators(graph)
    assert [names.count(k) for k in ("embedding_weight", "linear_weight", "join")] == [1, number, 1]
    assert not any("embedding_dense_backward" in str(node.target) for node in graph.graph.nodes)


def test_points_that_share_a_batch(calls):
    """Two axes of a stack; the tokens lack one of them."""
    objective, x, *batch = stack_of(Words())
    stacked = StackedGradient(objective, frozen=True, kernels="float32")
    x = torch.cat([x, x + 0.1])
    assert error(stacked.vmapped(x, *batch), stacked.loop(x.double(), *batch).cpu()) < 1e-5
    assert len(calls) == 3


def test_the_kernels_compile_for_an_h200_without_spills(tmp_path):
    rows = compiled(tmp_path, "stacked")
    assert len(rows) == 48 and all(row[-1] == "0" for row in rows), rows


# -- on a GPU ------------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("precision", BOUND)
def test_usual_sizes_on_a_gpu(precision):
    for number in (80, 10_000):
        (_, got), (_, expected) = tables(precision, 20, (number, 64), (16, 64))
        assert error(got, expected) < 3 * BOUND[precision]
    x, d = torch.randn(20, 1024, 768, device="cuda"), torch.randn(20, 1024, 1000, device="cuda")
    for inputs, outputs in ((64, 256), (256, 64), (768, 1000)):
        pair = x[..., :inputs], d[..., :outputs]
        exact, other = (v.double().cpu() for v in pair)
        w, b = torch.randn(20, outputs, inputs, device="cuda"), torch.randn(20, outputs, device="cuda")
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        got = [
            *(join.joined([v.flatten(2)]).view(v.shape[1:]) for v in products.weight_gradient(*pair, True, precision)),
            products.multiplied(pair[0], w.mT, b, precision, dtype),
            products.multiplied(pair[1], w, None, precision, dtype),
        ]
        wide = w.double().cpu()
        expected = other.mT @ exact, other.sum(1), exact @ wide.mT + b.double().cpu()[:, None], other @ wide
        assert all(error(a, b) < 3 * BOUND[precision] for a, b in zip(got, expected, strict=True))


def test_replicas_are_evaluated_by_the_kernels_of_their_path(monkeypatch):
    tokens = torch.randint(0, 9, (12, 6))
    network, loss = transformer((6,), 9, width=8, layers=1, heads=2)
    problem = fedda.problem(network, loss, x=tokens, y=tokens.roll(-1, 1), client=torch.arange(12) % 3, batch=2)
    x = problem.full_point() * torch.tensor([[1.0], [1.1]])
    inputs = problem.standardised(problem.pick(problem.data, slice(5))).x
    expected = torch.stack([problem.inference(one, inputs) for one in x])
    monkeypatch.setattr(problem.gradient_paths, "chosen", "layers")
    used, forward = [], row_norm.forward
    monkeypatch.setattr(row_norm, "forward", lambda *args: used.append(len(args[0])) or forward(*args))
    got = problem._evaluation.outputs(x, inputs)
    assert error(got, expected.double().cpu()) < 1e-6 and used == [2, 2, 2]
