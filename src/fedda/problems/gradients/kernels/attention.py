"""Attention of a stack of models without its scores in memory (Dao et al. 2022), forward and backward.

Tensors are [n, B, heads, T, D] with any strides but the last, which is 1 (0 where the stack shares a tensor). A program
has a block of queries of one head and goes over blocks of keys or, for the gradients of keys and values, the other way
round. Scores are computed again in the backward pass, from the sums of the softmax; all are in base 2. Nothing is added
up by several programs, so that results repeat to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .implicit_gemm import empty, product
from .launch import Compiling, cdiv, launcher, power_of_two

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load(X, i, x_t, T, D: tl.constexpr, BD: tl.constexpr):
    """Rows i of a head, as a block [rows, BD]."""
    d = tl.arange(0, BD)
    return tl.load(X + i[:, None] * x_t + d[None, :], mask=(i < T)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store(X, i, x_t, value, T, D: tl.constexpr, BD: tl.constexpr):
    d = tl.arange(0, BD)
    tl.store(X + i[:, None] * x_t + d[None, :], value.to(X.dtype.element_ty), mask=(i < T)[:, None] & (d < D)[None, :])


@triton.jit
def scores(q, k, MASK, t, s, m_t, m_s, scale, T, S, CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """The scores of queries t and keys s in base 2; minus infinity where a query must not see a key."""
    x = product(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), tl.float32), PRECISION) * (scale * LOG2E)
    seen = (s < S)[None, :]
    if CAUSAL:
        seen = seen & (s[None, :] <= t[:, None])
    if MASK is not None:
        m = tl.load(MASK + t[:, None] * m_t + s[None, :] * m_s, mask=(t < T)[:, None] & (s < S)[None, :], other=0)
        if MASK.dtype.element_ty == tl.int8:
            seen = seen & (m != 0)
        else:
            x += m.to(tl.float32) * LOG2E
    return tl.where(seen, x, -float("inf"))


@triton.jit
def attend(Q, q_n, q_b, q_h, q_t, K, k_n, k_b, k_h, k_s, V, v_n, v_b, v_h, v_s, MASK, m_n, m_b, m_h, m_t, m_s, OUT,
           o_n, o_b, o_h, o_t, SUMS, scale, B, H, T: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
           CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
           BD: tl.constexpr):  # fmt: skip
    """The results OUT, and the logarithms of the SUMS [n, B, heads, T] of the softmax. A query without keys has the
    result 0, as in PyTorch, and an infinite logarithm, with which its gradients are 0."""
    blocks: tl.constexpr = (T + BT - 1) // BT
    first = tl.program_id(0) % blocks * BT
    t = first.to(tl.int64) + tl.arange(0, BT)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    n, b, h = head // (B * H), head // H % B, head % H
    K += n * k_n + b * k_b + h * k_h
    V += n * v_n + b * v_b + h * v_h
    if MASK is not None:
        MASK += n * m_n + b * m_b + h * m_h
    q = load(Q + n * q_n + b * q_b + h * q_h, t, q_t, T, D, BD)
    most = tl.full((BT,), -float("inf"), tl.float32)
    total = tl.zeros((BT,), tl.float32)
    acc = tl.zeros((BT, BD), tl.float32)
    for i in range(0, min(S, first + BT) if CAUSAL else S, BS):
        s = i + tl.arange(0, BS).to(tl.int64)
        x = scores(q, load(K, s, k_s, S, D, BD), MASK, t, s, m_t, m_s, scale, T, S, CAUSAL, PRECISION)
        largest = tl.maximum(most, tl.max(x, 1))
        shift = tl.where(largest == -float("inf"), 0.0, largest)  # so far, all keys may be hidden
        p = tl.exp2(x - shift[:, None])
        rest = tl.exp2(most - shift)
        total = total * rest + tl.sum(p, 1)
        acc = product(p, load(V, s, v_s, S, D, BD), acc * rest[:, None], PRECISION)
        most = largest
    some = tl.where(total > 0, total, 1.0)
    store(OUT + n * o_n + b * o_b + h * o_h, t, o_t, acc / some[:, None], T, D, BD)
    tl.store(SUMS + head * T + t, tl.where(total > 0, most + tl.log2(some), float("inf")), mask=t < T)


@triton.jit
def score_gradients(x, v, OUT, o_t, D_OUT, d_t, SUMS, t, T, D: tl.constexpr, PRECISION: tl.constexpr, BD: tl.constexpr):
    """The weights of these scores, their gradients, and those of the results."""
    d = load(D_OUT, t, d_t, T, D, BD)
    delta = tl.sum(d.to(tl.float32) * load(OUT, t, o_t, T, D, BD).to(tl.float32), 1)
    p = tl.exp2(x - tl.load(SUMS + t, mask=t < T, other=0.0)[:, None])
    dp = product(d, tl.trans(v), tl.zeros((d.shape[0], v.shape[0]), tl.float32), PRECISION)
    return p, p * (dp - delta[:, None]), d


@triton.jit
def key_gradients(Q, q_n, q_b, q_h, q_t, K, k_n, k_b, k_h, k_s, V, v_n, v_b, v_h, v_s, MASK, m_n, m_b, m_h, m_t, m_s,
                  OUT, o_n, o_b, o_h, o_t, D_OUT, d_n, d_b, d_h, d_t, SUMS, DQ, dq_n, dq_b, dq_h, dq_t, DK, dk_n, dk_b,
                  dk_h, dk_s, DV, dv_n, dv_b, dv_h, dv_s, scale, B, H, T: tl.constexpr, S: tl.constexpr,
                  D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
                  BD: tl.constexpr):  # fmt: skip
    """The gradients of a block of keys and values. If one block has all keys, those of the queries too."""
    blocks: tl.constexpr = (S + BS - 1) // BS
    first = tl.program_id(0) % blocks * BS
    s = first.to(tl.int64) + tl.arange(0, BS)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    n, b, h = head // (B * H), head // H % B, head % H
    Q += n * q_n + b * q_b + h * q_h
    OUT += n * o_n + b * o_b + h * o_h
    D_OUT += n * d_n + b * d_b + h * d_h
    if MASK is not None:
        MASK += n * m_n + b * m_b + h * m_h
    k = load(K + n * k_n + b * k_b + h * k_h, s, k_s, S, D, BD)
    v = load(V + n * v_n + b * v_b + h * v_h, s, v_s, S, D, BD)
    dk = tl.zeros((BS, BD), tl.float32)
    dv = tl.zeros((BS, BD), tl.float32)
    for i in range(first // BT * BT if CAUSAL else 0, T, BT):
        t = i + tl.arange(0, BT).to(tl.int64)
        q = load(Q, t, q_t, T, D, BD)
        x = scores(q, k, MASK, t, s, m_t, m_s, scale, T, S, CAUSAL, PRECISION)
        p, dx, d = score_gradients(x, v, OUT, o_t, D_OUT, d_t, SUMS + head * T, t, T, D, PRECISION, BD)
        dv = product(tl.trans(p), d, dv, PRECISION)
        dk = product(tl.trans(dx), q, dk, PRECISION)
        if blocks == 1:
            dq = product(dx, k, tl.zeros((BT, BD), tl.float32), PRECISION)
            store(DQ + n * dq_n + b * dq_b + h * dq_h, t, dq_t, dq * scale, T, D, BD)
    store(DK + n * dk_n + b * dk_b + h * dk_h, s, dk_s, dk * scale, S, D, BD)
    store(DV + n * dv_n + b * dv_b + h * dv_h, s, dv_s, dv, S, D, BD)


@triton.jit
def query_gradients(Q, q_n, q_b, q_h, q_t, K, k_n, k_b, k_h, k_s, V, v_n, v_b, v_h, v_s, MASK, m_n, m_b, m_h, m_t,
                    m_s, OUT, o_n, o_b, o_h, o_t, D_OUT, d_n, d_b, d_h, d_t, SUMS, DQ, dq_n, dq_b, dq_h, dq_t, scale,
                    B, H, T: tl.constexpr, S: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
                    PRECISION: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """The gradients of a block of queries."""
    blocks: tl.constexpr = (T + BT - 1) // BT
    first = tl.program_id(0) % blocks * BT
    t = first.to(tl.int64) + tl.arange(0, BT)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    n, b, h = head // (B * H), head // H % B, head % H
    K += n * k_n + b * k_b + h * k_h
    V += n * v_n + b * v_b + h * v_h
    OUT += n * o_n + b * o_b + h * o_h
    D_OUT += n * d_n + b * d_b + h * d_h
    if MASK is not None:
        MASK += n * m_n + b * m_b + h * m_h
    q = load(Q + n * q_n + b * q_b + h * q_h, t, q_t, T, D, BD)
    dq = tl.zeros((BT, BD), tl.float32)
    for i in range(0, min(S, first + BT) if CAUSAL else S, BS):
        s = i + tl.arange(0, BS).to(tl.int64)
        k = load(K, s, k_s, S, D, BD)
        x = scores(q, k, MASK, t, s, m_t, m_s, scale, T, S, CAUSAL, PRECISION)
        v = load(V, s, v_s, S, D, BD)
        _, dx, _ = score_gradients(x, v, OUT, o_t, D_OUT, d_t, SUMS + head * T, t, T, D, PRECISION, BD)
        dq = product(dx, k, dq, PRECISION)
    store(DQ + n * dq_n + b * dq_b + h * dq_h, t, dq_t, dq * scale, T, D, BD)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, precision: str
) -> tuple[Tensor, Tensor]:
    """The results, in the memory order of the queries, and the logarithms of the sums [n, B, heads, T]."""
    q, k, v = map(rows, (q, k, v))
    out = like(q, torch.bfloat16 if precision == "bf16" else torch.float32)
    sums = empty(tuple(q.shape[:-1]), torch.float32, q)
    sizes = *q.shape[1:4], k.shape[3], q.shape[4]
    bt, bs, bd, warps = block(q, k, precision, backward=False)
    launcher(attend, cdiv(sizes[2], bt) * q.shape[:3].numel())(
        *args(q, k, v), *masked(mask), *args(out), sums, scale, *sizes, causal, precision, bt, bs, bd, num_warps=warps,
        num_stages=2,
    )  # fmt: skip
    return out, sums


def backward(
    d: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, sums: Tensor, causal: bool,
    scale: float, precision: str,
) -> list[Tensor]:  # fmt: skip
    """The gradients of q, k and v, each in the memory order of its tensor."""
    d, q, k, v, out = map(rows, (d, q, k, v, out))
    dq, dk, dv = results = [like(x, x.dtype) for x in (q, k, v)]
    sizes = *q.shape[1:4], k.shape[3], q.shape[4]
    bt, bs, bd, warps = block(q, k, precision, backward=True)
    given = *args(q, k, v), *masked(mask), *args(out, d), sums
    how: Any = (scale, *sizes, causal, precision, bt, bs, bd)
    heads, options = q.shape[:3].numel(), {"num_warps": warps, "num_stages": 1}
    launcher(key_gradients, cdiv(sizes[3], bs) * heads)(*given, *args(dq, dk, dv), *how, **options)
    if sizes[3] > bs:
        launcher(query_gradients, cdiv(sizes[2], bt) * heads)(*given, *args(dq), *how, **options)
    return results


def block(q: Tensor, k: Tensor, precision: str, backward: bool) -> tuple[int, int, int, int]:
    """The queries, keys and numbers of a head in a block, and the warps of a program. Not measured: chosen so that
    blocks stay in registers, of which products in full precision need many."""
    most, bd = 32 if precision == "float32" else 64, power_of_two(q.shape[-1])
    bt = min(power_of_two(q.shape[-2]), 32 if backward and bd > 64 else most)
    bs = min(power_of_two(k.shape[-2]), most)
    large = bd > 64 or (bd == 64 and (backward or precision == "float32"))
    return bt, bs, bd, 8 if large else max(1, min(4, bt * bs // 256))


def rows(v: Tensor) -> Tensor:
    """The tensor, with the numbers of a row side by side."""
    return v if v.stride(-1) == 1 else v.contiguous()


def like(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a result in the order of a tensor; zeros if kernels are only compiled."""
    return rows((torch.zeros_like if Compiling.now else torch.empty_like)(v, dtype=dtype))


def args(*tensors: Tensor) -> list[Any]:
    """Tensors with their strides, without the last."""
    return [a for v in tensors for a in (v, *v.stride()[:-1])]


def masked(mask: Tensor | None) -> list[Any]:
    if mask is None:
        return [None, 0, 0, 0, 0, 0]
    return [mask.view(torch.int8) if mask.dtype == torch.bool else mask, *mask.stride()]
