"""Fused kernels have the bits of the operations they stand for."""

import os
import subprocess
import sys
from operator import getitem
from pathlib import Path

import numpy as np
import pytest
import torch

import fedda
import recorded_functions
from conftest import NAMES, quadratic, stable
from fedda import rng
from recorded_functions import ELEMENTWISE, LAYOUTS

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined
pytest.importorskip("triton", reason="needs Triton")

from fedda.engines import fusing, graphs  # noqa: E402
from fedda.recording import record  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    monkeypatch.setattr(fusing, "SMALL", 1)


@pytest.fixture(autouse=True, scope="module")
def rounding_to_bfloat16():
    """The interpreter cuts numbers off; compiled kernels round them."""
    if CUDA:
        yield
        return
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def cast(self, source, to):
        types = source.dtype.scalar, to.scalar
        if types == (tl.float32, tl.bfloat16):
            bits = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16).numpy()
            return TensorHandle(bits.view(np.uint16), to.scalar)
        if types == (tl.bfloat16, tl.float32):
            bits = torch.from_numpy(np.ascontiguousarray(source.data).view(np.int16))
            return TensorHandle(bits.view(torch.bfloat16).float().numpy(), to.scalar)
        return before(self, source, to)

    before, patch = InterpreterBuilder.cast_impl, pytest.MonkeyPatch()
    patch.setattr(InterpreterBuilder, "cast_impl", cast)
    yield
    patch.undo()


def numbers(*shape, dtype, positive=False):
    v = torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))
    return (v.abs() + 0.1 if positive else v).to(DEVICE)


def calls(module, target=None):
    found = [n for n in module.graph.nodes if n.op == "call_function"]
    return [n for n in found if target is None or n.target is target]


FUSED = torch.ops.fedda.fused.default


