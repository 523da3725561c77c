"""Forward kernels: patches for the first layer, weights in order, convolutions with relu and pool (see tiles.py)."""

import triton
import triton.language as tl

from .tiles import activate, pixels, store_parts


@triton.jit
def patches(X, MEAN, STD, P, plane, B, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
            PAD: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, KP: tl.constexpr, M, BM: tl.constexpr,
            POOL: tl.constexpr, SCALED: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The patches of inputs X [batches, B, C, H, W] for the first layer, P [batches, M, KP]: standardised rows of
    C * K * K numbers, then a 1 for the bias, then zeros."""
    g = tl.program_id(1)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    b, h, w = pixels(m, HO, WO, POOL)
    k = tl.arange(0, KP)
    c = k // (K * K)
    row = h[:, None] + ((k // K) % K)[None, :] - PAD
    column = w[:, None] + (k % K)[None, :] - PAD
    inside = (b < B)[:, None] & (c < C)[None, :] & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    x = tl.load(X + (((g * B + b)[:, None] * C + c[None, :]) * H + row) * W + column, mask=inside, other=0).to(
        tl.float32
    )
    if SCALED:
        mean = tl.load(MEAN + c, mask=c < C, other=0.0)
        std = tl.load(STD + c, mask=c < C, other=1.0)
        x = tl.where(inside, (x - mean[None, :]) * (1.0 / std)[None, :], 0.0)
    x = tl.where(k[None, :] == C * K * K, 1.0, x)
    store_parts(P + (g * M + m)[:, None] * KP + k[None, :], plane, x, (m < M)[:, None], PARTS)


@triton.jit
def reorder_weights(X, d, offset, WT, plane, F: tl.constexpr, C: tl.constexpr, T: tl.constexpr, TP: tl.constexpr,
                    FB: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Weights [filters, channels, taps] of the flat vectors X [groups, d] as WT [groups, taps, filters, channels]."""
    g = tl.program_id(1).to(tl.int64)
    f = tl.program_id(0) * FB + tl.arange(0, FB)[:, None, None]
    c = tl.arange(0, C)[None, :, None]
    t = tl.arange(0, TP)[None, None, :]
    ok = (t < T) & (f < F) & (c < C)
    w = tl.load(X + g * d + offset + (f * C + c) * T + t, mask=ok, other=0.0)
    store_parts(WT + ((g * T + t) * F + f) * C + c, plane, w, ok, PARTS)


@triton.jit
def first_layer(P, plane, X, d, weight, bias, Y, y_plane, A, FLAT, S, B, M, XG, NK: tl.constexpr, KP: tl.constexpr,
                F: tl.constexpr, H: tl.constexpr, W: tl.constexpr, NB: tl.constexpr, BM: tl.constexpr,
                POOL: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The first layer on its patches P [PARTS, batches, M, KP]; its weights are read from the flat vectors X."""
    g = tl.program_id(1)
    k = tl.arange(0, KP)[None, :]
    f = tl.arange(0, F)[:, None]
    place = tl.where(k < NK, weight + f * NK + k, bias + f)
    weights = tl.load(X + g.to(tl.int64) * d + place, mask=(k < NK + BIAS) & (f < F), other=0.0)
    w0 = weights.to(tl.bfloat16)
    w1 = (weights - w0.to(tl.float32)).to(tl.bfloat16)
    for i in range(NB):
        m0 = (tl.program_id(0) * NB + i) * BM
        m = m0 + tl.arange(0, BM)
        at = P + ((g % XG) * M + m)[:, None] * KP + k
        p0 = tl.load(at, mask=(m < M)[:, None], other=0.0)
        acc = tl.dot(p0, tl.trans(w0))
        if PARTS > 1:
            p1 = tl.load(at + plane, mask=(m < M)[:, None], other=0.0)
            acc = tl.dot(p0, tl.trans(w1), acc)
            acc = tl.dot(p1, tl.trans(w0), acc)
        activate(acc, m0, g, Y, y_plane, A, FLAT, S, B, H, W, F, BM, POOL, LAST, PARTS)


@triton.jit
def next_layer(X, plane, WT, w_plane, V, d, bias, Y, y_plane, A, FLAT, S, B, H: tl.constexpr, W: tl.constexpr,
               C: tl.constexpr, F: tl.constexpr, K: tl.constexpr, PAD: tl.constexpr, BM: tl.constexpr,
               POOL: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """A layer on activations X [PARTS, groups * B, H, W, C]; V are the flat vectors, for the bias."""
    HO: tl.constexpr = H + 2 * PAD - K + 1
    WO: tl.constexpr = W + 2 * PAD - K + 1
    g = tl.program_id(1)
    m0 = tl.program_id(0) * BM
    b, h, w = pixels(m0 + tl.arange(0, BM), HO, WO, POOL)
    h = tl.where(b < B, h, -H - K) - PAD  # rows past the end read only padding
    w = w - PAD
    c = tl.arange(0, C)
    f = tl.arange(0, F)
    x = X + (((g * B + b) * H + h) * W + w)[:, None] * C + c[None, :]
    wt = WT + g * K * K * C * F + f[:, None] * C + c[None, :]
    acc = tl.zeros((BM, F), tl.float32)
    for t in range(K * K):
        dh = t // K
        dw = t % K
        ok = ((h + dh >= 0) & (h + dh < H) & (w + dw >= 0) & (w + dw < W))[:, None]
        x0 = tl.load(x + (dh * W + dw) * C, mask=ok, other=0.0)
        w0 = tl.load(wt + t * C * F)
        acc = tl.dot(x0, tl.trans(w0), acc)
        if PARTS > 1:
            x1 = tl.load(x + plane + (dh * W + dw) * C, mask=ok, other=0.0)
            w1 = tl.load(wt + w_plane + t * C * F)
            acc = tl.dot(x0, tl.trans(w1), acc)
            acc = tl.dot(x1, tl.trans(w0), acc)
    if BIAS:
        acc += tl.load(V + g.to(tl.int64) * d + bias + f)[None, :]
    activate(acc, m0, g, Y, y_plane, A, FLAT, S, B, HO, WO, F, BM, POOL, LAST, PARTS)
