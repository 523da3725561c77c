"""Backward kernels: the loss, the gradients of activations, and those of weights (see tiles.py)."""

import triton
import triton.language as tl

from .tiles import activation_gradient, pixels, row_of


@triton.jit
def classify(FLAT, FG, X, d, weight, bias, TARGET, OUT, DFLAT, B, XG, N: tl.constexpr, NB: tl.constexpr,
             BP: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """The last linear layer with a mean cross-entropy: its gradients in OUT, that of its input in DFLAT. Group g has
    the input g % FG."""
    g = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BP)
    j = tl.arange(0, LP)
    n = tl.arange(0, NB)
    x = X + g * d
    inside = (b < B)[:, None]
    logits = tl.zeros((BP, LP), tl.float32)
    for i in range(0, N, NB):
        ok = (i + n < N)[None, :]
        a = tl.load(FLAT + ((g % FG) * B + b)[:, None] * N + i + n[None, :], mask=inside & ok, other=0.0)
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
        a = tl.load(FLAT + ((g % FG) * B + b)[:, None] * N + i + n[None, :], mask=inside & ok, other=0.0)
        w = tl.load(x + weight + j[:, None] * N + i + n[None, :], mask=(j < L)[:, None] & ok, other=0.0)
        dw = tl.dot(tl.trans(dl), a, input_precision="tf32x3")
        tl.store(out + weight + j[:, None] * N + i + n[None, :], dw, mask=(j < L)[:, None] & ok)
        tl.store(DFLAT + at, tl.dot(dl, w, input_precision="tf32x3"), mask=inside & ok)


@triton.jit
def flat_gradient(G, Y, y_plane, A, R, S, D, d_plane, B, N, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
                  HW: tl.constexpr, BN: tl.constexpr, POOL: tl.constexpr, DENSE: tl.constexpr,
                  PARTS: tl.constexpr):  # fmt: skip
    """From the gradient G [groups * B, C, HW] of the last layer, in torch's order, to that of its convolution, D."""
    g = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    ok = (n < N)[:, None]
    at = ((g * B + n // HW)[:, None] * C + tl.arange(0, C)[None, :]) * HW + (n % HW)[:, None]
    value = tl.load(G + at, mask=ok, other=0.0)
    activation_gradient(value, n, ok, g, Y, y_plane, A, R, S, D, d_plane, B, H, W, C, POOL, DENSE, PARTS)


@triton.jit
def input_gradient(DY, dy_plane, WT, w_plane, Y, y_plane, A, R, S, D, d_plane, B, H: tl.constexpr, W: tl.constexpr,
                   C: tl.constexpr, F: tl.constexpr, K: tl.constexpr, PAD: tl.constexpr, BM: tl.constexpr,
                   LH: tl.constexpr, LW: tl.constexpr, POOL: tl.constexpr, DENSE: tl.constexpr,
                   PARTS: tl.constexpr):  # fmt: skip
    """From the gradient DY [groups * B, HO, WO, F] of a convolution's output to that of the layer below, D. The
    activations between the two layers are [H, W, C]; the output of the convolution below is LH x LW."""
    HO: tl.constexpr = H + 2 * PAD - K + 1
    WO: tl.constexpr = W + 2 * PAD - K + 1
    g = tl.program_id(1)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    b, h, w = pixels(m, H, W, False)
    h = tl.where(b < B, h + PAD, -1)  # rows past the end read nothing, with any padding
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
    inside = (m < B * H * W)[:, None]
    activation_gradient(acc, m, inside, g, Y, y_plane, A, R, S, D, d_plane, B, LH, LW, C, POOL, DENSE, PARTS)


@triton.jit
def weight_gradient(X, plane, DY, dy_plane, DW, DB, M, G, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
                    F: tl.constexpr, K: tl.constexpr, PAD: tl.constexpr, SHARE: tl.constexpr, BK: tl.constexpr,
                    PARTS: tl.constexpr):  # fmt: skip
    """Sums over a share of the pixels, for a row of taps: DW [shares, groups, taps, F, C], DB [shares, groups, F]."""
    HO: tl.constexpr = H + 2 * PAD - K + 1
    WO: tl.constexpr = W + 2 * PAD - K + 1
    row = tl.program_id(0) // ((K + 2) // 3)
    left = (tl.program_id(0) % ((K + 2) // 3)) * 3  # a program does three taps of the row
    s = tl.program_id(1)
    g = tl.program_id(2)
    c = tl.arange(0, C)
    f = tl.arange(0, F)
    a0 = tl.zeros((F, C), tl.float32)
    a1 = tl.zeros((F, C), tl.float32)
    a2 = tl.zeros((F, C), tl.float32)
    # The sum over pixels is a matrix product: a reduction would cost more.
    ones = tl.full((BK, 16), 1.0, tl.float32).to(tl.bfloat16)
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
def first_weight_gradient(P, plane, DY, dy_plane, A, DW, M, N, XG, G, KP: tl.constexpr, F: tl.constexpr,
                          SHARE: tl.constexpr, BK: tl.constexpr, POOL: tl.constexpr,
                          PARTS: tl.constexpr):  # fmt: skip
    """The same for the first layer: DW [shares, groups, F, KP], which includes the bias. DY [groups, N, F] is, with
    POOL, the gradient after the pool, which belongs to the pixel of the maximum."""
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
def sum_shares(DW, DB, OUT, d, weight, bias, G, F: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, T: tl.constexpr,
               TP: tl.constexpr, DBS: tl.constexpr, SHARES: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """The sum over shares, in torch's order, into the flat gradients OUT. Rows of DW have CP numbers; biases are DBS
    numbers apart."""
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
