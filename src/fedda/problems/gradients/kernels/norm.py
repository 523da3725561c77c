"""Kernels for BatchNorm by batch statistics, between a convolution with relu and a 2x2 max-pool (see tiles.py).

Y [groups * B, H, W, F] is the output of the convolution after its relu, M = B * H * W are its pixels, and N are the
windows of the pool. T [4, groups, F] holds mean, 1 / deviation, and the scale and shift that normalise Y.
"""

import triton
import triton.language as tl

from .tiles import larger, store_parts


@triton.jit
def load_parts(at, plane, mask, PARTS: tl.constexpr):
    """A number from its bfloat16 parts, as float32."""
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if PARTS > 1:
        value += tl.load(at + plane, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def window_pixel(n, H: tl.constexpr, W: tl.constexpr):
    """The first pixel of window n."""
    HW: tl.constexpr = (H // 2) * (W // 2)
    return ((n // HW) * H + ((n % HW) // (W // 2)) * 2) * W + (n % (W // 2)) * 2


@triton.jit
def norm_statistics(Y, plane, S, M, G, F: tl.constexpr, SHARE: tl.constexpr, BK: tl.constexpr,
                    PARTS: tl.constexpr):  # fmt: skip
    """The sums of Y and of its squares over a share of the pixels: S [shares, groups, 2, F]."""
    s = tl.program_id(0)
    g = tl.program_id(1)
    f = tl.arange(0, F)
    total = tl.zeros((BK, F), tl.float32)
    squares = tl.zeros((BK, F), tl.float32)
    for k in range(0, SHARE, BK):
        m = s * SHARE + k + tl.arange(0, BK)
        y = load_parts(Y + (g * M + m)[:, None] * F + f[None, :], plane, (m < M)[:, None], PARTS)
        total += y
        squares += y * y
    to = S + (s * G + g) * 2 * F + f
    tl.store(to, tl.sum(total, axis=0))
    tl.store(to + F, tl.sum(squares, axis=0))


@triton.jit
def norm_coefficients(S, X, d, weight, bias, eps, T, M, G, F: tl.constexpr, SHARES: tl.constexpr):
    """T of each group from the sums S."""
    g = tl.program_id(0)
    f = tl.arange(0, F)
    total = tl.zeros((F,), tl.float32)
    squares = tl.zeros((F,), tl.float32)
    for s in range(SHARES):
        total += tl.load(S + (s * G + g) * 2 * F + f)
        squares += tl.load(S + ((s * G + g) * 2 + 1) * F + f)
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
def norm_pool(Y, y_plane, T, Z, z_plane, A, FLAT, N, G, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr,
              BN: tl.constexpr, LAST: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Z, the largest normalised pixel of each window, and in A which one it is. The output of the last layer is stored
    in FLAT, as float32 in torch's order (channel, row, column). N windows are whole images."""
    HW: tl.constexpr = (H // 2) * (W // 2)
    g = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    f = tl.arange(0, F)
    ok = (n < N)[:, None]
    images = g * (N // HW)
    scale = tl.load(T + (2 * G + g) * F + f)[None, :]
    shift = tl.load(T + (3 * G + g) * F + f)[None, :]
    y = Y + (images * H * W + window_pixel(n, H, W))[:, None] * F + f[None, :]
    best = load_parts(y, y_plane, ok, PARTS) * scale + shift
    where = tl.zeros((BN, F), tl.int32)
    for q in tl.static_range(1, 4):
        value = load_parts(y + ((q // 2) * W + q % 2) * F, y_plane, ok, PARTS) * scale + shift
        best, where = larger(best, where, value, q)
    at = (g * N + n)[:, None] * F + f[None, :]
    tl.store(A + at, where.to(tl.int8), mask=ok)
    if LAST:
        tl.store(FLAT + ((images + n // HW)[:, None] * F + f[None, :]) * HW + (n % HW)[:, None], best, mask=ok)
    else:
        store_parts(Z + at, z_plane, best, ok, PARTS)


@triton.jit
def norm_sums(D, d_plane, A, Y, y_plane, S, N, G, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr,
              SHARE: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The sums of the gradient D [groups, N, F] after the pool, and of D times Y, over a share of the windows."""
    s = tl.program_id(0)
    g = tl.program_id(1)
    f = tl.arange(0, F)
    images = g * (N // ((H // 2) * (W // 2)))
    total = tl.zeros((BK, F), tl.float32)
    products = tl.zeros((BK, F), tl.float32)
    for k in range(0, SHARE, BK):
        n = s * SHARE + k + tl.arange(0, BK)
        ok = (n < N)[:, None]
        at = (g * N + n)[:, None] * F + f[None, :]
        value = load_parts(D + at, d_plane, ok, PARTS)
        q = tl.load(A + at, mask=ok, other=0).to(tl.int32)
        pixel = (images * H * W + window_pixel(n, H, W))[:, None] + (q // 2) * W + q % 2
        total += value
        products += value * load_parts(Y + pixel * F + f[None, :], y_plane, ok, PARTS)
    to = S + (s * G + g) * 2 * F + f
    tl.store(to, tl.sum(total, axis=0))
    tl.store(to + F, tl.sum(products, axis=0))


@triton.jit
def norm_parameters(S, T, OUT, d, weight, bias, C, M, G, F: tl.constexpr, SHARES: tl.constexpr):
    """The gradients of scale and shift in OUT, and C [3, groups, F]: that of a pixel is C0 D + C1 + C2 Y."""
    g = tl.program_id(0)
    f = tl.arange(0, F)
    total = tl.zeros((F,), tl.float32)
    products = tl.zeros((F,), tl.float32)
    for s in range(SHARES):
        total += tl.load(S + (s * G + g) * 2 * F + f)
        products += tl.load(S + ((s * G + g) * 2 + 1) * F + f)
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
