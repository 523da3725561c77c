"""Group and layer norms of a stack of models: one kernel forward, with a sum and a relu behind it, and one backward.

Tensors are [n, B, G, K, S]: K channels of S pixels, in each of G groups, are normalised together. In a layer norm, G
and S are 1 and K counts the features. Weight and bias are [n, G * K].
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .implicit_gemm import empty
from .launch import cdiv, launcher, power_of_two

LARGEST = 8192  # numbers that a program holds at a time
USUAL = 2048  # numbers of a program, if several samples fit in it


@triton.jit
def sum_row(v):
    """The sums [BB, 1, 1] over channels and pixels of [BB, BK, BS]."""
    return tl.sum(tl.sum(v, 2), 1)[:, None, None]


@triton.jit
def place(B, G: tl.constexpr, BB: tl.constexpr):
    """The model, block of samples, samples and group of a program."""
    program = tl.program_id(0)
    blocks = tl.cdiv(B, BB)
    block = program // G % blocks
    b = block * BB + tl.arange(0, BB)[:, None, None]
    return (program // G // blocks).to(tl.int64), block, b, program % G


@triton.jit
def tile(i, row, inside, K: tl.constexpr, S: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr):
    """The channels of block i of some rows, the places of its numbers in a model, and which of them exist."""
    ACROSS: tl.constexpr = (S + BS - 1) // BS
    k = i // ACROSS * BK + tl.arange(0, BK)[None, :, None]
    s = i % ACROSS * BS + tl.arange(0, BS)[None, None, :]
    return k, row * (K * S) + k * S + s, inside & (k < K) & (s < S)


@triton.jit
def load(at, ok):
    return tl.load(at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def norm_forward(X, W, w_n, BIAS, bias_n, RESIDUAL, OUT, MEAN, RSTD, B, eps, G: tl.constexpr, K: tl.constexpr,
                 S: tl.constexpr, RELU: tl.constexpr, BB: tl.constexpr, BK: tl.constexpr,
                 BS: tl.constexpr):  # fmt: skip
    """A program has a group of BB samples. If that is one block, its numbers are read once."""
    BLOCKS: tl.constexpr = (K + BK - 1) // BK * ((S + BS - 1) // BS)
    n, _, b, group = place(B, G, BB)
    first = n * B * (G * K * S)
    row = b * G + group
    k, at, ok = tile(0, row, b < B, K, S, BK, BS)
    x = load(X + first + at, ok)
    mean = sum_row(x)
    for i in range(1, BLOCKS):
        k, at, ok = tile(i, row, b < B, K, S, BK, BS)
        mean += sum_row(load(X + first + at, ok))
    mean = mean / (K * S)
    variance = tl.zeros((BB, 1, 1), tl.float32)
    for i in range(BLOCKS):
        k, at, ok = tile(i, row, b < B, K, S, BK, BS)
        if BLOCKS > 1:
            x = load(X + first + at, ok)
        centred = tl.where(ok, x - mean, 0.0)
        variance += sum_row(centred * centred)
    rstd = 1 / tl.sqrt_rn(variance / (K * S) + eps)
    for i in range(BLOCKS):
        k, at, ok = tile(i, row, b < B, K, S, BK, BS)
        if BLOCKS > 1:
            x = load(X + first + at, ok)
        y = (x - mean) * rstd
        if W is not None:
            y *= load(W + n * w_n + group * K + k, k < K)
        if BIAS is not None:
            y += load(BIAS + n * bias_n + group * K + k, k < K)
        if RESIDUAL is not None:
            y += load(RESIDUAL + first + at, ok)
        if RELU:
            y = tl.where(y <= 0, 0.0, y)  # a NaN stays NaN
        tl.store(OUT + first + at, y.to(OUT.dtype.element_ty), mask=ok)
    tl.store(MEAN + n * B * G + row, mean, mask=b < B)
    tl.store(RSTD + n * B * G + row, rstd, mask=b < B)


@triton.jit
def norm_backward(D, X, Y, W, w_n, MEAN, RSTD, DX, DR, DW, B, G: tl.constexpr, K: tl.constexpr, S: tl.constexpr,
                  BB: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """The gradients DX and, for each block of samples, those of weight and bias, DW [2, n, blocks, G * K]. Y is the
    output if it went through a relu; DR is the gradient before this relu."""
    ACROSS: tl.constexpr = (S + BS - 1) // BS
    BLOCKS: tl.constexpr = (K + BK - 1) // BK * ACROSS
    n, block, b, group = place(B, G, BB)
    first = n * B * (G * K * S)
    row = b * G + group
    mean = load(MEAN + n * B * G + row, b < B)
    rstd = load(RSTD + n * B * G + row, b < B)
    sums = (n * tl.cdiv(B, BB) + block) * (G * K) + group * K
    half = tl.num_programs(0).to(tl.int64) * K
    total = tl.zeros((BB, 1, 1), tl.float32)
    product = tl.zeros((BB, 1, 1), tl.float32)
    by_w = tl.zeros((1, BK, 1), tl.float32)
    by_bias = tl.zeros((1, BK, 1), tl.float32)
    d = tl.zeros((BB, BK, BS), tl.float32)
    x = tl.zeros((BB, BK, BS), tl.float32)
    for i in range(BLOCKS):
        k, at, ok = tile(i, row, b < B, K, S, BK, BS)
        d = load(D + first + at, ok)
        if Y is not None:
            d = tl.where(load(Y + first + at, ok) <= 0, 0.0, d)
            if DR is not None:
                tl.store(DR + first + at, d.to(DR.dtype.element_ty), mask=ok)
        x = tl.where(ok, (load(X + first + at, ok) - mean) * rstd, 0.0)
        if DW is not None:
            if i % ACROSS == 0:
                by_w = tl.zeros((1, BK, 1), tl.float32)
                by_bias = tl.zeros((1, BK, 1), tl.float32)
            by_w += tl.sum(tl.sum(d * x, 2), 0)[None, :, None]
            by_bias += tl.sum(tl.sum(d, 2), 0)[None, :, None]
            tl.store(DW + sums + k, by_w, mask=k < K)
            tl.store(DW + half + sums + k, by_bias, mask=k < K)
        if W is not None:
            d *= load(W + n * w_n + group * K + k, k < K)
        total += sum_row(d)
        product += sum_row(d * x)
    for i in range(BLOCKS):
        k, at, ok = tile(i, row, b < B, K, S, BK, BS)
        if BLOCKS > 1:
            d = load(D + first + at, ok)
            x = (load(X + first + at, ok) - mean) * rstd
            if Y is not None:
                d = tl.where(load(Y + first + at, ok) <= 0, 0.0, d)
            if W is not None:
                d *= load(W + n * w_n + group * K + k, k < K)
        dx = (d - (total + x * product) / (K * S)) * rstd
        tl.store(DX + first + at, dx.to(DX.dtype.element_ty), mask=ok)


def forward(
    x: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    relu: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the mean and the inverse deviation [n, B, G] of every row."""
    n, samples, *sizes = x.shape
    out = empty((n, samples, *sizes), dtype, x)
    mean, rstd = empty((2, n, samples, sizes[0]), torch.float32, x)
    grid, options = launch(*x.shape)
    launcher(norm_forward, grid)(
        x, w, first_stride(w), bias, first_stride(bias), residual, out, mean, rstd, samples, eps, *sizes, relu,
        **options,
    )  # fmt: skip
    return out, mean, rstd


