"""Our attention for stacks of models against PyTorch's in float64: on a GPU where there is one, else in Triton's
interpreter, which computes in float32 whatever the precision, but for bfloat16."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional as F

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read where the kernels are defined: before they are imported
pytest.importorskip("triton", reason="needs Triton")

from fedda.problems.gradients import attention as ours  # noqa: E402
from fedda.problems.gradients.kernels import attention as kernels  # noqa: E402
from fedda.problems.gradients.kernels.launch import Compiling  # noqa: E402
from fedda.problems.gradients.stackable import Stackable, has_kernels, stackable  # noqa: E402
from fedda.problems.gradients.vmap import StackedGradient  # noqa: E402
from test_kernels import bfloat16_products  # noqa: E402, F401
from test_layers import DEVICE, error, operators, scalar_bounds, stack_of  # noqa: E402, F401

needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


def tensors(n=2, lead=(2, 2), queries=7, keys=None, size=4, shared="", packed=False, mask=None, dtype=None):
    """q, k and v of a stack, with the axis of the stack for each (None if shared), and a mask with its axis."""
    torch.manual_seed(0)
    keys = keys or queries
    if packed:  # views of one projection [n, batch, T, 3, heads, size]
        batch, heads = lead
        q, k, v = torch.randn(n, batch, queries, 3, heads, size).permute(3, 0, 1, 4, 2, 5)
    else:
        q, k, v = (torch.randn(n, *lead, rows, size) for rows in (queries, keys, keys))
    q, k, v = (x[0] if name in shared else x for name, x in zip("qkv", (q, k, v), strict=True))
    bias = torch.randn(mask or ())
    if dtype is torch.bool:
        bias = bias < 0.5
        bias[..., 0] = True  # no row is without a key
    return (q, k, v), [None if name in shared else 0 for name in "qkv"], bias if mask else None


def results(function, inputs, d):
    """The output, and the gradients of its product with d."""
    inputs = [v.detach().requires_grad_() for v in inputs]
    out = function(*inputs)
    return out, *torch.autograd.grad(out, inputs, d)


def both(precision, own_mask=False, causal=False, scale=None, given=None, **how):
    """Ours for a stack, and PyTorch's in float64 for one model after the other."""
    inputs, dims, mask = given or tensors(**how)
    n = next(len(v) for v, dim in zip(inputs, dims, strict=True) if dim == 0)
    options = {"is_causal": causal, "scale": scale}

    def of_model(v, i, dim):
        return v if v is None or dim is None else v[i]

    def reference(q, k, v):
        outs = []
        for i in range(n):
            m = of_model(mask, i, 0 if own_mask else None)
            m = m.double() if m is not None and m.dtype != torch.bool else m
            own = (of_model(x, i, dim) for x, dim in zip((q, k, v), dims, strict=True))
            outs.append(F.scaled_dot_product_attention(*own, m, **options))
        return torch.stack(outs)

    def stacked(q, k, v):
        def one(q, k, v, m):
            return ours.attention(q, k, v, m, kernels=precision, **options)

        m = None if mask is None else mask.to(DEVICE)
        return vmap(one, (*dims, 0 if own_mask else None))(q, k, v, m)

    doubles = [v.double() for v in inputs]
    torch.manual_seed(1)
    d = torch.randn(reference(*doubles).shape)
    expected = results(reference, doubles, d.double())
    got = results(
        stacked, [v.to(DEVICE) for v in inputs], d.to(DEVICE, torch.bfloat16 if precision == "bf16" else None)
    )
    return got, expected


CASES = {
    "7 tokens": {},
    "causal": {"causal": True, "queries": 9, "size": 16},
    "65 tokens, causal": {"causal": True, "queries": 65, "lead": (1, 1)},
    "130 tokens": {"queries": 130, "n": 1, "lead": (1, 1), "size": 16},
    "130 tokens, causal": {"causal": True, "queries": 130, "n": 1, "lead": (1, 1)},
    "a few queries": {"queries": 3, "keys": 70, "causal": True, "lead": (1, 2)},
    "many queries": {"queries": 70, "keys": 3, "causal": True, "lead": (1, 2)},
    "one query": {"queries": 1, "keys": 5},
    "one query and key, of one number": {"queries": 1, "keys": 1, "size": 1},
    "heads of 5 numbers": {"size": 5, "scale": 0.3},
    "heads of 64 numbers": {"size": 64},
    "heads of 80 numbers": {"size": 80, "lead": (1, 1)},
    "heads of 128 numbers": {"size": 128, "lead": (1, 1)},
    "one model": {"n": 1},
    "no batch and no heads": {"lead": ()},
    "heads": {"lead": (3,)},
    "more axes": {"lead": (2, 1, 3)},
    "views of one projection": {"packed": True, "size": 8},
    "views of one projection, two blocks": {"packed": True, "size": 8, "queries": 40, "lead": (1, 2), "causal": True},
    "shared queries": {"shared": "q", "keys": 5},
    "shared keys": {"shared": "k"},
    "shared keys and values": {"shared": "kv"},
    "a mask": {"mask": (7, 7), "dtype": torch.bool},
    "a mask of each model and sample": {"mask": (2, 2, 1, 1, 7), "dtype": torch.bool, "own_mask": True},
    "a bias": {"mask": (7, 40), "keys": 40},
    "a bias of each head": {"mask": (2, 7, 1), "scale": 2.0},
    "a bias of each model": {"mask": (2, 7, 7), "own_mask": True},
}


