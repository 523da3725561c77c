"""The Triton kernels of recurrent layers against plain operations in float64: on a GPU where there is one, else in
Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fedda.problems.gradients.recurrent import recurrence
from fedda.problems.gradients.vmap import StackedGradient

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read where the kernels are defined: before they are imported
pytest.importorskip("triton", reason="needs Triton")

from fedda.problems.gradients import recurrent_kernels  # noqa: E402
from test_kernels import bfloat16_products  # noqa: E402, F401 - the interpreter multiplies the bits without it

DEVICE = "cuda" if CUDA else "cpu"
GATES = recurrent_kernels.GATES
BOUND = {"float32": 2e-6, "tf32": 2e-3 if CUDA else 2e-6, "bf16": 3e-2}  # the interpreter does not round to TF32
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


def inputs(kind, n, steps, batch, size, scale=1.0):
    """The arguments of `recurrence`, and weights for a sum of all its results."""
    torch.manual_seed(size)
    a = scale * torch.randn(n, steps, batch, GATES[kind] * size, dtype=torch.float64)
    h = torch.randn(n, batch, size, dtype=torch.float64)
    e = torch.randn(n, batch if kind == "lstm" else 1, size, dtype=torch.float64)
    w = torch.randn(n, GATES[kind] * size, size, dtype=torch.float64) / size**0.5
    return (a, h, e, w), torch.randn(2, n, steps, batch, size, dtype=torch.float64)


def results(kind, tensors, weights, kernels, dtype=torch.float32):
    """States, cells and all gradients."""
    tensors = [v.detach().to(DEVICE, dtype).requires_grad_() for v in tensors]
    out, extra = recurrence(*tensors, kind, kernels)
    by_out, by_extra = weights.to(out)
    total = (out * by_out).sum() + ((extra * by_extra).sum() if kind == "lstm" else 0)
    gradients = torch.autograd.grad(total, tensors, materialize_grads=True)
    return [v.detach().double().cpu() for v in (out, *([extra] if kind == "lstm" else []), *gradients)]


def largest_error(got, expected):
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(got, expected, strict=True))


def total_error(got, expected):
    return max(float((a - b).norm() / b.norm().clamp(min=1)) for a, b in zip(got, expected, strict=True))


def compare(kind, sizes, kernels, bound, dtype=torch.float32, error=largest_error, **more):
    tensors, weights = inputs(kind, *sizes, **more)
    expected = results(kind, [v.to(dtype) for v in tensors], weights, "", torch.float64)
    assert error(results(kind, tensors, weights, kernels, dtype), expected) < bound


SIZES = [(1, 1, 1, 1), (3, 4, 3, 5), (1, 4, 17, 33), (3, 1, 17, 33)]  # models, steps, samples, units


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", GATES)
def test_states_and_gradients_are_those_of_plain_operations(kind, sizes):
    compare(kind, sizes, "float32", BOUND["float32"])


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_every_precision_of_the_products(kind, precision):
    compare(kind, (2, 3, 3, 33), precision, BOUND[precision])


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_bfloat16_tensors_as_autocast_makes_them(kind):
    """States and gradients are rounded at each step, sums are not."""
    compare(kind, (2, 3, 3, 33), "bf16", 5e-2, torch.bfloat16)


def test_several_blocks_of_samples():
    compare("gru", (1, 2, 70, 3), "float32", BOUND["float32"])


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("kind", GATES)
def test_large_numbers(kind):
    compare(kind, (1, 3, 3, 5), "float32", 5e-6, scale=100.0)


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy's, in the interpreter
def test_activations_are_accurate_everywhere():
    """Without recurrent weights, the gates are the activations themselves."""
    x = torch.cat([torch.linspace(-100, 100, 101), torch.logspace(-6, 0, 80), torch.tensor([1e30, -1e30, 0.25])])
    a, zero = x.expand(1, 1, 4, -1).transpose(2, 3).reshape(1, 1, -1, 4).to(DEVICE), torch.zeros(1, len(x), 1)
    zero = zero.to(DEVICE)
    *_, gates = torch.ops.fedda.recurrence(a, zero, zero, torch.zeros(1, 4, 1, device=DEVICE), "lstm", "float32")
    i, _, n, _ = gates[0, 0].cpu().double().unbind(-1)
    torch.testing.assert_close(n, x.double().tanh(), rtol=2e-6 if CUDA else 1e-6, atol=0)
    torch.testing.assert_close(i, x.double().sigmoid(), rtol=2e-5, atol=1e-6)  # exp(100) has an error of 100 roundings


def test_the_same_bits_twice_and_a_nan_stays_in_its_model():
    for kind in ("lstm", "gru", "relu"):
        (a, *rest), weights = inputs(kind, 3, 2, 3, 5)
        first, again = (results(kind, (a, *rest), weights, "tf32") for _ in range(2))
        assert all(map(torch.equal, first, again))
        a[1, 1, 0] = torch.nan
        broken = results(kind, (a, *rest), weights, "tf32")
        assert all(torch.equal(v[[0, 2]], fine[[0, 2]]) for v, fine in zip(broken, first, strict=True))
        assert broken[0][1, 1:, 0].isnan().all() and not broken[0][1, :, 1:].isnan().any()


def test_if_kernels_are_only_compiled_what_follows_sees_numbers(monkeypatch):
    """BCELoss would stop the whole process for a NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    monkeypatch.setattr(recurrent_kernels.Compiling, "now", True)
    try:
        for kind in ("lstm", "gru", "tanh"):
            tensors, weights = inputs(kind, 2, 3, 3, 5)
            *states, d_a, d_h, d_e, d_w = results(kind, tensors, weights, "tf32")
            assert not any(v.any() for v in (*states, d_a, d_h, d_e, d_w)), kind
    finally:
        torch.use_deterministic_algorithms(False)


