"""Our layers for stacks of models against autograd in float64: on a GPU where there is one, else in Triton's
interpreter, which computes in float32 whatever the precision, but for bfloat16."""

import math
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
triton = pytest.importorskip("triton", reason="needs Triton")

from fedda.problems.gradients import convolution  # noqa: E402
from fedda.problems.gradients.choose import GradientPaths  # noqa: E402
from fedda.problems.gradients.kernels import implicit_gemm  # noqa: E402
from fedda.problems.gradients.stackable import stackable  # noqa: E402
from fedda.problems.gradients.vmap import StackedGradient  # noqa: E402
from test_kernels import bfloat16_products  # noqa: E402, F401

DEVICE = "cuda" if CUDA else "cpu"


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """PyTorch's own convolutions round to TF32 by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(autouse=True)
def scalar_bounds(monkeypatch):
    """The interpreter cannot count up to a number that a kernel has computed: NumPy no longer takes arrays of one
    number for numbers."""
    if CUDA:
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def error(got, expected):
    return float((got.detach().cpu().double() - expected).norm() / expected.norm().clamp(min=1e-6))


def results(function, x, w, bias, d):
    """The output, and the gradients of its product with d."""
    inputs = [v.detach().requires_grad_() for v in (x, w, bias) if v is not None]
    out = function(*inputs, *[None] * (3 - len(inputs)))
    return out, *torch.autograd.grad(out, inputs, d)


def in_lines(v, axis=-3):
    """The same numbers, with the channels of a pixel side by side in memory."""
    return v.movedim(axis, -1).contiguous().movedim(-1, axis)


def both(precision, n, batch, x, w, bias=True, shared=False, last="", **how):
    """Ours for a stack, and PyTorch's in float64 for one model after the other. The channels of a pixel lie side by
    side in what `last` names."""
    torch.manual_seed(0)
    groups, fan = how.get("groups", 1), math.prod(w[1:])
    x = torch.randn(*(() if shared else (n,)), batch, *x)
    w, b = torch.randn(n, *w) / fan**0.5, torch.randn(n, w[0]) if bias else None
    operator = (F.conv1d, F.conv2d)[w.dim() - 4]
    assert x.shape[-w.dim() + 2] == w.shape[2] * groups

    def reference(x, w, bias):
        return operator(x, w, bias, **how)

    def ours(x, w, bias):
        return convolution.convolve(precision, x, w, bias, **how, last="y" in last)

    one = x if shared else x[0]
    d = torch.randn(n, *reference(one, w[0], None).shape)
    doubles = [None if v is None else v.double() for v in (x, w, b, d)]
    dims = (None if shared else 0, 0, None if b is None else 0, 0)
    expected = [
        results(reference, *(v if dim is None else v[i] for v, dim in zip(doubles, dims, strict=True)))
        for i in range(n)
    ]
    x, w, b, d = (None if v is None else v.to(DEVICE) for v in (x, w, b, d))
    if precision == "bf16":
        d = d.bfloat16()
    axis = 2 - w.dim()
    x, d = (in_lines(v, axis) if name in last else v for name, v in (("x", x), ("d", d)))
    got = results(vmap(ours, dims[:3]), x, w, b, d)
    expected = [torch.stack(v) for v in zip(*expected, strict=True)]
    if shared:
        expected[1] = expected[1].sum(0)
    return got, expected


CASES = {
    "3x3": (2, 2, (3, 5, 6), (5, 3, 3, 3), {"padding": 1}),
    "one model, one sample, no padding": (1, 1, (3, 5, 6), (5, 3, 3, 3), {"bias": False}),
    "stride 2, 17 channels": (2, 2, (17, 6, 5), (20, 17, 3, 3), {"stride": 2, "padding": 1}),
    "5x5, stride 3": (2, 1, (4, 8, 7), (3, 4, 5, 5), {"stride": 3, "padding": 2}),
    "1x1, stride 2": (2, 2, (16, 5, 5), (8, 16, 1, 1), {"stride": (2, 1), "padding": "valid", "bias": False}),
    "1x3, same": (2, 1, (4, 3, 6), (3, 4, 1, 3), {"padding": "same"}),
    "even kernel, same": (1, 2, (2, 5, 6), (3, 2, 2, 4), {"padding": "same"}),
    "dilated": (2, 1, (4, 7, 7), (4, 4, 3, 3), {"dilation": 2, "padding": 2}),
    "dilated with a stride": (2, 1, (4, 7, 8), (4, 4, 3, 3), {"dilation": (2, 1), "stride": 2, "padding": (2, 1)}),
    "depthwise": (1, 2, (3, 5, 5), (3, 1, 3, 3), {"groups": 3, "padding": 1, "stride": 2}),
    "groups": (2, 1, (6, 4, 5), (9, 2, 3, 3), {"groups": 3, "padding": (1, 0)}),
    "groups of many channels": (1, 1, (32, 3, 4), (36, 16, 3, 3), {"groups": 2, "padding": 1, "bias": False}),
    "the stack shares the input": (3, 1, (3, 5, 5), (4, 3, 3, 3), {"shared": True, "padding": 1}),
    "64 channels": (1, 1, (64, 4, 4), (64, 64, 3, 3), {"padding": 1}),
    "513 channels": (1, 1, (513, 2, 2), (2, 513, 1, 1), {}),
    "to 513 channels": (1, 1, (1, 2, 3), (513, 1, 1, 1), {"bias": False}),
    "many pixels, in shares": (1, 9, (2, 8, 8), (3, 2, 3, 3), {"padding": 1}),
    "many pixels and channels": (1, 9, (17, 8, 8), (18, 17, 1, 2), {"padding": (0, 1)}),
    "one dimension": (2, 2, (3, 9), (4, 3, 3), {"stride": 2, "padding": 1}),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", CASES)
def test_equals_autograd_in_float64(case):
    n, batch, x, w, how = CASES[case]
    got, expected = both("float32", n, batch, x, w, **how)
    assert len(got) == 4 - (not how.get("bias", True))
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == torch.float32 and error(a, b) < (1e-6 if CUDA else 5e-7)


LAST = {
    "3 channels": ("yd", 2, 2, (3, 5, 6), (5, 3, 3, 3), {"padding": 1}),
    "whole lines": ("xyd", 1, 3, (16, 8, 8), (18, 16, 3, 3), {"padding": 1}),
    "whole lines, stride 2": ("xyd", 2, 1, (17, 16, 16), (16, 17, 3, 3), {"padding": 1, "stride": 2}),
    "whole lines, 64 channels": ("xyd", 1, 1, (64, 8, 8), (8, 64, 1, 1), {}),
    "a gradient in the usual order": ("xy", 2, 1, (16, 4, 8), (8, 16, 3, 3), {"padding": 1}),
    "to the usual order": ("x", 1, 2, (16, 4, 8), (8, 16, 3, 3), {"padding": 1}),
} | {
    case: ("xyd", *CASES[case]) for case in (
        "stride 2, 17 channels", "5x5, stride 3", "1x1, stride 2", "dilated", "dilated with a stride", "depthwise",
        "groups", "groups of many channels", "64 channels", "513 channels", "one dimension",
    )
}  # fmt: skip


@pytest.mark.parametrize("case", LAST)
def test_channels_may_lie_side_by_side(case):
    last, n, batch, x, w, how = LAST[case]
    got, expected = both("float32", n, batch, x, w, **how, last=last)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == torch.float32 and error(a, b) < (1e-6 if CUDA else 5e-7)
    axis = 1 - len(w)
    for v, name in zip(got, "yx", strict=False):
        assert v[0, 0].numel() == v.shape[axis] or convolution.channels_last(v, axis) == (name in last)


def test_results_with_channels_side_by_side_repeat_to_the_bit():
    last, n, batch, x, w, how = LAST["whole lines"]
    first, second = (both("tf32", n, batch, x, w, **how, last=last)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("case", ["whole lines, stride 2", "64 channels", "groups"])
def test_channels_side_by_side_in_bfloat16(case, monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    last, n, batch, x, w, how = LAST[case]
    got, expected = both("bf16", n, batch, x, w, **how, last=last)
    assert got[0].dtype == torch.bfloat16
    assert all(1e-5 < error(a, b) < 1e-2 for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("case", ["stride 2, 17 channels", "64 channels"])
def test_tf32_has_its_own_error(case):
    n, batch, x, w, how = CASES[case]
    got, expected = both("tf32", n, batch, x, w, **how)
    assert all(error(a, b) < 1e-3 for a, b in zip(got, expected, strict=True))
    assert error(got[0], expected[0]) > 1e-5


@pytest.mark.parametrize("case", ["stride 2, 17 channels", "64 channels", "depthwise"])
def test_bfloat16_behaves_as_under_autocast(case, monkeypatch):
    """The output is bfloat16; gradients have the dtypes of the arguments."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    n, batch, x, w, how = CASES[case]
    got, expected = both("tf32", n, batch, x, w, **how)
    assert [v.dtype for v in got] == [torch.bfloat16] + 3 * [torch.float32]
    assert all(1e-5 < error(a, b) < 1e-2 for a, b in zip(got, expected, strict=True))


