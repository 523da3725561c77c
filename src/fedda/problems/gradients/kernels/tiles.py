"""Building blocks of Triton kernels for the convolutions of a stack of networks with different weights, on one GPU.

A number is stored as PARTS bfloat16 numbers whose sum it is (one: 8 bits; two: 16 bits, more than the 11 of TF32). So
the tensor cores compute all products at full rate, with either side transposed, with the range of float32. Member g of
the stack is a group. Activations are [PARTS, groups * batch, height, width, channels], weights are
[PARTS, groups, taps, filters, channels]; "plane" is the distance between two parts. Before a 2x2 max-pool, the rows of
a product are pixels in the order of their windows: four neighbours are one window, and are pooled by one thread.
"""

import triton
import triton.language as tl


@triton.jit
def store_parts(to, plane, value, mask, PARTS: tl.constexpr):
    """Store a float32 value as its bfloat16 parts, the largest first."""
    high = value.to(tl.bfloat16)
    tl.store(to, high, mask=mask)
    if PARTS > 1:
        tl.store(to + plane, (value - high.to(tl.float32)).to(tl.bfloat16), mask=mask)


@triton.jit
def load_parts(at, plane, mask, PARTS: tl.constexpr):
    """A number from its bfloat16 parts, as float32."""
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if PARTS > 1:
        value += tl.load(at + plane, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def store_sums(S, block, g, value, factor, ok, F: tl.constexpr):
    """Store the sums of `value` [rows, F] and of its products with `factor` over the rows that are `ok`, for a
    BatchNorm: S [blocks, groups, 2, F]."""
    value = tl.where(ok, value, 0.0)
    to = S + (block * tl.num_programs(1) + g) * 2 * F + tl.arange(0, F)
    tl.store(to, tl.sum(value, axis=0))
    tl.store(to + F, tl.sum(value * tl.where(ok, factor, 0.0), axis=0))


@triton.jit
def window(m):
    """The window of row m, and which of its four pixels the row is. A thread of a matrix product has the rows r, r + 8,
    r + 64 and r + 72 of 128: these four are a window, so that the pool needs one thread only."""
    r = m % 128
    return (m // 128) * 32 + (r // 16) % 4 * 8 + r % 8, r // 64 * 2 + r // 8 % 2


@triton.jit
def row_of(n, q):
    """The row of pixel q of window n."""
    return (n // 32) * 128 + q // 2 * 64 + (n // 8) % 4 * 16 + q % 2 * 8 + n % 8


@triton.jit
def pixels(m, H: tl.constexpr, W: tl.constexpr, POOL: tl.constexpr):
    """The image, row and column of pixel m; with POOL, pixels are in the order of their windows."""
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
    """The larger of two values and its index. Of equal values the first is taken; NaN is larger than all numbers."""
    take = (b > a) | (b != b)
    return tl.where(take, b, a), tl.where(take, j, i)


@triton.jit
def pool(acc, BM: tl.constexpr, F: tl.constexpr):
    """The largest value of each window, [BM / 4, F], and which of its four pixels it is."""
    four = tl.permute(tl.reshape(acc, (BM // 128, 2, 4, 2, 8, F)), (0, 2, 4, 5, 1, 3))
    left, right = tl.split(four)  # pixels 0 and 2, 1 and 3
    v0, v2 = tl.split(left)
    v1, v3 = tl.split(right)
    v0, i0 = larger(v0, 0, v1, 1)
    v2, i2 = larger(v2, 2, v3, 3)
    v, i = larger(v0, i0, v2, i2)
    return tl.reshape(v, (BM // 4, F)), tl.reshape(i, (BM // 4, F))


@triton.jit
def activate(acc, m0, g, Y, plane, A, FLAT, S, B, H: tl.constexpr, W: tl.constexpr, F: tl.constexpr, BM: tl.constexpr,
             POOL: tl.constexpr, LAST: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Store relu(acc) in Y; with POOL, the largest of each window, and in A which pixel it is (4: all were negative).
    The output of the last layer is stored in FLAT, as float32 in torch's order (channel, row, column). Before a
    BatchNorm, store in S what `store_sums` says, of Y and its squares."""
    f = tl.arange(0, F)
    HW: tl.constexpr = (H // 2) * (W // 2) if POOL else H * W
    if POOL:
        acc, where = pool(acc, BM, F)
        n = m0 // 4 + tl.arange(0, BM // 4)
    else:
        n = m0 + tl.arange(0, BM)
    ok = (n < B * HW)[:, None]
    # A NaN stays NaN, which it would not with `maximum` or with `acc > 0`.
    y = tl.where(acc <= 0, 0.0, acc)
    at = (g * B * HW + n)[:, None] * F + f[None, :]
    if POOL:
        tl.store(A + at, tl.where(acc <= 0, 4, where).to(tl.int8), mask=ok)
    if LAST:
        tl.store(FLAT + ((g * B + n // HW)[:, None] * F + f[None, :]) * HW + (n % HW)[:, None], y, mask=ok)
    if (not LAST) or (not POOL):
        store_parts(Y + at, plane, y, ok, PARTS)
    if S is not None:
        store_sums(S, m0 // BM, g, y, y, ok, F)


@triton.jit
def activation_gradient(value, n, ok, g, Y, y_plane, A, R, S, D, d_plane, B, H: tl.constexpr, W: tl.constexpr,
                        C: tl.constexpr, POOL: tl.constexpr, DENSE: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Store in D the gradient of a convolution's output (H, W), from the gradient `value` [n, C] after relu and pool.
    Without DENSE, store the pooled gradient instead, one pixel of four. Behind a BatchNorm, R is what `norm_pool` took
    from each window: store in S what `store_sums` says, of the gradient and its products with R."""
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
            for q in range(4):  # not unrolled: there are not enough registers
                store_parts(to + ((q // 2) * W + q % 2) * C, d_plane, tl.where(where == q, value, 0.0), ok, PARTS)
        else:
            store_parts(D + at, d_plane, value, ok, PARTS)
            if R is not None:
                store_sums(S, tl.program_id(0), g, value, load_parts(R + at, d_plane, ok, PARTS), ok, C)
    else:
        at = (g * B * H * W + n)[:, None] * C + c[None, :]
        y = tl.load(Y + at, mask=ok, other=0.0).to(tl.float32)
        store_parts(D + at, d_plane, tl.where(y == 0, 0.0, value), ok, PARTS)
