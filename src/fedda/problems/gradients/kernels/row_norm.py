"""Norms of a stack of models: one kernel forward, with a sum and a relu behind it, and one backward.

Group norm: tensors are [n, B, G, K, S], and the K channels of S pixels in a row, one of B * G, are normalised together.
In a layer norm, G and S are 1 and K counts the features. Weight and bias are [n, G * K]. A program has some samples of
a group. If LAST, tensors are [n, B, S, G, K], and a program has some groups of a sample, which lie side by side.

Batch norm, BY_ROW: tensors are [n, K, G, S] and B is 1. A row is a channel, one of G, with S pixels of K samples.
Weight and bias are [n, G].
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .implicit_gemm import empty
from .launch import cdiv, launcher, power_of_two

MAX_TILE = 8192  # numbers that a program holds at a time
USUAL_TILE = 2048  # numbers of a program, if several samples fit in it


@triton.jit
def sum_row(v):
    """The sums [BB, 1, 1] over channels and pixels of [BB, BK, BS]."""
    return tl.sum(tl.sum(v, 2), 1)[:, None, None]


@triton.jit
def sum_weights(v, LAST: tl.constexpr):
    """The sums over the pixels of [BB, BK, BS] and, if the rows are not groups, over the rows."""
    v = tl.sum(v, 2)
    return v[:, :, None] if LAST else tl.sum(v, 0)[None, :, None]


@triton.jit
def place(B, G: tl.constexpr, LAST: tl.constexpr, BB: tl.constexpr):
    """The model, block of samples, samples and group of a program, and which of its rows exist."""
    program = tl.program_id(0)
    rows = tl.arange(0, BB)[:, None, None]
    if LAST:
        blocks: tl.constexpr = (G + BB - 1) // BB
        group = program % blocks * BB + rows
        block = program // blocks % B
        return (program // blocks // B).to(tl.int64), block, block, group, group < G
    else:
        many = tl.cdiv(B, BB)
        block = program // G % many
        b = block * BB + rows
        return (program // G // many).to(tl.int64), block, b, program % G, b < B


@triton.jit
def tile(i, b, group, inside, G: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BY_ROW: tl.constexpr,
         LAST: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """Block i of some rows: its places along K, its places in the memory of a model, and which of both exist."""
    ACROSS: tl.constexpr = (S + BS - 1) // BS
    k = i // ACROSS * BK + tl.arange(0, BK)[None, :, None]
    s = i % ACROSS * BS + tl.arange(0, BS)[None, None, :]
    row = b * G + group
    if LAST:
        at = b * (S * G * K) + group * K + k + s * (G * K)
    else:
        at = (row * S + k * (G * S) if BY_ROW else row * (K * S) + k * S) + s
    known = inside & (k < K) if LAST else k < K
    return k, at, known, inside & known & (s < S)


@triton.jit
def load(at, ok):
    return tl.load(at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def norm_forward(X, W, w_n, BIAS, bias_n, RESIDUAL, OUT, MEAN, RSTD, B, eps, G: tl.constexpr, K: tl.constexpr,
                 S: tl.constexpr, BY_ROW: tl.constexpr, LAST: tl.constexpr, RELU: tl.constexpr, BB: tl.constexpr,
                 BK: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """A program has BB rows. If that is one block, its numbers are read once."""
    BLOCKS: tl.constexpr = (K + BK - 1) // BK * ((S + BS - 1) // BS)
    n, _, b, group, inside = place(B, G, LAST, BB)
    first = n * B * (G * K * S)
    row = b * G + group
    k, at, known, ok = tile(0, b, group, inside, G, K, S, BY_ROW, LAST, BK, BS)
    x = load(X + first + at, ok)
    mean = sum_row(x)
    for i in range(1, BLOCKS):
        k, at, known, ok = tile(i, b, group, inside, G, K, S, BY_ROW, LAST, BK, BS)
        mean += sum_row(load(X + first + at, ok))
    mean = mean / (K * S)
    variance = tl.zeros((BB, 1, 1), tl.float32)
    for i in range(BLOCKS):
        k, at, known, ok = tile(i, b, group, inside, G, K, S, BY_ROW, LAST, BK, BS)
        if BLOCKS > 1:
            x = load(X + first + at, ok)
        centred = tl.where(ok, x - mean, 0.0)
        variance += sum_row(centred * centred)
    rstd = 1 / tl.sqrt_rn(variance / (K * S) + eps)
    for i in range(BLOCKS):
        k, at, known, ok = tile(i, b, group, inside, G, K, S, BY_ROW, LAST, BK, BS)
        if BLOCKS > 1:
            x = load(X + first + at, ok)
        y = (x - mean) * rstd
        channel = group if BY_ROW else group * K + k
        if W is not None:
            y *= load(W + n * w_n + channel, BY_ROW or known)
        if BIAS is not None:
            y += load(BIAS + n * bias_n + channel, BY_ROW or known)
        if RESIDUAL is not None:
            y += load(RESIDUAL + first + at, ok)
        if RELU:
            y = tl.where(y <= 0, 0.0, y)  # a NaN stays NaN
        tl.store(OUT + first + at, y.to(OUT.dtype.element_ty), mask=ok)
    tl.store(MEAN + n * B * G + row, mean, mask=inside)
    tl.store(RSTD + n * B * G + row, rstd, mask=inside)


@triton.jit
def norm_backward(D, X, Y, W, w_n, MEAN, RSTD, DX, DR, DW, B, G: tl.constexpr, K: tl.constexpr, S: tl.constexpr,
                  BY_ROW: tl.constexpr, LAST: tl.constexpr, BB: tl.constexpr, BK: tl.constexpr,
                  BS: tl.constexpr):  # fmt: skip
    """The gradients DX and, for each block of samples, those of weight and bias, DW [2, n, blocks, channels]. Y is the
    output if it went through a relu; DR is the gradient before this relu."""
    ACROSS: tl.constexpr = (S + BS - 1) // BS
    BLOCKS: tl.constexpr = (K + BK - 1) // BK * ACROSS
    CHANNELS: tl.constexpr = 1 if BY_ROW else K  # of a group
    n, block, b, group, inside = place(B, G, LAST, BB)
    first = n * B * (G * K * S)
    row = b * G + group
    mean = load(MEAN + n * B * G + row, inside)
    rstd = load(RSTD + n * B * G + row, inside)
    sums = (n * (B if LAST else tl.cdiv(B, BB)) + block) * (G * CHANNELS) + group * CHANNELS
    half = tl.num_programs(0).to(tl.int64) * CHANNELS
    if LAST:
        half = half // ((G + BB - 1) // BB) * G
    total = tl.zeros((BB, 1, 1), tl.float32)
    product = tl.zeros((BB, 1, 1), tl.float32)
    ROWS: tl.constexpr = BB if LAST else 1  # that have weights of their own
    by_w = tl.zeros((ROWS, BK, 1), tl.float32)
    by_bias = tl.zeros((ROWS, BK, 1), tl.float32)
    d = tl.zeros((BB, BK, BS), tl.float32)
    x = tl.zeros((BB, BK, BS), tl.float32)
    for i in range(BLOCKS):
        k, at, known, ok = tile(i, b, group, inside, G, K, S, BY_ROW, LAST, BK, BS)
        d = load(D + first + at, ok)
        if Y is not None:
            d = tl.where(load(Y + first + at, ok) <= 0, 0.0, d)
            if DR is not None:
                tl.store(DR + first + at, d.to(DR.dtype.element_ty), mask=ok)
        x = tl.where(ok, (load(X + first + at, ok) - mean) * rstd, 0.0)
        if not BY_ROW:
            if DW is not None:
                if i % ACROSS == 0:
                    by_w = tl.zeros((ROWS, BK, 1), tl.float32)
                    by_bias = tl.zeros((ROWS, BK, 1), tl.float32)
                by_w += sum_weights(d * x, LAST)
                by_bias += sum_weights(d, LAST)
                tl.store(DW + sums + k, by_w, mask=known)
                tl.store(DW + half + sums + k, by_bias, mask=known)
            if W is not None:
                d *= load(W + n * w_n + group * K + k, known)
        total += sum_row(d)
        product += sum_row(d * x)
    factor = rstd
    if BY_ROW:
        if DW is not None:
            tl.store(DW + sums + b, product)
            tl.store(DW + half + sums + b, total)
        if W is not None:
            factor *= tl.load(W + n * w_n + group)
    for i in range(BLOCKS):
        k, at, known, ok = tile(i, b, group, inside, G, K, S, BY_ROW, LAST, BK, BS)
        if BLOCKS > 1:
            d = load(D + first + at, ok)
            x = (load(X + first + at, ok) - mean) * rstd
            if Y is not None:
                d = tl.where(load(Y + first + at, ok) <= 0, 0.0, d)
            if W is not None and not BY_ROW:
                d *= load(W + n * w_n + group * K + k, known)
        dx = (d - (total + x * product) / (K * S)) * factor
        tl.store(DX + first + at, dx.to(DX.dtype.element_ty), mask=ok)


def forward(
    x: Tensor, w: Tensor | None, bias: Tensor | None, residual: Tensor | None, sizes: Sequence[int], by_row: bool,
    last: bool, eps: float, relu: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The output, and the mean and the inverse deviation [n, B, G] of every row. `sizes` are B, G, K, S."""
    n, samples, *rest = len(x), *sizes
    out = empty(tuple(x.shape), dtype, x)
    mean, rstd = empty((2, n, samples, rest[0]), torch.float32, x)
    grid, options = launch(n, sizes, last, x.element_size())
    launcher(norm_forward, grid)(
        x, w, first_stride(w), bias, first_stride(bias), residual, out, mean, rstd, samples, eps, *rest, by_row, last,
        relu, **options,
    )  # fmt: skip
    return out, mean, rstd