def test_the_shares_of_a_sum_are_added_in_a_fixed_order(monkeypatch):
    torch.manual_seed(0)
    x, d = torch.randn(2, 9, 2, 8, 8, device=DEVICE), torch.randn(2, 9, 3, 8, 8, device=DEVICE)
    window = convolution.Window(3, 3, 1, 1, 1, 1, 1, 1, 1)
    shares, empty = [], implicit_gemm.empty
    monkeypatch.setattr(implicit_gemm, "empty", lambda shape, *rest: shares.append(shape[0]) or empty(shape, *rest))
    first, second = (implicit_gemm.weight_gradient(x, d, window, "tf32") for _ in range(2))
    assert torch.equal(first, second) and shares == [3, 3]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("sum_outputs", [False, True])
@pytest.mark.parametrize("sizes", [(17, 70, 3, 3), (70, 17, 1, 5), (1, 3, 2, 1), (2, 1, 65, 65)], ids=str)
def test_weights_are_copied_tap_by_tap(sizes, sum_outputs, precision):
    numbers = math.prod(sizes)
    w = torch.randn(2, numbers + 3, device=DEVICE)[:, 3:].view(2, *sizes)
    copy, (n, o, c, t) = implicit_gemm.by_taps(w, sum_outputs, 16, precision)
    assert copy.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32) and copy.is_contiguous()
    assert (o if sum_outputs else c) == 1
    got = copy.as_strided((2, *sizes[:2], sizes[2] * sizes[3]), (n, o, c, t))
    bound = 2**-7 if precision == "bf16" else 0  # the interpreter cuts digits off
    torch.testing.assert_close(got.view(w.shape).float(), w, rtol=bound, atol=0)