def equal(a, b, zeros=True):
    """Whether two tensors are equal, also in the signs of zeros; nan equals nan."""
    assert a.dtype == b.dtype and a.shape == b.shape
    if not a.is_floating_point():
        return torch.equal(a, b)
    same = (a == b) & ((a.signbit() == b.signbit()) | (not zeros)) | (a.isnan() & b.isnan())
    return bool(same.all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, about special numbers
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_operation_on_special_numbers(dtype, layout):
    arguments = recorded_functions.arguments(dtype, layout, DEVICE)

    def step():
        return [function(*arguments) for function in ELEMENTWISE.values()]

    expected = step()
    module = fusing.fused(record(step))
    left = [n for n in calls(module) if n.target is not FUSED and fusing.elementwise(n)]
    assert not left and len(calls(module, FUSED)) < 20
    for name, got, right in zip(ELEMENTWISE, module(), expected, strict=True):
        # A GPU takes the larger of 0 and -0, a CPU the one or the other.
        zeros = CUDA or name not in ("maximum", "minimum", "clamp", "clamp_min", "clamp_max", "relu")
        assert equal(got, right, zeros) and got.stride() == right.stride(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_operation_and_every_way_to_broadcast(dtype):
    x0, h = numbers(2, 1, 2500, dtype=dtype), numbers(2500, dtype=dtype, positive=True)
    nu, g = numbers(2, 3, 2500, dtype=dtype), numbers(2, 3, 2500, dtype=dtype) * 1e-3
    eta, fine = numbers(2, 1, 1, dtype=dtype), numbers(2, 3, 1, dtype=dtype) > 0

    def step():
        z = -(eta * nu)
        x = x0 + 0.7 * z / h
        both = torch.cat([x, nu])  # not element-wise: ends what came before
        scaled = (2 - x0) / 3.0 + (h.sqrt() if CUDA else h)  # the interpreter's root is not rounded as PyTorch's
        total = scaled.sum(dim=-1, keepdim=True)
        kept = torch.where(fine, g + (1 - eta) * (nu - x), nu) ** 2
        return [z, x, both, scaled, total, kept - scaled.abs(), x0]

    expected = step()
    plain = record(step)
    before = len(calls(plain))
    module = fusing.fused(plain)
    got = module()
    assert calls(module, FUSED) and len(calls(module)) < before - 6
    assert [torch.equal(a, b) for a, b in zip(got, expected, strict=True)] == [True] * 7
    assert got[-1].data_ptr() == x0.data_ptr()  # what the step only passes on is not copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_division_by_numbers_whose_inverse_is_not_exact(dtype):
    """As Adam's corrections divide: on a GPU PyTorch multiplies by an inverse instead, and rounds it in its own way."""
    a = numbers(3000, dtype=dtype, positive=True)
    divisors = [1 - beta**n for beta in (0.9, 0.999) for n in range(1, 6)] + [3.0, 7.7, -1e-3]

    def step():
        return [(a + 1) / by + 1 for by in divisors]

    for got, expected in zip(fusing.fused(record(step))(), step(), strict=True):
        assert torch.equal(got, expected)


def test_what_is_overwritten_in_between_is_read_before():
    a, b = numbers(4000, dtype=torch.float64), numbers(4000, dtype=torch.float64)
    kept = a.clone()

    def step():
        one = (kept + b) * b
        kept.mul_(2)
        return [one, (kept + b) * one]

    expected = step()
    kept.copy_(a)
    module = fusing.fused(record(step))
    kept.copy_(a)
    assert len(calls(module, FUSED)) == 2
    assert all(torch.equal(x, y) for x, y in zip(module(), expected, strict=True))
    assert torch.equal(kept, 2 * a)


def test_what_is_left_alone(monkeypatch):
    """Integers, functions whose bits are not certain, and small arrays that depend on no earlier step."""
    monkeypatch.setattr(fusing, "SMALL", 100)
    few, whole = numbers(50, dtype=torch.float64), torch.arange(500, device=DEVICE)
    many = numbers(500, dtype=torch.float32)

    def step():
        return [few * 2 + few, whole * 2 + whole, many**3, (many * 0.1).cos()]

    module = fusing.fused(record(step))
    assert all(torch.equal(a, b) for a, b in zip(module(), step(), strict=True))
    assert not calls(module, FUSED)


def test_small_arrays_that_depend_on_large_ones(monkeypatch):
    monkeypatch.setattr(fusing, "SMALL", 100)
    many = numbers(500, 3, dtype=torch.float32)

    def step():
        mean = many.sum(0)
        return [(mean * 2 + 1) / 4]

    module = fusing.fused(record(step))
    assert equal(module()[0], step()[0]) and len(calls(module, FUSED)) == 1


def test_an_operation_waits_until_it_is_needed():
    """Also past operations that do not read it, and through views."""
    a, w = numbers(30, 40, dtype=torch.float32), numbers(40, 40, dtype=torch.float32)

    def step():
        x = a * 2
        rows = x.view(2, 15, 40)
        product = a @ w
        halves = (rows + 1).permute(1, 0, 2)  # a view at the end
        y = x - product
        return [halves.sum(0), y, halves.contiguous() * 3]

    module = fusing.fused(record(step))
    assert len(calls(module, FUSED)) == 2
    for got, expected in zip(module(), step(), strict=True):
        assert equal(got, expected)


def test_views_as_another_type_are_read_from_memory():
    a = numbers(500, dtype=torch.float32)

    def step():
        return [(a * 2).view(torch.int32).bool() & (a > 0), (a > 0.1).view(torch.uint8) * 1.5]

    module = fusing.fused(record(step))
    assert calls(module, FUSED) and all(map(equal, module(), step()))


def test_a_copy_to_another_order_is_written_by_the_kernel_that_computes_it():
    a = numbers(6, 10, 20, dtype=torch.float32)

    def step():
        x = a * 2 + 1
        turned = x.transpose(0, 1).contiguous()
        return [turned.view(10, 120) @ turned.view(120, 10), x.permute(2, 0, 1).contiguous()]

    module = fusing.fused(record(step))
    assert len(calls(module, FUSED)) == 1 and len(calls(module, torch.ops.aten.clone.default)) == 1
    for got, expected in zip(module(), step(), strict=True):
        assert equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_are_fused_if_a_check_finds_the_same_bits(dtype, monkeypatch):
    aten = torch.ops.aten
    monkeypatch.setitem(fusing.CHECKED, aten.floor.default, "tl.floor({0})")
    monkeypatch.setitem(fusing.CHECKED, aten.ceil.default, "tl.floor({0})")  # wrong
    monkeypatch.setitem(fusing.CHECKED, aten.tanh_backward.default, "{0} * (1.0 - {1} * {1})")
    a = numbers(500, dtype=dtype)

    def step():
        return [a.floor() + 1, a.ceil() + 1, a.tanh() * 2]

    fusing.same_bits.cache_clear()
    module = fusing.fused(record(step))
    same = fusing.same_bits(aten.floor.default, dtype, a.device)  # on a GPU, Triton's takes the smallest numbers for 0
    assert (same or CUDA) and bool(calls(module, aten.floor.default)) != same and calls(module, aten.ceil.default)
    assert all(equal(a, b) for a, b in zip(module(), step(), strict=True))
    assert fusing.same_bits(aten.tanh_backward.default, dtype, a.device) in (True, False)
    fusing.same_bits.cache_clear()


@pytest.mark.parametrize("seed", range(15))
def test_random_functions(seed):
    x, y = numbers(3, 5, dtype=torch.float32), numbers(5, 3, dtype=torch.float32).T
    for inputs in ((x, y), (y, x.bfloat16()), (x.double(), y.double())):
        module = record(recorded_functions.random_function(seed), *inputs)
        expected = [v.clone() for v in module(*inputs)]
        got = fusing.fused(module)(*inputs)
        assert all(map(equal, got, expected))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["resnet", "transformer"])
def test_gradients_of_networks(kind, precision, monkeypatch):
    """To the bit. Autocast to bfloat16 adds the conversions that it adds on a GPU."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    gradient, inputs = recorded_functions.network_gradient(kind, precision, DEVICE)
    expected = gradient(*inputs)
    recorded = record(gradient, *inputs)
    before, module = kernels(recorded), fusing.fused(recorded)
    assert calls(module, FUSED) and kernels(module) < 0.9 * before
    assert equal(module(*inputs), expected)


def kernels(module):
    """The number of operations that are no views."""
    return sum(not fusing.is_view(n) and n.target is not getitem for n in calls(module))


def test_a_transposed_result_is_read_where_it_was_written():
    a, b = numbers(50, 100, dtype=torch.float64), numbers(100, 50, dtype=torch.float64)

    def step():
        y = a.T * 2 + 1
        total = y.sum()
        return [y, (y * 3 + b) * total]

    module = fusing.fused(record(step))
    assert len(calls(module, FUSED)) == 2
    for got, expected in zip(module(), step(), strict=True):
        assert torch.equal(got, expected) and got.stride() == expected.stride()


def test_signs_of_zero_and_numbers_that_are_not_finite():
    zero, a = torch.zeros(3000, device=DEVICE), numbers(3000, dtype=torch.float32)

    def step():
        return [-(zero * 1.0) / (a.abs() + 1), a * float("inf") - zero, a * float("nan") + 1, a * -1e39 + zero]

    module = fusing.fused(record(step))
    assert calls(module, FUSED)
    for got, expected in zip(module(), step(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.signbit() | got.isnan(), expected.signbit() | got.isnan())


def test_factors_of_a_sum_are_kept():
    a = numbers(3000, dtype=torch.float64)

    def step():
        return [torch.rsub(a, 2.0, alpha=3) * 2 + 1, torch.add(a, a, alpha=2) * 2 + 1, torch.sub(a, 1, alpha=3) + a]

    module = fusing.fused(record(step))
    assert all(torch.equal(got, expected) for got, expected in zip(module(), step(), strict=True))


# Full gradients are taken client by client, and the host asks for ids.
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("mime", "mimelite")])
def test_a_round_of_every_algorithm(name, monkeypatch):
    """Recorded from a run's own step, with its memory, its counters and its draws."""
    monkeypatch.setattr(rng, "on_cpu", lambda v: False)  # as on a GPU, where nothing is looked at
    problem = quadratic(d=300).to(DEVICE)
    run = fedda.Run(stable(name), problem, cohort=3, seed=[0, 1])
    run.step()

    def step():
        server, alive, _, lost, _ = run._round(torch.tensor(run.round, device=DEVICE))
        return [*server, alive, lost]

    kept = {k: v.clone() for k, v in run.simulation.memory.items()}

    def put_back():
        for k, v in kept.items():
            run.simulation.memory[k].copy_(v)

    expected = step()
    put_back()
    module = fusing.fused(record(step))
    put_back()
    bound = {"rtol": 0, "atol": 0} if CUDA else {"rtol": 1e-13, "atol": 1e-15}  # the interpreter's roots and quotients
    for got, right in zip(module(), expected, strict=True):
        torch.testing.assert_close(got, right, **bound)
    assert calls(module, FUSED)


def test_kernels_are_compiled_for_an_h200(tmp_path):
    """In the interpreter nothing is compiled."""
    words = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    script = Path(__file__).parent / "hopper.py"
    found = subprocess.run(
        [sys.executable, script, "fused"], env=os.environ | words, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert len(list(tmp_path.rglob("*.cubin"))) == int(found.stdout) > 20


def test_what_is_wrong_or_fails_is_not_fused():
    a = numbers(4, 500, dtype=torch.float32)

    def step():
        return [a * 2 + 1]

    def fail(fast):
        raise RuntimeError("a kernel that cannot be compiled")

    assert graphs.with_fused_operations(step, lambda fast: torch.equal(fast()[0], a * 2 + 1)) is not step
    assert graphs.with_fused_operations(step, lambda fast: False) is step
    assert graphs.with_fused_operations(step, fail) is step


def test_no_computer_algebra_is_imported_for_it():
    """As some of PyTorch's Python does, for two seconds."""
    program = """
import sys, torch, fedda
from fedda.engines import fusing
from fedda.recording import record
fusing.SMALL = 1
a = torch.ones(4, 3000, device=sys.argv[1])
fusing.fused(record(lambda: [(a * 2 + a[:1]) / 3]))()
print("sympy" in sys.modules, len(fusing.KERNELS))
"""
    said = subprocess.run([sys.executable, "-c", program, DEVICE], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["False", "1"]