def backward(
    d: Tensor, x: Tensor, y: Tensor | None, w: Tensor | None, mean: Tensor, rstd: Tensor, sizes: Sequence[int],
    by_row: bool, last: bool, residual: bool, weights: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of x, of what was added to it if there is a `residual`, and shares [2, n, S, channels] of those of
    weight and bias if there are trainable `weights`."""
    n, samples, *rest = len(x), *sizes
    grid, options = launch(n, sizes, last, x.element_size())
    blocks = samples if last else grid // (n * rest[0])
    dx = empty(tuple(x.shape), x.dtype, x)
    dr = empty(tuple(x.shape), d.dtype, x) if residual else None
    channels = rest[0] if by_row else rest[0] * rest[1]
    dw = empty((2, n, blocks, channels), torch.float32, x) if weights else None
    launcher(norm_backward, grid)(
        d, x, y, w, first_stride(w), mean, rstd, dx, dr, dw, samples, *rest, by_row, last, **options
    )  # fmt: skip
    return dx, dr, dw


def launch(n: int, sizes: Sequence[int], last: bool, size: int) -> tuple[int, dict[str, Any]]:
    """The number of programs, the sizes of their blocks, and their warps; `size` counts the bytes of a number."""
    samples, groups, channels, pixels = sizes
    across, down, rows = power_of_two(pixels, 1), power_of_two(channels, 1), samples
    if last:  # groups that have 32 bytes of a pixel together, and more if these are few numbers
        down, rows = min(down, MAX_TILE), groups
        many = min(power_of_two(rows, 1), max(cdiv(32, size * down), USUAL_TILE // (across * down), 1))
        across = min(across, MAX_TILE // (many * down))
    else:
        across = min(across, MAX_TILE)
        down = min(down, MAX_TILE // across)
        many = min(power_of_two(rows, 1), max(1, USUAL_TILE // (across * down)))
    warps = max(1, min(8, many * down * across // 512))
    return n * cdiv(rows, many) * (samples if last else groups), {
        "BB": many, "BK": down, "BS": across, "num_warps": warps
    }  # fmt: skip


def first_stride(v: Tensor | None) -> int:
    return 0 if v is None else v.stride(0)