# -- whole networks ----------------------------------------------------------------------------------------------------
class Residual(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.first, self.norm = nn.Conv2d(inner, outer, 3, 2, 1, bias=False), nn.GroupNorm(2, outer)
        self.second, self.skip = nn.Conv2d(outer, outer, 3, 1, 1), nn.Conv2d(inner, outer, 1, 2)

    def forward(self, x):
        return F.relu(self.skip(x) + self.second(F.relu(self.norm(self.first(x)))))


def residual():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), Residual(4, 6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    )


def one_dimension():
    return nn.Sequential(nn.Conv1d(3, 4, 3, 2), nn.GELU(), nn.Conv1d(4, 4, 3, groups=4), nn.Flatten(), nn.LazyLinear(3))


def stack_of(make, shape, n=2, batch=2, frozen=()):
    """The objective of a network, the points of a stack and a batch for each."""
    torch.manual_seed(0)
    model = make()
    model(torch.randn(1, *shape))
    free = {k: p for k, p in model.named_parameters() if not k.startswith(tuple(frozen) or "none")}
    fixed = {k: p.detach().to(DEVICE) for k, p in model.named_parameters() if k not in free}
    sizes = [p.numel() for p in free.values()]

    def objective(x, inputs, targets):
        parts = zip(x.split(sizes), free.items(), strict=True)
        named = {k: v.view(p.shape) for v, (k, p) in parts} | {k: v.to(x) for k, v in fixed.items()}
        return F.cross_entropy(torch.func.functional_call(model, named, (inputs,)), targets)

    point = torch.cat([p.detach().flatten() for p in free.values()])
    x = point * (1 + 0.3 * torch.randn(n, len(point)))
    return objective, *(v.to(DEVICE) for v in (x, torch.randn(n, batch, *shape), torch.randint(0, 3, (n, batch))))


