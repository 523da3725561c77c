"""Fused vector updates have the bits of the operations they stand for."""

import os
import subprocess
import sys

import pytest
import torch

import fedda
from conftest import NAMES, quadratic, stable
from fedda import rng

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined
pytest.importorskip("triton", reason="needs Triton")

from fedda.engines import fusing  # noqa: E402
from fedda.recording import record  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    monkeypatch.setattr(fusing, "SMALL", 1)


def numbers(*shape, dtype, positive=False):
    v = torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))
    return (v.abs() + 0.1 if positive else v).to(DEVICE)


def calls(module, target=None):
    found = [n for n in module.graph.nodes if n.op == "call_function"]
    return [n for n in found if target is None or n.target is target]


FUSED = torch.ops.fedda.fused.default


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


def test_other_dtypes_and_small_arrays_are_left_alone(monkeypatch):
    monkeypatch.setattr(fusing, "SMALL", 100)
    few, whole = numbers(50, dtype=torch.float64), torch.arange(500, device=DEVICE)
    many = numbers(500, dtype=torch.float32)

    def step():
        return [few * 2 + few, whole * 2 + whole, many.double() * whole + many, many**3 + whole]

    module = fusing.fused(record(step))
    assert all(torch.equal(a, b) for a, b in zip(module(), step(), strict=True))
    assert not calls(module, FUSED)


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
