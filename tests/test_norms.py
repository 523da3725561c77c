"""Group and layer norms of stacks of models against autograd in float64: on a GPU where there is one, else in Triton's
interpreter."""

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

from fedda.problems.gradients.convolution import channels_last  # noqa: E402
from fedda.problems.gradients.kernels import row_norm  # noqa: E402
from fedda.problems.gradients.norms import Norms  # noqa: E402
from fedda.problems.gradients.stackable import stackable  # noqa: E402
from fedda.problems.gradients.vmap import StackedGradient  # noqa: E402
from test_layers import compiled, error, in_lines, operators, scalar_bounds, stack_of  # noqa: E402, F401

DEVICE = "cuda" if CUDA else "cpu"


def gradients(function, inputs, d):
    inputs = [v.detach().requires_grad_() for v in inputs]
    out = function(*inputs)
    return out, *torch.autograd.grad(out, inputs, d, materialize_grads=True)


def both(function, shapes, n=2, dtype=torch.float32, shared=(), last=()):
    """Ours for a stack, and PyTorch's in float64 for one model after the other: the output, and the gradients of its
    product with random numbers. The channels of a pixel lie side by side in the inputs `last`."""
    torch.manual_seed(0)
    inputs = [torch.randn(*(() if i in shared else (n,)), *shape) + 0.3 for i, shape in enumerate(shapes)]
    inputs[0] = inputs[0].to(dtype)
    one = [[(v if i in shared else v[k]).double() for i, v in enumerate(inputs)] for k in range(n)]
    d = torch.randn(n, *function(*one[0]).shape)
    truth = [gradients(function, v, d[k].double()) for k, v in enumerate(one)]
    expected = [torch.stack(v) for v in zip(*truth, strict=True)]
    expected = [v.sum(0) if i - 1 in shared else v for i, v in enumerate(expected)]
    stacked = vmap(stackable(function, "float32"), tuple(None if i in shared else 0 for i in range(len(inputs))))
    inputs = [in_lines(v.to(DEVICE), 2 - v.dim()) if i in last else v.to(DEVICE) for i, v in enumerate(inputs)]
    got = gradients(stacked, inputs, d.to(DEVICE, stacked(*inputs).dtype))
    return got, expected


def add_in_place(x, w, b, r):
    y = F.group_norm(x, 2, w, b)
    y += r
    return F.relu(y, inplace=True)


def read_before_relu(x, w, b, r):
    y = F.group_norm(x, 2, w, b) + r
    return F.relu(y) * y


def gate_between(x, w, b, r):
    y = F.group_norm(x, 2, w, b)
    y *= r.mean((1, 2), keepdim=True).sigmoid()
    y += r
    return F.relu(y, inplace=True)


def changed_between(x, w, b, r):
    y = F.group_norm(x, 2, w, b)
    y[:, 0] += 1.0
    z = F.group_norm(x, 2, w, b) + r
    r = r * 1.0
    u = F.group_norm(x, 3, w, b) + r
    r.mul_(0.5)
    return F.relu(y) + F.relu(z) + F.relu(u)


def twice_in_place(x, w, b, r):
    y = F.group_norm(x, 2, w, b)
    F.relu(y, inplace=True)
    return F.relu(y + r)


def without_gradients(x, w, b, r):
    with torch.no_grad():
        y = F.group_norm(x, 2, w, b)
    return F.relu(y) * r


def batch_norm(x, w, b):
    return F.batch_norm(x, None, None, w, b, training=True)


