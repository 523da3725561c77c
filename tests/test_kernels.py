"""The Triton kernels against autograd in float64: on a GPU where there is one, else in Triton's interpreter."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fedda import rng
from fedda.problems.batchnorm import BatchNorms
from fedda.problems.gradients.chain import Chain
from fedda.problems.gradients.vmap import gradient
from fedda.problems.models import cross_entropy

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read where the kernels are defined: before they are imported
triton = pytest.importorskip("triton", reason="needs Triton")

from fedda.problems.gradients import kernels  # noqa: E402
from fedda.problems.gradients.kernels import operators  # noqa: E402, F401
from fedda.problems.gradients.kernels import plan as planning  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch):
    """The interpreter holds bfloat16 as its bits and multiplies these; here the numbers are multiplied."""
    if CUDA:
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def numbers(handle):
        bits = handle.dtype.scalar == tl.bfloat16
        return (handle.data.astype(np.uint32) << 16).view(np.float32) if bits else handle.data

    def dot(self, a, b, acc, *precision):
        product = np.matmul(numbers(a), numbers(b), dtype=acc.data.dtype) + acc.data
        return interpreter.TensorHandle(product, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def network(shape, filters=16, layers=2, kernel=3, pad=1, pools=None, hidden=(), bias=True, norms=()):
    body = []
    if layers:
        channels, height, width = shape
    for i in range(layers):
        body += [nn.Conv2d(channels, filters, kernel, padding=pad, bias=bias), nn.ReLU()]
        if norms and norms[i]:
            body.append(nn.BatchNorm2d(filters))
        channels, height, width = filters, height + 2 * pad - kernel + 1, width + 2 * pad - kernel + 1
        if pools is None or pools[i]:
            body.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
    widths = [channels * height * width if layers else math.prod(shape), *hidden]
    dense = [m for i, o in zip(widths, hidden, strict=False) for m in (nn.Linear(i, o, bias=bias), nn.ReLU())]
    return nn.Sequential(*body, nn.Flatten(), *dense, nn.Linear(widths[-1], 10, bias=bias))


def stack(model, groups, seed=0):
    """Points around the model's own, [groups, d]."""
    torch.manual_seed(seed)
    point = torch.cat([p.detach().flatten() for p in model.parameters()])
    return point * (1 + 0.3 * torch.randn(groups, len(point)))


def truth(model, x, inputs, targets):
    """One gradient after the other, in float64."""
    model = model.double()
    sizes = [p.numel() for p in model.parameters()]
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def objective(x, inputs, targets):
        named = {n: v.view(s) for v, (n, s) in zip(x.split(sizes), shapes.items(), strict=True)}
        return cross_entropy(torch.func.functional_call(model, named, (inputs,)), targets)

    n = len(inputs)
    return torch.stack(
        [gradient(objective, x[g].double(), inputs[g % n].double(), targets[g % n]) for g in range(len(x))]
    )


def computed(model, shape, x, inputs, targets, precision, scale=None):
    chain = Chain.of(model.float(), cross_entropy, shape, norms=True)
    ours = kernels.kernels_for(chain, shape, inputs.shape[1], precision)
    scale = scale and tuple(v.to(DEVICE) for v in scale)
    return ours(x.to(DEVICE), inputs.to(DEVICE), targets.to(DEVICE), scale).cpu()


def error(got, expected):
    return float((got.double() - expected).norm() / expected.norm())