@pytest.mark.parametrize("case", CASES)
def test_equals_pytorch_in_float64(case):
    got, expected = both("float32", **CASES[case])
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == torch.float32 and error(a, b) < 2e-6


def test_blocks_of_64_tokens():
    """Those of full precision have 32."""
    got, expected = both("tf32", causal=True, queries=65, keys=130, n=1, lead=(1, 1))
    assert all(error(a, b) < (2e-3 if CUDA else 2e-6) for a, b in zip(got, expected, strict=True))


def test_bfloat16_behaves_as_under_autocast(monkeypatch):
    """The output is bfloat16; gradients have the dtypes of the arguments. Without autocast, float32 stays float32."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    for case in ({"causal": True, "queries": 65}, {"mask": (7, 7)}):
        got, expected = both("bf16", **case)
        assert [v.dtype for v in got] == [torch.bfloat16] + 3 * [torch.float32]
        assert all(1e-5 < error(a, b) < 2e-2 for a, b in zip(got, expected, strict=True))
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float16)
    assert ours.precision_of("bf16", torch.ones(1)) == ""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: False)
    assert [ours.precision_of(p, torch.ones(1)) for p in ("float32", "tf32", "bf16")] == ["float32", "tf32", "tf32"]


def test_a_bfloat16_model_has_bfloat16_gradients():
    inputs, dims, _ = tensors()
    got, expected = both("bf16", given=([v.bfloat16() for v in inputs], dims, None))
    assert {v.dtype for v in got} == {torch.bfloat16}
    assert all(error(a, b) < 2e-2 for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_query_without_keys_is_0_and_has_no_gradient_as_in_pytorch(dtype):
    """In the plain form it is NaN. Here the first 32 keys, a block, are hidden from some other queries."""
    inputs, dims, mask = tensors(queries=3, keys=40, mask=(3, 40), dtype=torch.bool)
    mask[0], mask[1, :33] = False, False
    mask[1, 33:] = True
    if dtype != torch.bool:
        mask = torch.zeros(3, 40).masked_fill(~mask, -torch.inf)
    got, expected = both("float32", given=(inputs, dims, mask))
    assert not got[0][..., 0, :].any() and not got[1][..., 0, :].any()
    for a, b in zip(got, expected, strict=True):
        assert error(a, b) < 2e-6


def test_large_scores():
    (q, k, v), dims, _ = tensors(queries=40)
    for a, b in zip(*both("float32", given=((100 * q, k, v), dims, None)), strict=True):
        assert error(a, b) < 1e-4  # a rounding of a score of 500 is 3e-5


def test_gradients_repeat_to_the_bit():
    (q, k, v), dims, _ = tensors(queries=65, n=1)
    first, second = (both("tf32", causal=True, given=((q, k, v), dims, None))[0] for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_results_have_the_memory_order_of_the_queries():
    """So what follows, and the gradient of the projection, copy nothing."""
    (q, k, v), *_ = tensors(packed=True)
    q, k, v = (x.to(DEVICE) for x in (q, k, v))
    out, sums = torch.ops.fedda.attention(q, k, v, None, False, 0.5, "float32")
    assert out.shape == q.shape and out.transpose(2, 3).is_contiguous() and sums.is_contiguous()
    for x in torch.ops.fedda.attention_backward(out, q, k, v, None, out, sums, False, 0.5, "float32"):
        assert x.transpose(2, 3).is_contiguous()
    turned = q.contiguous().transpose(-1, -2).contiguous().transpose(-1, -2)  # rows are not side by side: a copy
    other, _ = torch.ops.fedda.attention(turned, k, v, None, False, 0.5, "float32")
    assert torch.equal(other, out)


def test_one_launch_if_a_block_has_all_keys(monkeypatch):
    launched, launcher = [], kernels.launcher
    monkeypatch.setattr(kernels, "launcher", lambda kernel, *grid: launched.append(kernel) or launcher(kernel, *grid))
    both("float32", queries=40, keys=32, lead=(), n=1)
    assert launched == [kernels.attend, kernels.key_gradients]
    both("float32", keys=33, lead=(), n=1)
    assert launched[2:] == [kernels.attend, kernels.key_gradients, kernels.query_gradients]


def test_if_kernels_are_only_compiled_what_follows_sees_numbers(monkeypatch):
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    monkeypatch.setattr(Compiling, "now", True)
    monkeypatch.setattr(kernels, "launcher", lambda *_: lambda *args, **options: None)
    try:
        got, _ = both("float32")
        assert not any(v.any() for v in got)
    finally:
        torch.use_deterministic_algorithms(False)


# -- what does not fit, and whole networks -----------------------------------------------------------------------------
@pytest.fixture
def taken(monkeypatch):
    """The shapes that our kernels were called with, for a model."""
    calls, by_kernels = [], ours.by_kernels
    monkeypatch.setattr(
        ours, "by_kernels", lambda how, q, *rest: calls.append(tuple(q.shape)) or by_kernels(how, q, *rest)
    )
    return calls


def test_attention_that_does_not_fit_stays_plain(taken):
    def same(q, k, v, *args, **options):
        got = vmap(stackable(lambda *a: F.scaled_dot_product_attention(*a, *args, **options), "float32"))(q, k, v)
        torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, *args, **options))

    (q, k, v), *_ = tensors()
    same(q, k, v)
    assert taken.pop() == (2, 2, 7, 4)
    same(*(x.double() for x in (q, k, v)))
    same(q, k, torch.randn(2, 2, 2, 7, 5))  # values of another size
    same(*(torch.randn(2, 2, 3, 129) for _ in range(3)))
    same(q, k, v, torch.ones(7, 7, requires_grad=True))
    same(q[:, :, :, :0], k, v)  # no query
    assert not taken
    same(*(torch.randn(2, 2, heads, 3, 5) for heads in (4, 2, 2)), enable_gqa=True)
    assert taken.pop() == (2, 4, 3, 5)
    with Stackable("float32"):
        F.scaled_dot_product_attention(q, k, v)  # not under vmap
    dropped = vmap(lambda *a: ours.attention(*a, dropout=lambda weights: 0 * weights, kernels="float32"))(q, k, v)
    assert not taken and not dropped.any()
    with pytest.raises(RuntimeError, match="size"):
        vmap(stackable(F.scaled_dot_product_attention, "float32"))(q, k[..., :3], v)


class Words(nn.Module):
    """A transformer on vectors; `how` is the form of its attention."""

    def __init__(self, how):
        super().__init__()
        self.how, self.out = how, nn.Linear(8, 3)
        if how == "encoder":
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        elif how == "fused":
            self.qkv = nn.Linear(8, 24)
        else:
            self.layer = nn.MultiheadAttention(8, 2, batch_first=how != "weights")

    def forward(self, x):
        if self.how == "encoder":
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
            h = self.layer(x, src_mask=mask, is_causal=True)
        elif self.how == "fused":
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        else:
            hidden = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]) > 3
            h, weights = self.layer(
                x, x, x, hidden if self.how == "padded" else None, need_weights=self.how != "padded"
            )
            if self.how == "both":
                h = h + weights.sum(-1, keepdim=True) * weights.amax(-1, keepdim=True)
        return self.out(h.mean(1))


@pytest.mark.parametrize("how", ["fused", "encoder", "padded", "weights", "both"])
def test_a_stack_of_networks_has_the_gradients_of_the_loop(how, taken):
    """In training mode. Weights of nn.MultiheadAttention that nobody uses are not computed."""
    objective, *arguments = stack_of(lambda: Words(how), (5, 8))
    stacked = StackedGradient(objective, kernels="float32")
    graph = stacked.record(*arguments)
    x, inputs, targets = arguments
    got = graph(x + 0.1, 2 * inputs, targets)
    truth = stacked.loop((x + 0.1).double(), (2 * inputs).double(), targets)
    assert error(got, truth.cpu()) < 1e-5
    samples, heads, tokens = (5, 2, 2) if how == "weights" else (2, 2, 5)  # its first axis has the tokens
    assert set(taken) == {(samples, heads, tokens, 4)}
    assert [name for name in operators(graph) if "attention" in name] == ["attention", "attention_backward"]
    names = [str(node.target) for node in graph.graph.nodes]
    assert any("aten._softmax." in name for name in names) == (how == "both")
    square = [
        n for n in graph.graph.nodes if "tensor" in n.meta and tuple(n.meta["tensor"].shape[-2:]) == (tokens, tokens)
    ]
    assert all("bmm" not in str(node.target) for node in square) or how == "both"


@pytest.mark.parametrize("how", ["encoder", "padded"])
def test_without_kernels_multi_head_attention_is_products_and_a_softmax(how):
    """PyTorch's fused attention has no rule for a stack."""
    objective, *arguments = stack_of(lambda: Words(how), (5, 8))
    stacked = StackedGradient(objective)
    graph = stacked.record(*arguments)
    assert not any("scaled_dot_product" in str(node.target) for node in graph.graph.nodes)
    torch.testing.assert_close(graph(*arguments), stacked.loop(*arguments), rtol=1e-4, atol=1e-5)


