"""Triton kernels for the recurrent layers of a stack of models: a time step is one kernel, forward or backward.

A program computes a block of hidden units and a block of samples of one model, [units, samples]. It reads the hidden
states (backward: the gradients of the gates) of all units, which the step before has written, and otherwise only what
it writes itself, so one launch needs no order among its programs.

One program per model that loops over time would need no launches, but one multiprocessor then reads all recurrent
weights of the model in every step. For an LSTM of 256 units that is 1 MB, about 10 microseconds; spread over the GPU,
a step of 10 to 20 models should take half of that, with its launch in a CUDA graph.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernels.launch import Compiling, cdiv, compile_and_run, launcher, power_of_two

GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}
PRODUCTS = {"float32": "ieee", "tf32": "tf32", "bf16": "bf16"}
# Hidden units and samples (at most) of a program, columns of a block of weights, and launch options. Not measured:
# chosen from counted bytes so that 10 models of 256 units occupy the GPU, and without register spills.
FORWARD = {"units": 16, "samples": 64, "columns": 64, "num_warps": 4, "num_stages": 4}
BACKWARD = {"units": 32, "samples": 32, "columns": 32, "num_warps": 4, "num_stages": 4}
SPLITS = tl.constexpr(4)  # partial sums of a backward product, one for each warp


# -- functions of blocks ---------------------------------------------------------------------------------------------
@triton.jit
def tanh(x):
    """A polynomial near 0, where the quotient would lose digits; no overflow elsewhere."""
    s = x * x
    near = x * (1 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835)))))
    e = tl.exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))  # exp(-x) may be infinite


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)
    return acc


@triton.jit
def load(at, ok):
    return tl.load(at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def store(at, value, ok):
    tl.store(at, value.to(at.dtype.element_ty), mask=ok)


@triton.jit
def quarters(acc, BH: tl.constexpr, BB: tl.constexpr):
    """The four blocks [BH, BB] of acc [4 * BH, BB] or [4, BH, BB]."""
    even, odd = tl.split(tl.permute(tl.reshape(acc, (2, 2, BH, BB)), (2, 3, 0, 1)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


# -- one time step; what only this program needs is loaded first, to arrive during the product -----------------------
@triton.jit(do_not_specialize=["t", "T"])
def step_forward(A, FIRST, E, W, OUT, EXTRA, GATES, t, T, B, H: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr,
                 BH: tl.constexpr, BB: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Step t of N gates: A [n, T, B, N * H] are the products of the inputs, FIRST [n, B, H] is the first state; the
    other tensors are as in `recurrent.recurrence`."""
    P: tl.constexpr = 1 if N == 1 else 4
    g = tl.program_id(0).to(tl.int64)
    j = (tl.program_id(1) * BH + tl.arange(0, BH))[:, None]
    b = (tl.program_id(2) * BB + tl.arange(0, BB))[None, :]
    k = tl.arange(0, BK)
    ok = (j < H) & (b < B)
    own = b * H + j
    now = (g * T + t) * B * H + own
    at = (g * T + t) * B * N * H + b * N * H + j
    before = tl.where(t == 0, FIRST + g * B * H, OUT + (g * T + t - 1) * B * H)
    a = load(A + at, ok)
    if N > 1:
        a1 = load(A + at + H, ok)
        a2 = load(A + at + 2 * H, ok)
    if KIND == "lstm":
        a3 = load(A + at + 3 * H, ok)
        c = load(tl.where(t == 0, E + g * B * H, EXTRA + (g * T + t - 1) * B * H) + own, ok)
    elif KIND == "gru":
        bias = load(E + g * H + j, j < H)
        h = load(before + own, ok)
    row = tl.arange(0, P * BH)  # of the block of weights: the units of one gate, then those of the next
    unit = tl.program_id(1) * BH + row % BH
    inside = ((row < N * BH) & (unit < H))[:, None]
    w = W + g * N * H * H + ((row // BH) * H + unit)[:, None] * H + k[None, :]
    acc = tl.zeros((P * BH, BB), tl.float32)
    for i in range(0, H, BK):
        weights = tl.load(w + i, mask=inside & (i + k < H)[None, :], other=0.0)
        states = tl.load(before + b * H + (i + k)[:, None], mask=(b < B) & (i + k < H)[:, None], other=0.0)
        acc = product(weights, states, acc, PRECISION)
    if KIND == "lstm":
        p_i, p_f, p_g, p_o = quarters(acc, BH, BB)
        i, f, n, o = sigmoid(a + p_i), sigmoid(a1 + p_f), tanh(a2 + p_g), sigmoid(a3 + p_o)
        c = f * c + i * n
        store(GATES + at, i, ok)
        store(GATES + at + H, f, ok)
        store(GATES + at + 2 * H, n, ok)
        store(GATES + at + 3 * H, o, ok)
        store(EXTRA + now, c, ok)
        store(OUT + now, o * tanh(c), ok)
    elif KIND == "gru":
        p_r, p_z, p_n, _ = quarters(acc, BH, BB)
        p_n += bias
        r, z = sigmoid(a + p_r), sigmoid(a1 + p_z)
        n = tanh(a2 + r * p_n)
        store(GATES + at, r, ok)
        store(GATES + at + H, z, ok)
        store(GATES + at + 2 * H, n, ok)
        store(EXTRA + now, p_n, ok)
        store(OUT + now, n + z * (h - n), ok)
    else:
        a += acc
        store(OUT + now, tanh(a) if KIND == "tanh" else tl.where(a <= 0, 0.0, a), ok)  # a NaN stays NaN


@triton.jit(do_not_specialize=["t", "T"])
def step_backward(D_OUT, D_EXTRA, BEFORE, OUT, EXTRA, GATES, E, W, D, D_RECURRENT, CARRY, t, T, B, H: tl.constexpr,
                  N: tl.constexpr, KIND: tl.constexpr, BH: tl.constexpr, BB: tl.constexpr, BK: tl.constexpr,
                  PRECISION: tl.constexpr):  # fmt: skip
    """The gradients of step t: D of the gates, D_RECURRENT of the recurrent products (the same tensor except for a
    GRU). CARRY [n, B, H] is what step t leaves to step t - 1: of an LSTM the gradient of the cells, of a GRU the part
    of the hidden state's that does not pass through the gates. Only the program that reads a number of it writes it."""
    g = tl.program_id(0).to(tl.int64)
    j = (tl.program_id(1) * BH + tl.arange(0, BH))[:, None]
    b = (tl.program_id(2) * BB + tl.arange(0, BB))[None, :]
    ok = (j < H) & (b < B)
    own = b * H + j
    now = (g * T + t) * B * H + own
    at = (g * T + t) * B * N * H + b * N * H + j
    carry = CARRY + g * B * H + own
    d_h = load(D_OUT + now, ok)
    if N > 1:
        carried = load(carry, ok & (t + 1 < T))
        gate0, gate1, gate2 = load(GATES + at, ok), load(GATES + at + H, ok), load(GATES + at + 2 * H, ok)
        extra = load(EXTRA + now, ok)
    if KIND == "lstm":
        gate3 = load(GATES + at + 3 * H, ok)
        before = load(tl.where(t == 0, E + g * B * H, EXTRA + (g * T + t - 1) * B * H) + own, ok)
        carried += load(D_EXTRA + now, ok)
    elif KIND == "gru":
        before = load(BEFORE + now, ok)
    else:
        y = load(OUT + now, ok)
    row = (tl.arange(0, SPLITS)[:, None] * BK + tl.arange(0, BK)[None, :])[:, :, None]
    w = W + g * N * H * H + tl.permute(row, (0, 2, 1)) * H + j[None]
    d = D_RECURRENT + (g * T + t + 1) * B * N * H + b[None] * N * H + row
    acc = tl.zeros((SPLITS, BH, BB), tl.float32)
    if t + 1 < T:
        for i in range(0, N * H, SPLITS * BK):
            inside = i + row < N * H
            weights = tl.load(w + i * H, mask=tl.permute(inside, (0, 2, 1)) & (j < H)[None], other=0.0)
            gradients = tl.load(d + i, mask=inside & (b < B)[None], other=0.0)
            acc = product(weights, gradients, acc, PRECISION)
    s0, s1, s2, s3 = quarters(acc, BH, BB)  # tl.sum would leave every warp with the whole block
    d_h += (s0 + s1) + (s2 + s3)
    if KIND == "lstm":
        i, f, n, o, c = gate0, gate1, gate2, gate3, tanh(extra)
        d_c = carried + d_h * o * (1 - c * c)
        store(carry, d_c * f, ok)
        store(D + at, d_c * n * i * (1 - i), ok)
        store(D + at + H, d_c * before * f * (1 - f), ok)
        store(D + at + 2 * H, d_c * i * (1 - n * n), ok)
        store(D + at + 3 * H, d_h * c * o * (1 - o), ok)
    elif KIND == "gru":
        r, z, n = gate0, gate1, gate2
        d_h += carried
        d_n = d_h * (1 - z) * (1 - n * n)
        d_r = d_n * extra * r * (1 - r)
        d_z = d_h * (before - n) * z * (1 - z)
        store(carry, d_h * z, ok)
        store(D + at, d_r, ok)
        store(D + at + H, d_z, ok)
        store(D + at + 2 * H, d_n, ok)
        store(D_RECURRENT + at, d_r, ok)
        store(D_RECURRENT + at + H, d_z, ok)
        store(D_RECURRENT + at + 2 * H, d_n * r, ok)
    else:
        store(D + at, d_h * (1 - y * y) if KIND == "tanh" else tl.where(y > 0, d_h, 0.0), ok)


# -- all time steps --------------------------------------------------------------------------------------------------
def forward(
    kind: str, precision: str, a: Tensor, h: Tensor, e: Tensor, w: Tensor, out: Tensor, extra: Tensor, gates: Tensor
) -> None:
    """Write the hidden states, the cells or recurrent products, and the gates, as the plain operations do."""
    tensors = a, h, e, in_precision(w, precision), out, extra, gates
    run_steps(step_forward, kind, precision, tensors, out, range(out.shape[1]), dict(FORWARD))
    zero_if_compiling(out, extra, gates)


def backward(
    kind: str, precision: str, before: Tensor, d_out: Tensor, d_extra: Tensor, out: Tensor, extra: Tensor,
    gates: Tensor, e: Tensor, w: Tensor, d: Tensor, d_e: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write the gradients of the gates and of e; return those of the recurrent products and of the first state."""
    d_recurrent = torch.empty_like(d) if kind == "gru" else d
    carry = torch.empty(before[:, 0].shape, dtype=torch.float32, device=d.device)
    tensors = d_out, d_extra, before, out, extra, gates, e, in_precision(w, precision), d, d_recurrent, carry
    run_steps(step_backward, kind, precision, tensors, out, range(out.shape[1])[::-1], dict(BACKWARD))
    zero_if_compiling(d, d_recurrent, carry)
    d_h = torch.bmm(d_recurrent[:, 0], w)
    if kind == "lstm":
        d_e.copy_(carry)
    elif kind == "gru":
        torch.sum(d_recurrent[..., -e.shape[-1] :], dim=(1, 2), out=d_e[:, 0])
        d_h += carry
    else:
        d_e.zero_()
    return d_recurrent, d_h


def zero_if_compiling(*results: Tensor) -> None:
    """If kernels are only compiled, the operations after them see numbers: some check theirs, such as BCELoss, and
    after a failed check a process can no longer use the GPU."""
    if Compiling.now:
        for v in results:
            v.zero_()


def in_precision(w: Tensor, precision: str) -> Tensor:
    """Weights that every step would round are rounded once."""
    return w.to(torch.bfloat16) if precision == "bf16" else w


def run_steps(
    kernel: Any, kind: str, precision: str, tensors: Sequence[Tensor], out: Tensor, times: range,
    options: dict[str, int],
) -> None:  # fmt: skip
    """Launch a kernel for one time step after the other."""
    tensors = [v.contiguous() for v in tensors]  # a copy of inputs only: results are contiguous
    units, samples, columns = (options.pop(name) for name in ("units", "samples", "columns"))
    n, steps, batch, size = out.shape
    samples = min(samples, power_of_two(batch))
    if precision == "float32":
        columns = 16  # these products keep all columns of a block in registers
    if kernel is step_forward and GATES[kind] == 1:
        units *= 4  # as many rows of weights as with four gates
    sizes = steps, batch, size, GATES[kind], kind, units, samples, min(columns, power_of_two(size)), PRODUCTS[precision]

    def run() -> Tensor:
        step = launcher(kernel, n, cdiv(size, units), cdiv(batch, samples))
        for t in times[:1] if Compiling.now else times:
            step(*tensors, t, *sizes, **options)
        return out

    compile_and_run((kernel.__name__, kind, precision, out.shape, *(v.dtype for v in tensors)), out, run)
