"""Convolutions of a stack of networks, each with weights of its own, as Triton kernels for one GPU.

A number is held as PARTS bfloat16 numbers that add up to it (one: bf16's 8 bits; two: 16 bits, more than TF32's 11), so
that every product is one the tensor cores do at full rate, whichever side is transposed, with float32's range.
Activations are [PARTS, groups * batch, height, width, channels]; member g of the stack is a group, with weights
[PARTS, groups, taps, filters, channels]. Where a 2x2 max-pool follows, rows of a product are pixels in the order of
their windows: four neighbours are one window, so that it is pooled where it was computed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store(to, plane, value, mask, PARTS: tl.constexpr):
    """A value as its parts, the largest first."""
    high = value.to(tl.bfloat16)
    tl.store(to, high, mask=mask)
    if PARTS > 1:
        tl.store(to + plane, (value - high.to(tl.float32)).to(tl.bfloat16), mask=mask)


@triton.jit
def fetch(at, plane, mask, PARTS: tl.constexpr):
    """The value again, in float32."""
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if PARTS > 1:
        value += tl.load(at + plane, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def window(m):
    """Which window the m-th row belongs to, and which of its four pixels it is. A thread of a matrix product holds rows
    r, r + 8, r + 64 and r + 72 of 128: these four are a window, so that it is pooled without leaving the thread."""
    r = m % 128
    return (m // 128) * 32 + (r // 16) % 4 * 8 + r % 8, r // 64 * 2 + r // 8 % 2


@triton.jit
def row_of(n, q):
    """The row of pixel q of window n."""
    return (n // 32) * 128 + q // 2 * 64 + (n // 8) % 4 * 16 + q % 2 * 8 + n % 8


@triton.jit
def pixels(m, H: tl.constexpr, W: tl.constexpr, POOL: tl.constexpr):
    """Image, row and column of the m-th pixel; with POOL in the order of the windows."""
    if POOL:
        n, q = window(m)
        b = n // ((H // 2) * (W // 2))
        r = n % ((H // 2) * (W // 2))
        h = (r // (W // 2)) * 2 + q // 2
        w = (r % (W // 2)) * 2 + q % 2
    else:
        b = m // (H * W)
        h = (m % (H * W)) // W
        w = m % W
    return b, h, w


@triton.jit
def larger(a, i, b, j):
    """The larger of two, the first of equals, a NaN before all, and where it stood."""
    take = (b > a) | (b != b)
    return tl.where(take, b, a), tl.where(take, j, i)


@triton.jit
def pool(acc, BM: tl.constexpr, F: tl.constexpr):
    """The largest of each window [BM / 4, F], and which of its four it was."""
    four = tl.permute(tl.reshape(acc, (BM // 128, 2, 4, 2, 8, F)), (0, 2, 4, 5, 1, 3))
    left, right = tl.split(four)  # pixels 0 and 2, 1 and 3
    v0, v2 = tl.split(left)
    v1, v3 = tl.split(right)
    v0, i0 = larger(v0, 0, v1, 1)
    v2, i2 = larger(v2, 2, v3, 3)
    v, i = larger(v0, i0, v2, i2)
    return tl.reshape(v, (BM // 4, F)), tl.reshape(i, (BM // 4, F))


@triton.jit
def activate(acc, m0, g, Y, plane, A, FLAT, B, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, BM: tl.constexpr,
             POOL: tl.constexpr, LAST: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """relu, with POOL the largest of each window and where it stood (4: nowhere, all were negative); the last layer's
    result is float32 in torch's order, (channel, row, column), for what follows."""
    f = tl.arange(0, F)
    HW: tl.constexpr = (H // 2) * (W // 2) if POOL else H * W
    if POOL:
        acc, where = pool(acc, BM, F)
        n = m0 // 4 + tl.arange(0, BM // 4)
    else:
        n = m0 + tl.arange(0, BM)
    ok = (n < B * HW)[:, None]
    # A NaN stays one: neither `maximum` nor a comparison would let it pass.
    y = tl.where(acc <= 0, 0.0, acc)
    at = (g * B * HW + n)[:, None] * F + f[None, :]
    if POOL:
        tl.store(A + at, tl.where(acc <= 0, 4, where).to(tl.int8), mask=ok)
    if LAST:
        tl.store(FLAT + ((g * B + n // HW)[:, None] * F + f[None, :]) * HW + (n % HW)[:, None], y, mask=ok)
    if (not LAST) or (not POOL):
        store(Y + at, plane, y, ok, PARTS)


@triton.jit
def patches(X, MEAN, STD, P, plane, B, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
            PAD: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, KP: tl.constexpr, M, BM: tl.constexpr,
            POOL: tl.constexpr, SCALED: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The inputs x [batches, B, C, H, W] of the first layer as rows of C K K numbers, standardised, a 1 for the bias,
    and zeros up to KP."""
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
    store(P + (g * M + m)[:, None] * KP + k[None, :], plane, x, (m < M)[:, None], PARTS)


@triton.jit
def lay_out(X, d, offset, WT, plane, F: tl.constexpr, C: tl.constexpr, T: tl.constexpr, TP: tl.constexpr,
            FB: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Weights [filters, channels, taps] of the flat vectors x [groups, d] as [groups, taps, filters, channels]."""
    g = tl.program_id(1).to(tl.int64)
    f = tl.program_id(0) * FB + tl.arange(0, FB)[:, None, None]
    c = tl.arange(0, C)[None, :, None]
    t = tl.arange(0, TP)[None, None, :]
    ok = (t < T) & (f < F) & (c < C)
    w = tl.load(X + g * d + offset + (f * C + c) * T + t, mask=ok, other=0.0)
    store(WT + ((g * T + t) * F + f) * C + c, plane, w, ok, PARTS)


@triton.jit
def first(P, plane, X, d, weight, bias, Y, y_plane, A, FLAT, B, M, XG, NK: tl.constexpr, KP: tl.constexpr,
          F: tl.constexpr, H: tl.constexpr, W: tl.constexpr, NB: tl.constexpr, BM: tl.constexpr, POOL: tl.constexpr,
          BIAS: tl.constexpr, LAST: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The first layer on its patches [PARTS, batches, M, KP]; weights are read from the flat vectors."""
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
        activate(acc, m0, g, Y, y_plane, A, FLAT, B, H, W, F, BM, POOL, LAST, PARTS)


@triton.jit
def forward(X, plane, WT, w_plane, V, d, bias, Y, y_plane, A, FLAT, B, H: tl.constexpr, W: tl.constexpr,
            C: tl.constexpr, F: tl.constexpr, K: tl.constexpr, PAD: tl.constexpr, BM: tl.constexpr, POOL: tl.constexpr,
            BIAS: tl.constexpr, LAST: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """A layer on activations x [PARTS, groups * B, H, W, C]; v are the flat vectors, for the bias."""
    HO: tl.constexpr = H + 2 * PAD - K + 1
    WO: tl.constexpr = W + 2 * PAD - K + 1
    g = tl.program_id(1)
    m0 = tl.program_id(0) * BM
    b, h, w = pixels(m0 + tl.arange(0, BM), HO, WO, POOL)
    h = tl.where(b < B, h, -H - K) - PAD  # rows past the end see only padding
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
    activate(acc, m0, g, Y, y_plane, A, FLAT, B, HO, WO, F, BM, POOL, LAST, PARTS)


@triton.jit
def undo(value, n, ok, g, Y, y_plane, A, D, d_plane, B, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
         POOL: tl.constexpr, DENSE: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The gradient `value` [n, C] of a layer's result as that of its convolution's: through pool and relu. H, W: of the
    convolution's result. Not DENSE: the pooled gradient itself, which stands for one pixel in four."""
    c = tl.arange(0, C)
    if POOL:
        HW: tl.constexpr = (H // 2) * (W // 2)
        at = (g * B * HW + n)[:, None] * C + c[None, :]
        if DENSE:
            where = tl.load(A + at, mask=ok, other=4)
            b = n // HW
            h = ((n % HW) // (W // 2)) * 2
            w = (n % (W // 2)) * 2
            to = D + (((g * B + b) * H + h) * W + w)[:, None] * C + c[None, :]
            for q in range(4):  # not unrolled, which would take more registers than there are
                store(to + ((q // 2) * W + q % 2) * C, d_plane, tl.where(where == q, value, 0.0), ok, PARTS)
        else:
            store(D + at, d_plane, value, ok, PARTS)
    else:
        at = (g * B * H * W + n)[:, None] * C + c[None, :]
        y = tl.load(Y + at, mask=ok, other=0.0).to(tl.float32)
        store(D + at, d_plane, tl.where(y == 0, 0.0, value), ok, PARTS)


@triton.jit
def flat_gradient(G, Y, y_plane, A, D, d_plane, B, N, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
                  HW: tl.constexpr, BN: tl.constexpr, POOL: tl.constexpr, DENSE: tl.constexpr,
                  PARTS: tl.constexpr):  # fmt: skip
    """The last layer's gradient in torch's order [groups * B, C, HW], as that of its convolution's result."""
    g = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    ok = (n < N)[:, None]
    at = ((g * B + n // HW)[:, None] * C + tl.arange(0, C)[None, :]) * HW + (n % HW)[:, None]
    undo(tl.load(G + at, mask=ok, other=0.0), n, ok, g, Y, y_plane, A, D, d_plane, B, H, W, C, POOL, DENSE, PARTS)


@triton.jit
def backward(DY, dy_plane, WT, w_plane, Y, y_plane, A, D, d_plane, B, H: tl.constexpr, W: tl.constexpr,
             C: tl.constexpr, F: tl.constexpr, K: tl.constexpr, PAD: tl.constexpr, BM: tl.constexpr,
             LH: tl.constexpr, LW: tl.constexpr, POOL: tl.constexpr, DENSE: tl.constexpr,
             PARTS: tl.constexpr):  # fmt: skip
    """From the gradient dy [groups * B, HO, WO, F] of a layer's convolution to d, that of the layer below; H, W, C are
    the sizes between them, LH, LW those of the convolution below."""
    HO: tl.constexpr = H + 2 * PAD - K + 1
    WO: tl.constexpr = W + 2 * PAD - K + 1
    g = tl.program_id(1)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    b, h, w = pixels(m, H, W, False)
    h = tl.where(b < B, h, -H - K) + PAD
    w = w + PAD
    c = tl.arange(0, C)
    f = tl.arange(0, F)
    dy = DY + (((g * B + b) * HO + h) * WO + w)[:, None] * F + f[None, :]
    wt = WT + g * K * K * C * F + f[:, None] * C + c[None, :]
    acc = tl.zeros((BM, C), tl.float32)
    for t in range(K * K):
        dh = t // K
        dw = t % K
        ok = ((h - dh >= 0) & (h - dh < HO) & (w - dw >= 0) & (w - dw < WO))[:, None]
        d0 = tl.load(dy - (dh * WO + dw) * F, mask=ok, other=0.0)
        w0 = tl.load(wt + t * C * F)
        acc = tl.dot(d0, w0, acc)
        if PARTS > 1:
            d1 = tl.load(dy + dy_plane - (dh * WO + dw) * F, mask=ok, other=0.0)
            w1 = tl.load(wt + w_plane + t * C * F)
            acc = tl.dot(d0, w1, acc)
            acc = tl.dot(d1, w0, acc)
    undo(acc, m, (m < B * H * W)[:, None], g, Y, y_plane, A, D, d_plane, B, LH, LW, C, POOL, DENSE, PARTS)


@triton.jit
def weight_gradient(X, plane, DY, dy_plane, DW, DB, M, G, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
                    F: tl.constexpr, K: tl.constexpr, PAD: tl.constexpr, SHARE: tl.constexpr, BK: tl.constexpr,
                    PARTS: tl.constexpr):  # fmt: skip
    """Sums over a share of the pixels, for one row of taps: dw [shares, groups, taps, F, C], db [shares, groups, F]."""
    HO: tl.constexpr = H + 2 * PAD - K + 1
    WO: tl.constexpr = W + 2 * PAD - K + 1
    row = tl.program_id(0) // ((K + 2) // 3)
    left = (tl.program_id(0) % ((K + 2) // 3)) * 3  # three taps of the row a program
    s = tl.program_id(1)
    g = tl.program_id(2)
    c = tl.arange(0, C)
    f = tl.arange(0, F)
    a0 = tl.zeros((F, C), tl.float32)
    a1 = tl.zeros((F, C), tl.float32)
    a2 = tl.zeros((F, C), tl.float32)
    ones = tl.full((BK, 16), 1.0, tl.float32).to(
        tl.bfloat16
    )  # the sum over pixels is one product more: a reduction would cost more
    db = tl.zeros((F, 16), tl.float32)
    for k in range(0, SHARE, BK):
        m = s * SHARE + k + tl.arange(0, BK)
        b, h, w = pixels(m, HO, WO, False)
        at = DY + (g * M + m)[:, None] * F + f[None, :]
        h = h + row - PAD
        w = w + left - PAD
        x = X + ((((g * (M // (HO * WO)) + b) * H + h) * W) + w)[:, None] * C + c[None, :]
        rows = (m < M) & (h >= 0) & (h < H)
        d0 = tl.load(at, mask=(m < M)[:, None], other=0.0)
        if PARTS > 1:
            d1 = tl.load(at + dy_plane, mask=(m < M)[:, None], other=0.0)
            db = tl.dot(tl.trans(d1), ones, db)
        db = tl.dot(tl.trans(d0), ones, db)
        for j in tl.static_range(3 if K > 2 else K):
            ok = (rows & (w + j >= 0) & (w + j < W))[:, None]
            x0 = tl.load(x + j * C, mask=ok, other=0.0)
            part = a0 if j == 0 else (a1 if j == 1 else a2)
            part = tl.dot(tl.trans(d0), x0, part)
            if PARTS > 1:
                x1 = tl.load(x + plane + j * C, mask=ok, other=0.0)
                part = tl.dot(tl.trans(d0), x1, part)
                part = tl.dot(tl.trans(d1), x0, part)
            if j == 0:
                a0 = part
            elif j == 1:
                a1 = part
            else:
                a2 = part
    tap = row * K + left
    to = DW + ((((s * G + g) * K * K + tap) * F + f[:, None]) * C + c[None, :])
    tl.store(to, a0)
    if (K > 1) and (left + 1 < K):
        tl.store(to + F * C, a1)
    if (K > 2) and (left + 2 < K):
        tl.store(to + 2 * F * C, a2)
    if tl.program_id(0) == 0:
        tl.store(DB + (s * G + g) * F + f, tl.sum(db, axis=1) / 16)


@triton.jit
def first_gradient(P, plane, DY, dy_plane, A, DW, M, N, XG, G, KP: tl.constexpr, F: tl.constexpr, SHARE: tl.constexpr,
                   BK: tl.constexpr, POOL: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The same of the first layer, dw [shares, groups, F, KP], the bias among it; dy [groups, N, F], with POOL the
    pooled gradient, which goes to the pixel where the maximum stood."""
    s = tl.program_id(0)
    g = tl.program_id(1)
    k = tl.arange(0, KP)
    f = tl.arange(0, F)
    acc = tl.zeros((F, KP), tl.float32)
    for i in range(0, SHARE, BK):
        n = s * SHARE + i + tl.arange(0, BK)
        ok = (n < N)[:, None]
        at = (g * N + n)[:, None] * F + f[None, :]
        d0 = tl.load(DY + at, mask=ok, other=0.0)
        if PARTS > 1:
            d1 = tl.load(DY + dy_plane + at, mask=ok, other=0.0)
        if POOL:
            where = tl.load(A + at, mask=ok, other=4)
        for q in tl.static_range(4 if POOL else 1):
            p = P + ((g % XG) * M + (row_of(n, q) if POOL else n))[:, None] * KP + k[None, :]
            p0 = tl.load(p, mask=ok, other=0.0)
            e0 = tl.trans(tl.where(where == q, d0, 0.0).to(tl.bfloat16) if POOL else d0)
            acc = tl.dot(e0, p0, acc)
            if PARTS > 1:
                e1 = tl.trans(tl.where(where == q, d1, 0.0).to(tl.bfloat16) if POOL else d1)
                p1 = tl.load(p + plane, mask=ok, other=0.0)
                acc = tl.dot(e0, p1, acc)
                acc = tl.dot(e1, p0, acc)
    tl.store(DW + ((s * G + g) * F + f[:, None]) * KP + k[None, :], acc)


@triton.jit
def collect(DW, DB, OUT, d, weight, bias, G, F: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, T: tl.constexpr,
            TP: tl.constexpr, DBS: tl.constexpr, SHARES: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """The shares added up, in torch's order, into the flat gradients; rows of dw are CP long, biases DBS apart."""
    f = tl.program_id(0)
    g = tl.program_id(1)
    t = tl.arange(0, TP)[:, None]
    c = tl.arange(0, CP)[None, :]
    ok = (t < T) & (c < C)
    total = tl.zeros((TP, CP), tl.float32)
    b = 0.0
    for s in tl.static_range(SHARES):
        total += tl.load(DW + (((s * G + g) * T + t) * F + f) * CP + c, mask=ok, other=0.0)
        b += tl.load(DB + ((s * G + g) * F + f) * DBS)
    out = OUT + g.to(tl.int64) * d
    tl.store(out + weight + (f * C + c) * T + t, total, mask=ok)
    if BIAS:
        tl.store(out + bias + f, b)


@triton.jit
def classify(FLAT, X, d, weight, bias, TARGET, OUT, DFLAT, B, XG, N: tl.constexpr, NB: tl.constexpr, BP: tl.constexpr,
             L: tl.constexpr, LP: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """The last linear layer under a mean cross-entropy: its gradients and that of its inputs, for one group."""
    g = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BP)
    j = tl.arange(0, LP)
    n = tl.arange(0, NB)
    x = X + g * d
    inside = (b < B)[:, None]
    logits = tl.zeros((BP, LP), tl.float32)
    for i in range(0, N, NB):
        ok = (i + n < N)[None, :]
        a = tl.load(FLAT + (g * B + b)[:, None] * N + i + n[None, :], mask=inside & ok, other=0.0)
        w = tl.load(x + weight + j[:, None] * N + i + n[None, :], mask=(j < L)[:, None] & ok, other=0.0)
        logits = tl.dot(a, tl.trans(w), logits, input_precision="tf32x3")
    if BIAS:
        logits += tl.load(x + bias + j, mask=j < L, other=0.0)[None, :]
    logits = tl.where((j < L)[None, :], logits, -float("inf"))
    e = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    target = tl.load(TARGET + (g % XG) * B + b, mask=b < B, other=0)
    dl = (e / tl.sum(e, axis=1)[:, None] - (j[None, :] == target[:, None]).to(tl.float32)) / B
    dl = tl.where(inside, dl, 0.0)
    out = OUT + g * d
    if BIAS:
        tl.store(out + bias + j, tl.sum(dl, axis=0), mask=j < L)
    for i in range(0, N, NB):
        ok = (i + n < N)[None, :]
        at = (g * B + b)[:, None] * N + i + n[None, :]
        a = tl.load(FLAT + at, mask=inside & ok, other=0.0)
        w = tl.load(x + weight + j[:, None] * N + i + n[None, :], mask=(j < L)[:, None] & ok, other=0.0)
        dw = tl.dot(tl.trans(dl), a, input_precision="tf32x3")
        tl.store(out + weight + j[:, None] * N + i + n[None, :], dw, mask=(j < L)[:, None] & ok)
        tl.store(DFLAT + at, tl.dot(dl, w, input_precision="tf32x3"), mask=inside & ok)