def test_points_that_share_a_batch():
    objective, x, *batch = stack_of(lambda: Words("fused"), (5, 8), frozen=("qkv.bias",))
    stacked = StackedGradient(objective, frozen=True, kernels="float32")
    got = stacked.record(x.repeat(2, 1), *batch)(x.repeat(2, 1), *batch)
    truth = stacked.loop(x.double(), batch[0].double(), batch[1]).repeat(2, 1)
    assert error(got, truth.cpu()) < 1e-5


def test_a_learned_bias_has_a_gradient(taken):
    """The kernels have none for it."""
    q = torch.randn(2, 3, 5, 4)

    def objective(x, q):
        return F.scaled_dot_product_attention(q, q, q, x.view(5, 5)).square().sum()

    x = torch.randn(2, 25)
    stacked = StackedGradient(objective, kernels="float32")
    torch.testing.assert_close(stacked.record(x, q)(x, q), stacked.loop(x, q), rtol=1e-4, atol=1e-5)
    assert not taken


def test_a_model_with_multi_head_attention_has_kernels():
    model = nn.Sequential(nn.Linear(3, 3), nn.MultiheadAttention(8, 2))
    assert has_kernels(model) and not has_kernels(model.requires_grad_(False))


def test_compiled_for_an_h200_they_keep_all_numbers_in_registers(tmp_path):
    """By the compiler itself: in the interpreter nothing is compiled."""
    words = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    script = Path(__file__).parent / "hopper_attention.py"
    done = subprocess.run([sys.executable, script], env=os.environ | words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 22
    for name, registers, spilled, shared in found:
        assert registers <= 255 and spilled == 0 and shared <= 200_000, name


# -- on a GPU ----------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("precision", "bound"), [("float32", 2e-6), ("tf32", 2e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize(("queries", "size"), [(64, 16), (256, 64), (200, 128)])
def test_usual_sizes_on_a_gpu(queries, size, precision, bound):
    (q, k, v), dims, _ = tensors(n=10, lead=(4, 4), queries=queries, size=size, packed=True)
    if precision == "bf16":
        q, k, v = (x.bfloat16() for x in (q, k, v))
    got, expected = both(precision, causal=True, given=((q, k, v), dims, None))
    assert all(error(a, b) < bound for a, b in zip(got, expected, strict=True))


@pytest.mark.gpu
@needs_gpu
def test_a_captured_pass_has_the_same_bits():
    q, k, v = (x.cuda() for x in tensors(n=4, queries=70, size=16)[0])

    def run():
        out, sums = torch.ops.fedda.attention(q, k, v, None, True, 0.25, "tf32")
        return out, *torch.ops.fedda.attention_backward(out, q, k, v, None, out, sums, True, 0.25, "tf32")

    eager = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    assert all(map(torch.equal, captured, eager))


@pytest.mark.parametrize("kernels", ["", "float32"])
def test_a_query_without_keys_gives_0_on_every_path(kernels):
    """As PyTorch's attention does, for masks of truth values and of numbers, also together with a causal one."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 4, 8, device=DEVICE)
    mask = torch.ones(4, 4, dtype=torch.bool, device=DEVICE)
    mask[0] = mask[2] = False
    for hidden in (mask, torch.zeros(4, 4, device=DEVICE).masked_fill(~mask, -torch.inf)):
        stacked = vmap(stackable(lambda *t, hidden=hidden: F.scaled_dot_product_attention(*t, hidden), kernels))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = stacked(*leaves)
        gradients = torch.autograd.grad(out.square().sum(), leaves)
        assert not out[..., [0, 2], :].any() and out[..., [1, 3], :].all()
        assert not any(g.isnan().any() for g in gradients) and not gradients[0][..., [0, 2], :].any()
    both = vmap(stackable(lambda *t: F.scaled_dot_product_attention(*t, mask, is_causal=True), kernels))(q, k, v)
    expected = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), mask & mask.new_ones(4, 4).tril())
    assert error(both, expected.cpu()) < 1e-6
