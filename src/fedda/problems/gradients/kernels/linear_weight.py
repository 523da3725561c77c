"""Gradients of the weights and biases of linear layers, for a stack of models, from the gradients of the outputs
D [n, T, O] and the inputs X [n, T, I] of T tokens. Both have any strides."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .implicit_gemm import block, empty, product, share_of
from .launch import cdiv, launcher


@triton.jit
def sum_tokens(X, x_n, x_t, x_i, D, d_n, d_t, d_o, OUT, N, T, SHARES, share, I: tl.constexpr, O: tl.constexpr,
               BIAS: tl.constexpr, PRECISION: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
               BT: tl.constexpr):  # fmt: skip
    """Sums over a share of the T tokens, in OUT [SHARES, ...]: weights [N, O, I], then biases [N, O]. A program has a
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
    out = OUT + s.to(tl.int64) * N * (O * (I + BIAS))
    o = tl.trans(o)
    tl.store(out + n * (O * I) + o * I + i, acc, mask=(o < O) & (i < I))
    if BIAS:
        tl.store(out + (N * (O * I) + n * O) + o, tl.sum(total, 0)[:, None], mask=first & (o < O))


def weight_gradient(x: Tensor, d: Tensor, bias: bool, precision: str) -> list[Tensor]:
    """The gradient of the weights [n, O, I] and, if asked for, of the biases [n, O], in float32. The order of the sums
    is fixed."""
    (n, tokens, inputs), outputs = x.shape, d.shape[2]
    rows, columns, warps = block(outputs, inputs, precision, (64, 64))
    if precision == "tf32":
        warps = min(warps, 2)  # four would multiply from shared memory, and copy every number alone to transpose it
    programs = cdiv(outputs, rows) * cdiv(inputs, columns) * n
    share = share_of(tokens, programs * warps)
    shares = cdiv(tokens, share)
    out = empty((shares, n * outputs * (inputs + bias)), torch.float32, x)
    launcher(sum_tokens, programs * shares)(
        x, *x.stride(), d, *d.stride(), out, n, tokens, shares, share, inputs, outputs, bias, precision, rows, columns,
        32, num_warps=warps, num_stages=3,
    )  # fmt: skip
    dw, *db = (out[0] if shares == 1 else out.sum(0)).split([n * outputs * inputs] + bias * [n * outputs])
    return [dw.view(n, outputs, inputs), *(v.view(n, outputs) for v in db)]