class Views(nn.Module):
    """Layers of PyTorch between ours, and a view that another order of memory does not allow."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm, self.third, self.last = nn.GroupNorm(2, 8), nn.Conv2d(8, 6, 1, 2), nn.Linear(30, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = self.third(F.relu(self.norm(self.second(x)) + x))
        return self.last(torch.cat([x.view(len(x), -1), F.adaptive_avg_pool2d(x, 1).flatten(1)], 1))


def operators(graph):
    return [node.target.__name__.split(".")[0] for node in graph.graph.nodes if "fedda" in str(node.target)]


@pytest.mark.parametrize(
    ("make", "shape", "layers"), [(residual, (3, 5, 6), 4), (one_dimension, (3, 11), 2)], ids=["residual", "1d"]
)
def test_a_stack_of_networks_has_the_gradients_of_the_loop(make, shape, layers):
    """Recorded, and replayed with other numbers."""
    objective, *arguments = stack_of(make, shape)
    stacked = StackedGradient(objective, kernels="float32")
    graph = stacked.record(*arguments)
    x, inputs, targets = arguments
    got = graph(x + 0.1, 2 * inputs, targets)
    truth = stacked.loop((x + 0.1).double(), (2 * inputs).double(), targets)
    assert error(got, truth.cpu()) < 1e-5
    names = operators(graph)  # the first layer needs no gradient of its input
    assert [names.count(k) for k in ("convolution", "convolution_input", "convolution_weight")] == [
        layers,
        layers - 1,
        layers,
    ]
    assert not any("aten.convolution" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize(
    ("make", "shape", "flat"), [(residual, (3, 5, 6), 0), (one_dimension, (3, 11), 1), (Views, (3, 8, 8), 1)]
)
def test_a_network_whose_channels_lie_side_by_side_has_the_gradients_of_the_loop(make, shape, flat):
    """Activations are copied to the usual order where the network flattens them, and nowhere else."""
    objective, *arguments = stack_of(make, shape)
    stacked = StackedGradient(objective, kernels="float32", last=True)
    graph = stacked.record(*arguments)
    x, inputs, targets = arguments
    got = graph(x + 0.1, 2 * inputs, targets)
    truth = stacked.loop((x + 0.1).double(), (2 * inputs).double(), targets)
    assert error(got, truth.cpu()) < 1e-5 and torch.equal(got, graph(x + 0.1, 2 * inputs, targets))
    assert not any("as_strided" in str(node.target) for node in graph.graph.nodes)
    made = {node: node.meta["tensor"] for node in graph.graph.nodes if "tensor" in node.meta}
    images = [v for node, v in made.items() if "fedda.convolution.default" in str(node.target)]
    assert all(v.strides[2] == 1 for v in images)
    copies = [v for node, v in made.items() if any(k in str(node.target) for k in ("clone", "_to_copy", "contiguous"))]
    sizes = {v.shape.numel() for v in images if v.shape[2:].numel() > v.shape[2]}
    assert sum(v.shape.numel() in sizes for v in copies) == flat


def test_a_frozen_layer_is_left_to_pytorch_and_passes_gradients_on():
    objective, *arguments = stack_of(residual, (3, 5, 6), frozen=("2.first", "2.norm"))
    stacked = StackedGradient(objective, frozen=True, kernels="float32")
    x, *batch = arguments
    graph = stacked.record(x.repeat(2, 1), *batch)  # two points share a batch
    got = graph(x.repeat(2, 1), *batch)
    truth = stacked.loop(x.double(), batch[0].double(), batch[1]).repeat(2, 1)
    assert error(got, truth.cpu()) < 1e-5
    assert operators(graph).count("convolution_weight") == 3


def test_layers_that_do_not_fit_stay_pytorch_s():
    x, w = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3, requires_grad=True)
    refused = [
        (x, w.detach()),  # frozen
        (x.double(), w.double()),
        (x[0], w),  # a single sample
        (x[:, :2], w),  # an error, which PyTorch describes
        (x[..., :2], w),
    ]
    assert all(convolution.convolve("tf32", *arguments) is None for arguments in refused)
    with pytest.raises(RuntimeError, match="to have 3 channels"):
        stackable(F.conv2d, "tf32")(x[:, :2], w)


@pytest.mark.parametrize("wrong", [False, True])
def test_wrong_gradients_do_not_win(wrong):
    import fedda

    problem = fedda.load("digits", clients=3, model="cnn", filters=4, batch=4)
    paths = GradientPaths(problem, "auto", "auto")
    x, batch = problem.example(2)

    def path(x, batch):
        return paths.by_loop(x, batch) * (1 + 0.01 * wrong)

    if wrong:
        with pytest.warns(UserWarning, match="'layers' is not used: .* error of 0.01"), pytest.raises(ArithmeticError):
            paths.checked("layers", path, x, batch)
    else:
        assert torch.equal(paths.checked("layers", path, x, batch), paths.by_loop(x, batch))
    assert (path in paths.accepted) == (not wrong)


def compiled(tmp_path, *words):
    """What hopper.py prints of compiled kernels, line by line."""
    own = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, Path(__file__).parent / "hopper.py", *words]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_the_kernels_compile_for_an_h200_without_spills(tmp_path):
    rows = compiled(tmp_path, "layers", "few")
    assert len(rows) > 20 and all(row[-1] == "0" for row in rows), rows
    # With channels side by side, copies have 16 bytes, but for images and for the weights.
    lines = [row for row in rows if row[1] == "last" and row[2] != "3" and row[7] == "weight"]
    assert len(lines) == 4 and all(row[8] == "16" for row in lines), rows
