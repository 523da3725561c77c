"""Kernels for BatchNorm by batch statistics, between a convolution with relu and a 2x2 max-pool (see tiles.py).

Y [groups * B, H, W, F] is the output of the convolution after its relu, M = B * H * W are its pixels, and N are the
windows of the pool. T [4, groups, F] holds mean, 1 / deviation, and the scale and shift that normalise Y.
"""

import triton
import triton.language as tl

from .tiles import larger, load_parts, store_parts


@triton.jit
def window_pixel(n, H: tl.constexpr, W: tl.constexpr):
    """The first pixel of window n."""
    HW: tl.constexpr = (H // 2) * (W // 2)
    return ((n // HW) * H + ((n % HW) // (W // 2)) * 2) * W + (n % (W // 2)) * 2


@triton.jit
def sums(S, g, G, F: tl.constexpr, BLOCKS: tl.constexpr, BS: tl.constexpr):
    """The sums over the blocks of S [BLOCKS, groups, 2, F] of a group."""
    f = tl.arange(0, F)[None, :]
    total = tl.zeros((BS, F), tl.float32)
    products = tl.zeros((BS, F), tl.float32)
    for first in range(0, BLOCKS, BS):
        s = first + tl.arange(0, BS)[:, None]
        at = S + (s * G + g) * 2 * F + f
        total += tl.load(at, mask=s < BLOCKS, other=0.0)
        products += tl.load(at + F, mask=s < BLOCKS, other=0.0)
    return tl.sum(total, axis=0), tl.sum(products, axis=0)


@triton.jit
def norm_coefficients(S, X, d, weight, bias, eps, T, M, G, F: tl.constexpr, BLOCKS: tl.constexpr,
                      BS: tl.constexpr):  # fmt: skip
    """T of each group from the sums S of Y and its squares."""
    g = tl.program_id(0)
    f = tl.arange(0, F)
    total, squares = sums(S, g, G, F, BLOCKS, BS)
    mean = total / M
    variance = squares / M - mean * mean
    inverse = 1.0 / tl.sqrt(tl.where(variance < 0, 0.0, variance) + eps)  # a NaN stays NaN
    x = X + g.to(tl.int64) * d + f
    scale = tl.load(x + weight) * inverse
    to = T + g * F + f
    tl.store(to, mean)
    tl.store(to + G * F, inverse)
    tl.store(to + 2 * G * F, scale)
    tl.store(to + 3 * G * F, tl.load(x + bias) - mean * scale)


@triton.jit
def norm_pool(Y, y_plane, T, Z, z_plane, R, A, FLAT, N, G, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr,
              BN: tl.constexpr, LAST: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Z, the largest normalised pixel of each window, in A which one it is, and in R what it was before. The output of
    the last layer is stored in FLAT, as float32 in torch's order (channel, row, column). N windows are whole images."""
    HW: tl.constexpr = (H // 2) * (W // 2)
    g = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    f = tl.arange(0, F)
    ok = (n < N)[:, None]
    images = g * (N // HW)
    scale = tl.load(T + (2 * G + g) * F + f)[None, :]
    shift = tl.load(T + (3 * G + g) * F + f)[None, :]
    y = Y + (images * H * W + window_pixel(n, H, W))[:, None] * F + f[None, :]
    raw = load_parts(y, y_plane, ok, PARTS)
    best = raw * scale + shift
    where = tl.zeros((BN, F), tl.int32)
    for q in tl.static_range(1, 4):
        value = load_parts(y + ((q // 2) * W + q % 2) * F, y_plane, ok, PARTS)
        best, where = larger(best, where, value * scale + shift, q)
        raw = tl.where(where == q, value, raw)
    at = (g * N + n)[:, None] * F + f[None, :]
    if R is not None:
        store_parts(R + at, z_plane, raw, ok, PARTS)
    tl.store(A + at, where.to(tl.int8), mask=ok)
    if LAST:
        tl.store(FLAT + ((images + n // HW)[:, None] * F + f[None, :]) * HW + (n % HW)[:, None], best, mask=ok)
    else:
        store_parts(Z + at, z_plane, best, ok, PARTS)


@triton.jit
def norm_parameters(S, T, OUT, d, weight, bias, C, M, G, F: tl.constexpr, BLOCKS: tl.constexpr,
                    BS: tl.constexpr):  # fmt: skip
    """The gradients of scale and shift in OUT, from the sums S of D [groups, N, F], the gradient after the pool, and of
    D times R; and C [3, groups, F]: the gradient of a pixel is C0 D + C1 + C2 Y."""
    g = tl.program_id(0)
    f = tl.arange(0, F)
    total, products = sums(S, g, G, F, BLOCKS, BS)
    mean = tl.load(T + g * F + f)
    inverse = tl.load(T + (G + g) * F + f)
    scale = tl.load(T + (2 * G + g) * F + f)
    of_weight = (products - mean * total) * inverse
    out = OUT + g.to(tl.int64) * d + f
    tl.store(out + weight, of_weight)
    tl.store(out + bias, total)
    slope = -scale * inverse * of_weight / M
    to = C + g * F + f
    tl.store(to, scale)
    tl.store(to + G * F, -scale * total / M - slope * mean)
    tl.store(to + 2 * G * F, slope)


@triton.jit
def norm_gradient(D, d_plane, A, Y, y_plane, C, DY, dy_plane, M, N, G, H: tl.constexpr, W: tl.constexpr,
                  F: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The gradient DY of the convolution's output. A pixel that no window covers has a part in the statistics only."""
    g = tl.program_id(1)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    f = tl.arange(0, F)
    ok = (m < M)[:, None]
    h = (m % (H * W)) // W
    w = m % W
    n = ((m // (H * W)) * (H // 2) + h // 2) * (W // 2) + w // 2
    covered = ok & ((h // 2 < H // 2) & (w // 2 < W // 2))[:, None]
    at = (g * N + n)[:, None] * F + f[None, :]
    where = tl.load(A + at, mask=covered, other=4)
    value = tl.where(where == ((h % 2) * 2 + w % 2)[:, None], load_parts(D + at, d_plane, covered, PARTS), 0.0)
    y = load_parts(Y + (g * M + m)[:, None] * F + f[None, :], y_plane, ok, PARTS)
    c = C + g * F + f
    c0 = tl.load(c)[None, :]
    c1 = tl.load(c + G * F)[None, :]
    c2 = tl.load(c + 2 * G * F)[None, :]
    result = tl.where(y == 0, 0.0, c0 * value + c1 + c2 * y)
    store_parts(DY + (g * M + m)[:, None] * F + f[None, :], dy_plane, result, ok, PARTS)