CASES = {
    "two points share a batch": ((3, 8, 8), 4, 2, 3, {}),
    "odd sizes: a pool leaves a row out": ((1, 7, 7), 3, 3, 4, {}),
    "no padding, no pool, a hidden layer": ((3, 8, 8), 2, 1, 4, {"pools": (False, True), "hidden": (24,), "pad": 0}),
    "5x5 without bias": ((2, 9, 9), 2, 2, 2, {"filters": 32, "layers": 3, "pools": (True, False, False), "kernel": 5, "pad": 2, "bias": False}),
    "one layer": ((2, 6, 6), 2, 2, 2, {"layers": 1}),
    "one layer without a pool": ((2, 5, 5), 2, 2, 3, {"layers": 1, "pools": (False,)}),
    "1x1": ((3, 6, 6), 2, 2, 2, {"kernel": 1, "pad": 0}),
    "even, wide padding, not square": ((2, 3, 6), 2, 1, 3, {"kernel": 2, "pad": 3, "pools": (True, False)}),
    "4x4": ((2, 6, 7), 2, 1, 3, {"kernel": 4, "pad": 1, "pools": (False, True)}),
    "7x7": ((2, 8, 9), 2, 1, 3, {"kernel": 7, "pad": 3}),
    "many rows": ((3, 12, 12), 1, 1, 9, {}),
    "BatchNorm, odd sizes, two points share a batch": ((1, 7, 7), 2, 1, 8, {"norms": (True, True)}),
    "BatchNorm in one of three layers": ((2, 9, 9), 2, 2, 4, {"layers": 3, "norms": (False, True, False)}),
    "one layer with BatchNorm": ((2, 6, 6), 2, 2, 4, {"layers": 1, "norms": (True,), "bias": False}),
    "a perceptron, two points share a batch": ((150,), 4, 2, 40, {"layers": 0, "hidden": (40, 70)}),
    "a perceptron on images, without bias": ((2, 3, 3), 2, 2, 3, {"layers": 0, "hidden": (5,), "bias": False}),
    "one linear layer": ((20,), 2, 1, 3, {"layers": 0}),
}  # fmt: skip


# Shapes and precisions are apart in the kernels: the second precision is tried on shapes that have a bit of everything.
BF16 = [
    "odd sizes: a pool leaves a row out",
    "no padding, no pool, a hidden layer",
    "5x5 without bias",
    "4x4",
    "many rows",
    "a perceptron, two points share a batch",
]


@pytest.mark.parametrize(
    ("case", "precision", "bound"), [*((c, "tf32", 2e-4) for c in CASES), *((c, "bf16", 8e-2) for c in BF16)]
)
def test_equals_autograd_in_float64(case, precision, bound):
    """Two bfloat16 parts hold 16 bits, one 8. (TF32 holds 11: its error is about 1e-3.) A rounded number can make another
    pixel the largest of a window, which is an error of its own kind (up to 0.3 on the smallest images): then the next
    draw must be right."""
    shape, groups, batches, batch, how = CASES[case]
    errors = []
    while not errors or (errors[-1] >= bound and len(errors) < 4):
        torch.manual_seed(len(errors))
        model = network(shape, **how)
        x = stack(model, groups)
        inputs, targets = torch.randn(batches, batch, *shape), torch.randint(0, 10, (batches, batch))
        got = computed(model, shape, x, inputs, targets, precision)
        errors.append(error(got, truth(model, x, inputs, targets)))
    assert errors[-1] < bound and max(errors) < 0.5, errors


def test_bytes_are_standardised_on_the_way():
    shape = (3, 8, 8)
    torch.manual_seed(2)
    model = network(shape)
    x = stack(model, 4)
    raw, targets = torch.randint(0, 256, (2, 3, *shape), dtype=torch.uint8), torch.randint(0, 10, (2, 3))
    mean, std = torch.rand(3) * 100 + 50, torch.rand(3) * 50 + 20
    got = computed(model, shape, x, raw, targets, "tf32", (mean, std))
    inputs = (raw.double() - mean.double()[:, None, None]) / std.double()[:, None, None]
    assert error(got, truth(model, x, inputs, targets)) < 2e-4


@pytest.mark.parametrize("layers", [0, 2])
def test_outputs_equal_the_model_s_own(layers):
    shape = (3, 8, 8)
    torch.manual_seed(5)
    model = network(shape, hidden=(12,), layers=layers)
    x, inputs = stack(model, 3), torch.randn(10, *shape)
    ours = kernels.kernels_for(Chain.of(model, cross_entropy, shape), shape, 4, "tf32")
    got = ours.outputs(x.to(DEVICE), inputs.to(DEVICE)).cpu()
    for point, output in zip(x, got, strict=True):
        torch.nn.utils.vector_to_parameters(point, model.parameters())
        torch.testing.assert_close(output, model(inputs), rtol=1e-3, atol=1e-4)