def test_float64_never_takes_them():
    tensors, weights = inputs("lstm", 2, 3, 3, 5)
    plain, other = (results("lstm", tensors, weights, how, torch.float64) for how in ("", "tf32"))
    assert all(map(torch.equal, plain, other))


class Network(nn.Module):
    def __init__(self, cell, **options):
        super().__init__()
        self.cell = cell(4, 6, batch_first=True, **options)
        self.out = nn.Linear(6 * (1 + options.get("bidirectional", False)), 3)

    def forward(self, x):
        out, _ = self.cell(x)
        return self.out(out[:, -1] + out.mean(1))


@pytest.mark.parametrize(
    ("cell", "options"), [(nn.LSTM, {"bidirectional": True}), (nn.GRU, {"num_layers": 2}), (nn.RNN, {})]
)
def test_a_stack_of_networks_has_the_gradients_of_the_loop(cell, options, monkeypatch):
    torch.manual_seed(0)
    model = Network(cell, **options).to(DEVICE)
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def objective(x, inputs, targets):
        parts = x.split([shape.numel() for shape in shapes.values()])
        named = {name: v.view(shape) for v, (name, shape) in zip(parts, shapes.items(), strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(model, named, (inputs,)), targets)

    x = torch.cat([p.detach().flatten() for p in model.parameters()]) + 0.1 * torch.randn(2, 1, device=DEVICE)
    batch = torch.randn(2, 2, 3, 4, device=DEVICE), torch.randint(0, 3, (2, 2), device=DEVICE)
    calls, run_steps = [], recurrent_kernels.run_steps
    monkeypatch.setattr(recurrent_kernels, "run_steps", lambda *args: calls.append(args[0]) or run_steps(*args))
    stacked = StackedGradient(objective, kernels="float32")
    got, expected = stacked.vmapped(x, *batch), stacked.loop(x, *batch)
    assert len(calls) == 2 * (1 + len(options))  # forward and backward, of each layer and direction
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_compiled_for_an_h200_they_keep_all_numbers_in_registers(tmp_path):
    """By the compiler itself: in the interpreter nothing is compiled."""
    words = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    script = Path(__file__).parent / "hopper_recurrent.py"
    done = subprocess.run([sys.executable, script], env=os.environ | words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert len(kernels) == 8
    for name, registers, spilled, shared in kernels:
        assert registers <= 128 and spilled == 0 and shared <= 100_000, name


# -- on a GPU ------------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("kind", GATES)
def test_usual_sizes_on_a_gpu(kind, precision):
    """A rounded number can switch a relu, whose gradient is then another: rare, but as large as the gradient."""
    sizes = (10, 16, 16, 256)
    if kind == "relu" and precision != "float32":
        compare(kind, sizes, precision, {"tf32": 0.1, "bf16": 0.3}[precision], error=total_error)
    else:
        compare(kind, sizes, precision, 10 * BOUND[precision])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_captured_pass_has_the_same_bits(kind):
    tensors, _ = inputs(kind, 4, 8, 16, 64)
    tensors = [v.float().cuda() for v in tensors]
    eager = torch.ops.fedda.recurrence(*tensors, kind, "tf32")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.ops.fedda.recurrence(*tensors, kind, "tf32")
    graph.replay()
    assert all(map(torch.equal, captured, eager))
