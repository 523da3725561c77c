"""The memory checker of tests/memory_checked.py sees accesses outside of a kernel's arguments."""

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are defined
triton = pytest.importorskip("triton", reason="needs Triton")
import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.skipif(CUDA, reason="needs Triton's interpreter, which runs where there is no CUDA device")


@triton.jit
def copy(X, Y, read, written, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(Y + i, tl.load(X + i, mask=i < read, other=0.0), mask=i < written)


@pytest.mark.parametrize(
    ("read", "written", "what"), [(8, 8, ""), (9, 8, "1 numbers are read"), (8, 11, "3 .* written")]
)
def test_accesses_outside_are_errors(read, written, what):
    x, y = torch.arange(8.0), torch.zeros(8)
    if what:
        with pytest.raises(triton.runtime.errors.InterpreterError, match=what):
            copy[(1,)](x, y, read, written, 16)
    else:
        copy[(1,)](x, y, read, written, 16)
        assert torch.equal(x, y)


@triton.jit
def copy_all(X, Y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(Y + i, tl.load(X + i))


def test_accesses_without_a_mask_are_checked():
    with pytest.raises(triton.runtime.errors.InterpreterError, match="8 numbers are read outside"):
        copy_all[(1,)](torch.zeros(8, dtype=torch.float16), torch.zeros(16, dtype=torch.float16), 16)
