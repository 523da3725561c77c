"""The gradient of a cross-entropy by the logits of a stack of models, as one kernel."""

import triton
import triton.language as tl
from torch import Tensor

from .implicit_gemm import empty
from .launch import cdiv, launcher, power_of_two

NUMBERS = 2048  # of a program, unless one row has more
TARGETS = 1024  # of a model that are read at a time


@triton.jit
def class_gradient(X, TARGET, t_n, D, d_n, OUT, ignored, smoothing, ROWS: tl.constexpr, C: tl.constexpr,
                   BR: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    """D * (softmax(X) - smoothed one-hot(TARGET)) / number of targets that are not ignored, for X [n, ROWS, C]."""
    blocks = tl.cdiv(ROWS, BR)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * BR + tl.arange(0, BR)[:, None]
    c = tl.arange(0, BC)[None, :]
    ok = (row < ROWS) & (c < C)
    at = n * ROWS * C + row * C + c
    x = tl.load(X + at, mask=ok, other=-float("inf")).to(tl.float32)
    target = tl.load(TARGET + n * t_n + row, mask=row < ROWS, other=0)
    count = tl.zeros((BT,), tl.float32)
    for i in range(0, ROWS, BT):
        others = i + tl.arange(0, BT)
        count += tl.where(tl.load(TARGET + n * t_n + others, mask=others < ROWS, other=ignored) == ignored, 0.0, 1.0)
    scale = tl.load(D + n * d_n) / tl.sum(count, 0)
    e = tl.exp(x - tl.max(tl.where(row < ROWS, x, 0.0), 1)[:, None])
    p = e / tl.sum(e, 1)[:, None]
    wanted = tl.where(c == target, 1 - smoothing, 0.0) + smoothing / C
    wanted = tl.where((target >= 0) & (target < C), wanted, float("nan"))  # a target that is no class
    out = tl.where(target == ignored, 0.0, (p - wanted) * scale)
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=ok)


def gradient(d: Tensor, x: Tensor, target: Tensor, ignored: int, smoothing: float) -> Tensor:
    """The gradient by x [n, rows, C] of means over the rows, whose own gradients are d [n]."""
    n, rows, classes = x.shape
    columns = power_of_two(classes, 1)
    together = max(1, min(power_of_two(rows, 1), NUMBERS // columns))
    out = empty((n, rows, classes), x.dtype, x)
    warps = max(1, min(8, together * columns // 512))
    launcher(class_gradient, cdiv(rows, together) * n)(
        x, target, target.stride(0), d, d.stride(0), out, ignored, smoothing, rows, classes, together, columns,
        min(TARGETS, power_of_two(rows, 1)), num_warps=warps,
    )  # fmt: skip
    return out
