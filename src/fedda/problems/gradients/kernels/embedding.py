"""Gradients of the tables of embeddings, for a stack of models: sums over tokens in a fixed order, without a sort."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .implicit_gemm import empty, product
from .launch import cdiv, launcher, power_of_two

TOKENS = 64  # that a program looks at together


@triton.jit
def sum_by_row(ROWS, r_n, r_t, D, d_n, d_t, d_e, OUT, T, V, E: tl.constexpr, SKIP: tl.constexpr,
               PRECISION: tl.constexpr, BV: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    """OUT [n, V, E]: for each of V rows, the sum of the gradients D [n, T, E] of the tokens that have this row. It is a
    product with a matrix of zeros and ones. If SKIP, a program leaves out the tokens without any of its rows."""
    EB: tl.constexpr = (E + BE - 1) // BE
    program = tl.program_id(0)
    e = program % EB * BE + tl.arange(0, BE)[None, :]
    program = program // EB
    first = program % tl.cdiv(V, BV) * BV
    n = (program // tl.cdiv(V, BV)).to(tl.int64)
    v = first + tl.arange(0, BV)[:, None]
    acc = tl.zeros((BV, BE), tl.float32)
    for i in range(0, T, BT):
        t = i + tl.arange(0, BT)
        row = tl.load(ROWS + n * r_n + t * r_t, mask=t < T, other=-1).to(tl.int32)
        inside = (row >= first) & (row < first + BV)
        if not SKIP or tl.max(inside.to(tl.int32), 0) > 0:
            at = D + n * d_n + t[:, None] * d_t + e * d_e
            d = tl.load(at, mask=inside[:, None] & (e < E), other=0.0)
            acc = product((v == row[None, :]).to(tl.float32), d, acc, PRECISION)
    tl.store(OUT + n * V * E + v * E + e, acc, mask=(v < V) & (e < E))


def weight_gradient(d: Tensor, rows: Tensor, number: int, precision: str) -> Tensor:
    """The gradient of tables [n, number, E], from d [n, tokens, E] and the rows [n, tokens] of the tokens."""
    n, tokens, size = d.shape
    # Products in full precision need registers, and those of 64 rows take transposed copies of the gradients.
    block = 16 if precision == "float32" else min(32, power_of_two(cdiv(number, 8)))
    columns = min(64, power_of_two(size))
    dw = empty((n, number, size), torch.float32, d)
    # In a small table, nearly every block of tokens has one of the rows. Without a branch, the compiler loads ahead.
    skip = number > TOKENS * block
    launcher(sum_by_row, cdiv(size, columns) * cdiv(number, block) * n)(
        rows, *rows.stride(), d, *d.stride(), dw, tokens, number, size, skip, precision, block, columns, TOKENS,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return dw