def test_batchnorm_is_estimated_and_evaluated_as_by_the_model_itself():
    shape = (2, 6, 6)
    torch.manual_seed(7)
    model = network(shape, norms=(True, True))
    inputs = torch.randn(3, 4, *shape)
    norms = BatchNorms(model)
    x = stack(model, 2)

    def forward(x, inputs):
        torch.nn.utils.vector_to_parameters(x, model.parameters())  # `training` shares them
        return norms.training(inputs)

    expected = torch.stack([torch.stack([norms.batch_moments(forward, point, one) for one in inputs]) for point in x])
    ours = kernels.kernels_for(Chain.of(model, cross_entropy, shape, norms=True), shape, 4, "tf32")
    got = ours.moments(x.to(DEVICE), inputs.to(DEVICE)).cpu()
    torch.testing.assert_close(got, expected.detach(), rtol=1e-3, atol=1e-4)
    statistics = torch.rand(2, norms.size) + 0.5
    outputs = ours.outputs(torch.cat([x, statistics], dim=1).to(DEVICE), inputs.flatten(0, 1).to(DEVICE)).cpu()
    for point, given, output in zip(x, statistics, outputs, strict=True):
        torch.nn.utils.vector_to_parameters(point, model.parameters())
        named = norms.named(given)
        expected = torch.func.functional_call(norms.evaluation, named, (inputs.flatten(0, 1),))
        torch.testing.assert_close(output, expected.detach(), rtol=1e-3, atol=1e-3)


def first_layer(inputs):
    """The first layer's results and where their maxima stood, [samples, height, width, filters], and torch's own."""
    from fedda.problems.gradients.kernels.passes import Pass

    shape = tuple(inputs.shape[1:])
    torch.manual_seed(6)
    model = network(shape, layers=1)
    plan = kernels.plan_of(Chain.of(model, cross_entropy, shape), shape, "tf32")
    x = stack(model, 1)
    made = Pass(plan, x.to(DEVICE), inputs[None].to(DEVICE), None)
    torch.nn.utils.vector_to_parameters(x[0], model.parameters())
    return made.flat.cpu().view(len(inputs), 16, 4, 4), made.maxima[0].cpu(), model[:3](inputs)


def test_the_first_of_equal_pixels_is_the_largest():
    """In a black image all pixels of a filter are its bias."""
    _, where, _ = first_layer(torch.zeros(2, 3, 8, 8))
    assert set(where.unique().tolist()) == {0, 4}  # 4: the bias is negative


def test_a_pool_lets_no_nan_pass_unseen():
    inputs = torch.randn(2, 3, 8, 8)
    inputs[0, 1, 3, 4] = float("nan")
    got, _, expected = first_layer(inputs)
    assert torch.equal(got.isnan(), expected.isnan()) and got.isnan().any() and not got[1].isnan().any()


def three_batches(points, seed):
    shape = (2, 8, 8)
    torch.manual_seed(seed)
    model = network(shape)
    x = stack(model, 3 * points)
    return shape, model, x, torch.randn(3, 2, *shape), torch.randint(0, 10, (3, 2))