IMAGE, CHANNELS = (3, 6, 4, 5), (6,)
AFFINE = [IMAGE, CHANNELS, CHANNELS]
CASES = {
    "groups": (lambda x, w, b: F.group_norm(x, 2, w, b), AFFINE),
    "a group for each channel": (lambda x, w, b: F.group_norm(x, 6, w, b), AFFINE),
    "relu": (lambda x, w, b: F.relu(F.group_norm(x, 2, w, b)), AFFINE),
    "relu in place": (lambda x, w, b: F.group_norm(x, 2, w, b).relu_(), AFFINE),
    "sum and relu": (lambda x, w, b, r: F.relu(F.group_norm(x, 2, w, b) + r), [*AFFINE, IMAGE]),
    "relu of a sum from the left": (lambda x, w, b, r: (r + F.group_norm(x, 2, w, b)).relu(), [*AFFINE, IMAGE]),
    "in place": (add_in_place, [*AFFINE, IMAGE]),
    "read before the relu": (read_before_relu, [*AFFINE, IMAGE]),
    "another product in place": (gate_between, [*AFFINE, IMAGE]),
    "changed before the relu": (changed_between, [*AFFINE, IMAGE]),
    "twice in place": (twice_in_place, [*AFFINE, IMAGE]),
    "without gradients": (without_gradients, [*AFFINE, IMAGE]),
    "a sum that broadcasts": (lambda x, w, b: F.relu(F.group_norm(x, 2, w, b) + b[:, None, None]), AFFINE),
    "two norms": (lambda x, w, b: F.relu(F.group_norm(x, 2, w) + F.group_norm(x * x, 3, b)), AFFINE),
    "without weights": (lambda x: F.relu(F.group_norm(x, 3)), [IMAGE]),
    "features": (lambda x, w, b: F.group_norm(x, 3, w, b), [(4, 9), (9,), (9,)]),
    "permuted": (lambda x, w, b: F.group_norm(x.transpose(2, 3), 2, w, b), AFFINE),
    "many pixels": (lambda x, w, b: F.relu(F.group_norm(x, 1, w, b)), [(1, 3, 91, 92), (3,), (3,)]),
    "batch norm": (batch_norm, AFFINE),
    "batch norm, sum, relu": (lambda x, w, b, r: F.relu(batch_norm(x, w, b) + r), [*AFFINE, IMAGE]),
    "batch norm, many pixels": (lambda x, w, b: batch_norm(x, w, b).relu(), [(2, 3, 91, 92), (3,), (3,)]),
    "batch norm of features": (lambda x: F.relu(batch_norm(x, None, None)), [(9, 7)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (7,), w, b), [(3, 5, 7), (7,), (7,)]),
    "layer norm over two axes": (lambda x, w, b: F.layer_norm(x, (5, 7), w, b), [(3, 5, 7), (5, 7), (5, 7)]),
    "layer norm of one vector": (lambda x: F.layer_norm(x, (7,)), [(7,)]),
    "layer norm, relu": (lambda x, w, b: F.relu(F.layer_norm(x, (33,), w, b)), [(2, 33), (33,), (33,)]),
    "many features": (lambda x, w, b: F.layer_norm(x, (9001,), w, b), [(2, 9001), (9001,), (9001,)]),
    "every other weight": (lambda x, w: F.group_norm(x, 2, w[::2], w[1::2]), [IMAGE, (12,)]),
    "weights inside of a vector": (lambda x, w: F.layer_norm(x, (7,), w[2:9], w[9:16]), [(3, 5, 7), (17,)]),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_autograd_in_float64(case):
    got, expected = both(*CASES[case])
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == torch.float32 and error(a, b) < 1e-6


PIXELS = {
    "many pixels": (CASES["groups"][0], [(2, 6, 45, 46), *AFFINE[1:]]),
    "many groups": (lambda x, w, b: F.relu(F.group_norm(x, 9, w, b)), [(2, 27, 2, 3), (27,), (27,)]),
    "one dimension": (lambda x, w, b: F.group_norm(x, 3, w, b), [(3, 9, 5), (9,), (9,)]),
}
ALIKE = ("groups", "a group for each channel", "relu in place", "read before the relu", "without weights", "batch norm")


@pytest.mark.parametrize(
    ("case", "last"),
    [*((case, (0,)) for case in (*ALIKE, *PIXELS)), *(("sum and relu", last) for last in ((0,), (3,), (0, 3)))],
    ids=str,
)
def test_channels_may_lie_side_by_side(case, last):
    """The gradient of the output does not."""
    function, shapes = (CASES | PIXELS)[case]
    got, expected = both(function, shapes, last=last)
    assert all(a.shape == b.shape and error(a, b) < 1e-6 for a, b in zip(got, expected, strict=True))
    if case != "batch norm":
        assert channels_last(got[1], 2 - got[1].dim()) == (0 in last)


def test_channels_side_by_side_in_bfloat16():
    got, expected = both(*CASES["groups"], dtype=torch.bfloat16, last=(0,))
    assert got[0].dtype == got[1].dtype == torch.bfloat16
    assert all(error(a, b) < 1e-2 for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("n", [1, 5])
def test_any_number_of_models_and_samples(n):
    got, expected = both(*CASES["sum and relu"], n=n)
    assert all(error(a, b) < 1e-6 for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("shared", [(1, 2), (3,)], ids=["weights", "residual"])
def test_the_stack_may_share_weights_and_residual(shared):
    got, expected = both(*CASES["sum and relu"], shared=shared)
    assert all(a.shape == b.shape and error(a, b) < 1e-6 for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("case", ["sum and relu", "groups", "layer norm"])
def test_bfloat16_inputs_are_normalised_in_single_precision(case):
    got, expected = both(*CASES[case], dtype=torch.bfloat16)
    assert got[0].dtype == (torch.float32 if case == "sum and relu" else torch.bfloat16)  # a residual in float32
    assert got[1].dtype == torch.bfloat16 and all(v.dtype == torch.float32 for v in got[2:])
    assert all(error(a, b) < 1e-2 for a, b in zip(got, expected, strict=True))


def test_layer_norms_under_autocast_are_in_single_precision(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: True)
    got, _ = both(*CASES["layer norm"], dtype=torch.bfloat16)
    assert got[0].dtype == torch.float32 and got[1].dtype == torch.bfloat16


@pytest.mark.parametrize("last", [(), (0, 3)])
def test_a_run_repeats_to_the_bit(last):
    first, second = (both(*CASES["sum and relu"], last=last)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("function", [F.batch_norm, torch.batch_norm])
def test_batch_norms_are_ours_in_both_forms_of_the_call(function):
    x, w = torch.randn(2, 4, 3, 5, device=DEVICE), torch.randn(2, 3, device=DEVICE)
    others = (None, None, "w", None) if function is F.batch_norm else ("w", None, None, None)

    def ours(x, w):
        norms = Norms()
        tensors = [w if v else None for v in others]
        more = (True, 0.1, 1e-5) if function is F.batch_norm else (True, 0.1, 1e-5, True)
        assert norms(function, (x, *tensors, *more), {}) is not None
        constants = (
            norms(F.batch_norm, (x, w, w, w), {}),
            norms(torch.batch_norm, (x, w, w, w, w, False, 0.1, 1e-5, True), {}),
        )
        assert constants == (None, None)
        return norms(function, (x, *tensors, *more), {})

    expected = torch.stack(
        [F.batch_norm(a, None, None, b, None, True) for a, b in zip(x.double(), w.double(), strict=True)]
    )
    assert error(vmap(ours)(x, w), expected.cpu()) < 1e-6


def test_norms_that_do_not_fit_stay_pytorch_s():
    x, w = torch.randn(2, 4, 3), torch.randn(4)
    norms = Norms()
    assert norms(F.group_norm, (x, 2, w), {}) is None  # not of a stack
    refused = {
        "double": lambda v: F.group_norm(v.double(), 2),
        "half": lambda v: F.group_norm(v.half(), 2, w.half()),
        "constants": lambda v: F.batch_norm(v, torch.zeros(4), torch.ones(4)),
        "empty": lambda v: F.layer_norm(v[:0], (3,)),
    }
    for function in refused.values():
        assert torch.equal(vmap(stackable(function, "float32"))(x[None]), vmap(function)(x[None]))
    with pytest.raises(RuntimeError, match="divisible"):
        vmap(stackable(lambda v: F.group_norm(v, 3), "float32"))(x[None])
    with pytest.raises(RuntimeError, match="normalized_shape"):
        vmap(stackable(lambda v: F.layer_norm(v, (4,)), "float32"))(x[None])


# -- whole networks ----------------------------------------------------------------------------------------------------
class Block(nn.Module):
    """A residual block as in many programs: with changes in place."""

    def __init__(self, inner, outer):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(inner, outer, 3, 2, 1, bias=False), nn.GroupNorm(2, outer)
        self.second, self.norm2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.GroupNorm(2, outer)
        self.skip = nn.Sequential(nn.Conv2d(inner, outer, 1, 2), nn.GroupNorm(1, outer))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.norm1(self.first(x)))
        out = self.norm2(self.second(out))
        out += self.skip(x)
        return self.relu(out)


def residual():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), Block(4, 6), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.LayerNorm(6), nn.Linear(6, 3),
    )  # fmt: skip


@pytest.mark.parametrize("last", [False, True])
def test_a_network_with_changes_in_place_has_the_gradients_of_the_loop(last):
    """In the recording, sums and relus are part of the norms, and nothing is changed in place."""
    objective, *arguments = stack_of(residual, (3, 5, 6))
    stacked = StackedGradient(objective, kernels="float32", last=last)
    graph = stacked.record(*arguments)
    x, inputs, targets = arguments
    got = graph(x + 0.1, 2 * inputs, targets)
    assert error(got, stacked.loop((x + 0.1).double(), (2 * inputs).double(), targets).cpu()) < 1e-5
    names = operators(graph)
    assert names.count("norm") == names.count("norm_backward") == 4 and names.count("convolution") == 4
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert not any("norm" in name and "fedda" not in name for name in calls)
    assert not any(name.split(".")[1].endswith("_") for name in calls if name.startswith("aten."))
    assert sum("relu" in name for name in calls) == 1 and sum("threshold" in name for name in calls) == 1
    assert "fedda.norm.default" in calls and not any(
        "aten.add" in name for name in calls[: calls.index("aten.mean.dim")]
    )


def test_the_kernels_compile_for_an_h200_without_spills(tmp_path):
    rows = compiled(tmp_path, "norms")
    assert len(rows) == 44 and all(row[-1] == "0" for row in rows), rows
    # 16 bytes at a time, unless a group has two channels, which lie side by side.
    assert all("ld.global.v4.b32" in row or row[0] == "pairs" for row in rows), rows


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(2, 16, 8, 2, 1024), (10, 1024, 1, 64, 1), (1, 1, 1, 20000, 1), (3, 5, 7, 3, 49)])
def test_a_program_holds_a_bounded_part_of_a_row(shape, last):
    grid, options = row_norm.launch(shape[0], shape[1:], last, 2)
    size = options["BB"] * options["BK"] * options["BS"]
    assert size <= row_norm.MAX_TILE and size >= min(row_norm.USUAL_TILE, shape[3] * shape[4])
    assert grid * options["BB"] >= shape[0] * shape[1] * shape[2]
    if last:
        assert 2 * options["BB"] * options["BK"] >= min(32, 2 * shape[2] * shape[3])
