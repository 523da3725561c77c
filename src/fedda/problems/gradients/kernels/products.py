"""Products of the linear layers of a stack of models: outputs, gradients of inputs, and gradients of weights and
biases. Tensors have any strides and types; what one kernel reads, it converts itself."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .implicit_gemm import block, empty, fitting_block, product, share_of
from .launch import cdiv, launcher, power_of_two


@triton.jit
def multiply(X, x_n, x_t, x_k, W, w_n, w_k, w_m, BIAS, bias_n, bias_m, OUT, T, K: tl.constexpr, M: tl.constexpr,
             PRECISION: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """OUT [n, T, M] = X [n, T, K] W [n, K, M] + BIAS [n, M]."""
    MB: tl.constexpr = (M + BM - 1) // BM
    program = tl.program_id(0)
    m = program % MB * BM + tl.arange(0, BM)[None, :]
    program = program // MB
    blocks = tl.cdiv(T, BT)
    t = program % blocks * BT + tl.arange(0, BT)[:, None]
    n = (program // blocks).to(tl.int64)
    acc = tl.zeros((BT, BM), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        x = tl.load(X + n * x_n + t * x_t + (k * x_k)[None, :], mask=(t < T) & (k < K)[None, :], other=0.0)
        w = tl.load(W + n * w_n + (k * w_k)[:, None] + m * w_m, mask=(k < K)[:, None] & (m < M), other=0.0)
        acc = product(x, w, acc, PRECISION)
    if BIAS is not None:
        acc += tl.load(BIAS + n * bias_n + m * bias_m, mask=m < M, other=0.0)
    tl.store(OUT + (n * T + t) * M + m, acc, mask=(t < T) & (m < M))


@triton.jit
def sum_tokens(X, x_n, x_t, x_i, D, d_n, d_t, d_o, OUT, N, T, SHARES, share, I: tl.constexpr, O: tl.constexpr,
               BIAS: tl.constexpr, PRECISION: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
               BT: tl.constexpr):  # fmt: skip
    """Gradients of weights and biases, from the gradients of the outputs D [n, T, O] and the inputs X [n, T, I] of T
    tokens: sums over a share of the tokens, in OUT [SHARES, N, ...]: weights [O, I], then biases [O]. A program has a
    block of outputs and one of inputs; those with the first inputs sum up the biases, from what they load anyway."""
    IB: tl.constexpr = (I + BI - 1) // BI
    OB: tl.constexpr = (O + BO - 1) // BO
    program = tl.program_id(0)
    i = program % IB * BI + tl.arange(0, BI)[None, :]
    first = program % IB == 0
    program = program // IB
    o = program % OB * BO + tl.arange(0, BO)[None, :]
    program = program // OB
    s = program % SHARES
    n = (program // SHARES).to(tl.int64)
    acc = tl.zeros((BO, BI), tl.float32)
    total = tl.zeros((BT, BO), tl.float32)
    for start in range(s * share, min((s + 1) * share, T), BT):
        t = start + tl.arange(0, BT)[:, None]
        d = tl.load(D + n * d_n + t * d_t + o * d_o, mask=(t < T) & (o < O), other=0.0)
        x = tl.load(X + n * x_n + t * x_t + i * x_i, mask=(t < T) & (i < I), other=0.0)
        acc = product(tl.trans(d), x, acc, PRECISION)
        if BIAS and first:
            total += d
    out = OUT + (s.to(tl.int64) * N + n) * (O * (I + BIAS))
    o = tl.trans(o)
    tl.store(out + o * I + i, acc, mask=(o < O) & (i < I))
    if BIAS:
        tl.store(out + O * I + o, tl.sum(total, 0)[:, None], mask=first & (o < O))


def multiplied(x: Tensor, w: Tensor, bias: Tensor | None, precision: str, dtype: torch.dtype) -> Tensor:
    """x [n, T, K] times w [n, K, M], plus the bias [n, M]."""
    (n, tokens, summed), columns = x.shape, w.shape[2]
    out = empty((n, tokens, columns), dtype, x)
    rows, across, warps = fitting_block(tokens, columns, 1, precision)
    depth = min(64 if precision == "bf16" else 32, power_of_two(summed))
    launcher(multiply, cdiv(tokens, rows) * cdiv(columns, across) * n)(
        x, *x.stride(), w, *w.stride(), bias, *((0, 0) if bias is None else bias.stride()), out, tokens, summed,
        columns, precision, rows, across, depth, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out


def weight_gradient(x: Tensor, d: Tensor, bias: bool, precision: str) -> list[Tensor]:
    """Shares [S, n, O, I] of the gradient of the weights and, if asked for, [S, n, O] of that of the biases, in
    float32."""
    (n, tokens, inputs), outputs = x.shape, d.shape[2]
    rows, columns, warps = block(outputs, inputs, precision, (64, 64))
    if precision == "tf32":
        warps = min(warps, 2)  # four would multiply from shared memory, and copy every number alone to transpose it
    programs = cdiv(outputs, rows) * cdiv(inputs, columns) * n
    share = share_of(tokens, programs * warps)
    shares = cdiv(tokens, share)
    out = empty((shares, n, outputs * (inputs + bias)), torch.float32, x)
    launcher(sum_tokens, programs * shares)(
        x, *x.stride(), d, *d.stride(), out, n, tokens, shares, share, inputs, outputs, bias, precision, rows, columns,
        32, num_warps=warps, num_stages=3,
    )  # fmt: skip
    dw, *db = out.split([outputs * inputs] + bias * [outputs], dim=2)
    return [dw.view(shares, n, outputs, inputs), *db]