def test_a_model_that_has_diverged_shows_and_leaves_the_others_alone():
    shape, model, x, inputs, targets = three_batches(points=1, seed=3)
    fine = computed(model, shape, x, inputs, targets, "tf32")
    for bad, place in ((math.nan, 0), (math.inf, len(x[0]) // 2), (math.nan, -1)):
        broken = x.clone()
        broken[1, place] = bad
        got = computed(model, shape, broken, inputs, targets, "tf32")
        assert not got[1].isfinite().all()
        assert torch.equal(got[[0, 2]], fine[[0, 2]])


def test_large_stacks_go_in_parts(monkeypatch):
    shape, model, x, inputs, targets = three_batches(points=2, seed=4)
    whole = computed(model, shape, x, inputs, targets, "tf32")
    plan = kernels.plan_of(Chain.of(model.float(), cross_entropy, shape), shape, "tf32")
    monkeypatch.setattr(planning, "LARGEST", 4 * plan.numbers(2))  # two of the three batches, at both points
    assert plan.at_once(2) == 4 and plan.samples(3) == 4 * 4096 * 32 // (3 * 65536)
    torch.testing.assert_close(computed(model, shape, x, inputs, targets, "tf32"), whole)


@pytest.mark.parametrize(
    ("shape", "how", "batch"),
    [((1, 2, 2), {"layers": 1}, 1), ((1, 4, 4), {"filters": 128, "pools": (True, False)}, 1), ((3, 32, 32), {}, 16)],
)
def test_arrays_of_a_call_are_counted_in_32_bits(shape, how, batch):
    """Patches, of which there are at least 128 rows; weights, which a small image may have more of than pixels."""
    plan = kernels.plan_of(Chain.of(network(shape, **how), cross_entropy, shape), shape, "tf32")
    groups, first = plan.at_once(batch), plan.convolutions[0]
    assert groups <= 65_535  # of a grid's second axis
    assert groups * first.rows(batch) * 16 < 2**31
    for layer in plan.convolutions:
        assert (
            groups * layer.filters * max(batch * layer.height * layer.width, layer.channels * layer.kernel**2) < 2**31
        )


def test_outputs_of_many_samples_go_in_parts(monkeypatch):
    shape = (2, 8, 8)
    model = network(shape)
    x, inputs = stack(model, 2), torch.randn(7, *shape)
    ours = kernels.kernels_for(Chain.of(model, cross_entropy, shape), shape, 4, "tf32")
    whole = ours.outputs(x.to(DEVICE), inputs.to(DEVICE))
    monkeypatch.setattr(planning, "LARGEST", 2 * 3 * ours.plan.numbers(32) // 32)
    assert ours.plan.samples(2) == 3
    torch.testing.assert_close(ours.outputs(x.to(DEVICE), inputs.to(DEVICE)), whole)


def layers(*more, first=(3, 16, 3), **how):
    return nn.Sequential(nn.Conv2d(*first, padding=1, **how), nn.ReLU(), *more, nn.Flatten(), nn.LazyLinear(10))


@pytest.mark.parametrize(
    "model",
    [
        layers(first=(3, 24, 3)),  # filters are no power of two
        layers(stride=2),
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.LazyLinear(10)),  # no relu
        layers(nn.MaxPool2d(3)),
        layers(nn.Linear(8, 8)),  # not flat
        nn.Sequential(nn.Flatten(), nn.LazyLinear(10), nn.LazyLinear(10)),  # no relu
        nn.Sequential(nn.Flatten(), nn.LazyLinear(200)),
        nn.Sequential(nn.ReLU(), nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)),
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10), nn.ReLU()),
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(200)),
    ],
)  # fmt: skip
def test_other_networks_are_left_to_other_paths(model):
    model(torch.zeros(1, 3, 8, 8))
    chain = Chain.of(model, cross_entropy, (3, 8, 8))
    assert chain is None or kernels.kernels_for(chain, (3, 8, 8), 4, "tf32") is None


def test_draws_have_the_same_bits_as_rng():
    ids, sizes = torch.tensor([[3, 1, 7], [0, 2, 5]]), torch.tensor([1, 2, 3, 1000, 77, 2**30, 5, 12345, 9])
    offsets = sizes.cumsum(0) - sizes
    keys = rng.fold(rng.fold(rng.key(torch.tensor([[5], [6]]), rng.BATCH), ids), torch.arange(4)[:, None, None])
    expected = offsets[ids][..., None] + rng.integers(
        rng.fold(keys[..., None], torch.arange(10)), sizes[ids][..., None]
    )
    got = torch.ops.fedda.draw(*(v.to(DEVICE) for v in (keys, ids, offsets, sizes)), 10).cpu()
    assert torch.equal(got, expected)


def test_an_interrupted_compilation_leaves_nothing_behind():
    from triton.runtime._async_compile import active_mode

    from fedda.compiling import side_by_side

    with pytest.raises(KeyboardInterrupt), side_by_side():
        active_mode.get().submit("key", lambda: (_ for _ in ()).throw(KeyboardInterrupt), print)
    assert active_mode.get() is None
    with side_by_side():
        pass


def test_the_kernels_of_a_pass_are_compiled_side_by_side_and_found_again(tmp_path):
    """For an H200, by the compiler itself: in the interpreter nothing is compiled."""
    words = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    script = Path(__file__).parent / "hopper.py"
    found = subprocess.run(
        [sys.executable, script], env=os.environ | words, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    compiled, more = map(int, found.stdout.split())
    assert compiled > 10 and more == 0
    assert len(list(tmp_path.rglob("*.cubin"))) == compiled