def backward(
    d: Tensor, x: Tensor, y: Tensor | None, w: Tensor | None, mean: Tensor, rstd: Tensor, residual: bool, weights: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, of what was added to it if there is a `residual`, and [2, n, G * K] of weight and bias if
    there are trainable `weights`."""
    n, samples, *sizes = x.shape
    grid, options = launch(*x.shape)
    blocks = grid // (n * sizes[0])
    dx = empty((n, samples, *sizes), x.dtype, x)
    dr = empty((n, samples, *sizes), d.dtype, x) if residual else None
    dw = empty((2, n, blocks, sizes[0] * sizes[1]), torch.float32, x) if weights else None
    launcher(norm_backward, grid)(d, x, y, w, first_stride(w), mean, rstd, dx, dr, dw, samples, *sizes, **options)
    return dx, dr, None if dw is None else dw[:, :, 0] if blocks == 1 else dw.sum(2)


def launch(n: int, samples: int, groups: int, channels: int, pixels: int) -> tuple[int, dict[str, Any]]:
    """The number of programs, the sizes of their blocks, and their warps."""
    across = min(power_of_two(pixels, 1), LARGEST)
    down = min(power_of_two(channels, 1), LARGEST // across)
    many = min(power_of_two(samples, 1), max(1, USUAL // (across * down)))
    warps = max(1, min(8, many * down * across // 512))
    return n * cdiv(samples, many) * groups, {"BB": many, "BK": down, "BS": across, "num_warps": warps}


def first_stride(v: Tensor | None) -> int:
    return 0 if v is None else v.stride(0)
