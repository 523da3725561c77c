"""Convolutions of a stack of models with different weights as matrix products, without a copy of the patches.

Tensors are [n, B, C, H, W] with any strides (0 where the stack shares a tensor), weights [n, O, C / groups, taps]. The
rows that are loaded are pixels, because these are what lies side by side in memory. If the channels of a pixel do, a
thread loads several of them at a time. Sizes and strides inside a model are constants of the compiler, so that
divisions and addresses cost little; the number of models and of samples are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Compiling, cdiv, launcher, power_of_two

if TYPE_CHECKING:
    from ..convolution import Window

WARPS = 2112  # that share the gradient of a weight: 16 for each multiprocessor of an H200
BLOCKS = ((128, 128), (128, 64), (64, 64), (64, 32))  # pixels and channels of a program


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        a = a.to(tl.bfloat16)
        b = b.to(tl.bfloat16)
    return tl.dot(a, b, acc, input_precision="ieee" if PRECISION == "float32" else "tf32")


@triton.jit
def convolve(X, x_n, x_b: tl.constexpr, x_c: tl.constexpr, x_h: tl.constexpr, x_w: tl.constexpr, WEIGHT, w_n,
             w_g: tl.constexpr, w_m: tl.constexpr, w_k: tl.constexpr, w_t: tl.constexpr, BIAS, bias_n, bias_m, OUT, B,
             GROUPS: tl.constexpr, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr, M: tl.constexpr,
             OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
             SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
             TRANSPOSED: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr, FLAT: tl.constexpr,
             BP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """From K channels [H, W] of each group to M channels [OH, OW]: a convolution or, if TRANSPOSED, the gradient of its
    input. If LAST, the channels of a pixel of OUT lie side by side. The sum is over blocks of channels and, inside,
    over taps, which read the same lines of the cache; if FLAT, over both together, because there are few channels."""
    # With a stride, a pixel of an input's gradient is reached by some taps only. A program has pixels of one kind,
    # which have the same taps.
    CH: tl.constexpr = SH if TRANSPOSED and DH == 1 else 1
    CW: tl.constexpr = SW if TRANSPOSED and DW == 1 else 1
    NH: tl.constexpr = (OH + CH - 1) // CH
    NW: tl.constexpr = (OW + CW - 1) // CW
    MB: tl.constexpr = (M + BM - 1) // BM
    program = tl.program_id(0)
    m = program % MB * BM + tl.arange(0, BM)[None, :]
    program = program // MB
    blocks = tl.cdiv(B * NH * NW, BP)
    p = program % blocks * BP + tl.arange(0, BP)[:, None]
    program = program // blocks
    rh = program % (CH * CW) // CW
    rw = program % CW
    program = program // (CH * CW)
    group = program % GROUPS
    n = (program // GROUPS).to(tl.int64)

    b = p // (NH * NW)
    h = p % (NH * NW) // NW * CH + rh
    w = p % NW * CW + rw
    inside = (b < B) & (h < OH) & (w < OW)
    source = X + n * x_n + group * K * x_c
    weight = WEIGHT + n * w_n + group * w_g
    # With channels side by side, a thread has some channels of many pixels. What it needs of a pixel, it computes once
    # before the loop: the other taps lie at fixed distances, unless a stride leaves out some of them.
    LINES: tl.constexpr = x_c == 1 and not (TRANSPOSED and (CH != SH or CW != SW))
    first_h = (rh + PH) % CH  # the taps are first_h, first_h + CH, ...
    first_w = (rw + PW) % CW
    taps_w = (KW - first_w + CW - 1) // CW
    taps = (KH - first_h + CH - 1) // CH * taps_w
    if LINES:
        top = (h + PH - first_h) // CH if TRANSPOSED else h * SH - PH  # where the first tap reads
        left = (w + PW - first_w) // CW if TRANSPOSED else w * SW - PW
        corner = b * x_b + (top * x_h + left * x_w)
        top = tl.where(inside, top, -(1 << 30))
    acc = tl.zeros((BP, BM), tl.float32)
    for i in range(tl.cdiv(K * taps, BK) if FLAT else tl.cdiv(K, BK) * taps):
        if FLAT:
            k = i * BK + tl.arange(0, BK)
            tap = (k % taps)[None, :]
            first = 0
            k = k // taps
        else:
            k = tl.arange(0, BK)
            tap = i % taps
            first = i // taps * BK
        kh = first_h + tap // taps_w * CH
        kw = first_w + tap % taps_w * CW
        if LINES:
            dy = tap // taps_w * (-DH if TRANSPOSED else DH)
            dx = tap % taps_w * (-DW if TRANSPOSED else DW)
            y = (top + dy).to(tl.uint32, bitcast=True)  # what lies before the first pixel is a large number
            x = (left + dx).to(tl.uint32, bitcast=True)
            ok = (y < H) & (x < W)
            at = source + (dy * x_h + dx * x_w + first + k[None, :]) + corner
        else:
            if TRANSPOSED:
                y = h + PH - kh * DH
                x = w + PW - kw * DW
                ok = inside & (y >= 0) & (x >= 0)
                if CH != SH:
                    ok = ok & (y % SH == 0)
                if CW != SW:
                    ok = ok & (x % SW == 0)
                y = y // SH
                x = x // SW
            else:
                y = h * SH - PH + kh * DH
                x = w * SW - PW + kw * DW
                ok = inside & (y >= 0) & (x >= 0)
            ok = ok & (y < H) & (x < W)
            # The position of a pixel comes first: a thread has one pixel and many channels, and computes it once.
            at = source + b * x_b + (y * x_h + x * x_w) + first * x_c + (k * x_c)[None, :]
        here = m < M
        if FLAT or K % BK != 0:
            ok = ok & (first + k < K)[None, :]
            here = here & (first + k < K)[:, None]
        a = tl.load(at, mask=ok, other=0.0)
        at = weight + first * w_k
        at += tl.trans((kh * KW + kw) * w_t) if FLAT else (kh * KW + kw) * w_t
        f = tl.load(at + (k * w_k)[:, None] + m * w_m, mask=here, other=0.0)
        if PRECISION == "tf32" and (FLAT or x_c != 1):
            # The tensor cores would drop these bits themselves. Done here, it takes the pixels through registers, and
            # they need not be transposed in shared memory.
            a = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        acc = product(a, f, acc, PRECISION)
    if BIAS is not None:
        acc += tl.load(BIAS + n * bias_n + (group * M + m) * bias_m, mask=m < M, other=0.0)
    to = OUT + n * B * (GROUPS * M * OH * OW)
    if LAST:
        to += ((b * OH + h) * OW + w) * (GROUPS * M) + (group * M + m)
    else:
        to += ((b * GROUPS + group) * M + m) * (OH * OW) + (h * OW + w)
    tl.store(to, acc, mask=inside & (m < M))


@triton.jit
def sum_pixels(X, x_n, x_b: tl.constexpr, x_c: tl.constexpr, x_h: tl.constexpr, x_w: tl.constexpr, D, d_n,
               d_b: tl.constexpr, d_c: tl.constexpr, d_h: tl.constexpr, d_w: tl.constexpr, OUT, N, B, SHARES, share,
               GROUPS: tl.constexpr, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr, M: tl.constexpr,
               OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
               SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
               PRECISION: tl.constexpr, FLAT: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
               BP: tl.constexpr):  # fmt: skip
    """Sums over a share of the pixels of D [OH, OW], in OUT [SHARES, N, O, K, taps]. A program has one tap and a block
    of channels; if FLAT, rows are channels and taps together."""
    TAPS: tl.constexpr = KH * KW
    ROWS: tl.constexpr = K * TAPS if FLAT else K
    MB: tl.constexpr = (M + BM - 1) // BM
    RB: tl.constexpr = (ROWS + BR - 1) // BR
    program = tl.program_id(0)
    m = program % MB * BM + tl.arange(0, BM)
    program = program // MB
    tap = 0
    if not FLAT:
        tap = program % TAPS
        program = program // TAPS
    r = program % RB * BR + tl.arange(0, BR)
    program = program // RB
    s = program % SHARES
    program = program // SHARES
    group = program % GROUPS
    n = (program // GROUPS).to(tl.int64)
    k = r
    if FLAT:
        # What lies side by side comes last: channels in the input or, else, taps in the result.
        k = r % K if x_c == 1 else r // TAPS
        tap = (r // K if x_c == 1 else r % TAPS)[None, :]
    dy = tap // KW * DH - PH
    dx = tap % KW * DW - PW
    source = X + n * x_n + group * K * x_c
    other = D + n * d_n + group * M * d_c
    # If a block of pixels is some lines of a sample, all blocks have the same form, which is computed before the loop.
    LINES: tl.constexpr = x_c == 1 and OH * OW % BP == 0 and BP % OW == 0
    q = tl.arange(0, BP)[:, None]
    if LINES:
        y = q // OW * SH + dy
        x = q % OW * SW + dx
        corner = (y * x_h + x * x_w) + k[None, :]
        y = tl.where((x >= 0) & (x < W) & (r < ROWS)[None, :], y, -(1 << 30))
        block = (q // OW * d_h + q % OW * d_w) + (m * d_c)[None, :]
    acc = tl.zeros((BR, BM), tl.float32)
    for i in range(s * share, min((s + 1) * share, B * OH * OW), BP):
        if LINES:
            b = i // (OH * OW)
            line = i % (OH * OW) // OW
            ok = (y + line * SH).to(tl.uint32, bitcast=True) < H  # what lies before the first line is a large number
            at = source + (b * x_b + line * (SH * x_h)) + corner
            here = (m < M)[None, :]
            d = tl.load(other + (b * d_b + line * d_h) + block, mask=here, other=0.0)
        else:
            p = i + q
            b = p // (OH * OW)
            h = p % (OH * OW) // OW
            w = p % OW
            y = h * SH + dy
            x = w * SW + dx
            ok = (b < B) & (y >= 0) & (y < H) & (x >= 0) & (x < W)
            here = b < B
            if ROWS % BR != 0:
                ok = ok & (r < ROWS)[None, :]
            if M % BM != 0:
                here = here & (m < M)[None, :]
            at = source + b * x_b + (y * x_h + x * x_w) + (k * x_c)[None, :]
            d = tl.load(other + b * d_b + (h * d_h + w * d_w) + (m * d_c)[None, :], mask=here, other=0.0)
        if x_c == 1:  # transposed before it is loaded, so that the copies are long
            a = tl.load(tl.trans(at), mask=tl.trans(ok), other=0.0)
        else:
            a = tl.trans(tl.load(at, mask=ok, other=0.0))
        acc = product(a, d, acc, PRECISION)
    to = OUT + ((s * N + n) * GROUPS + group) * (M * K * TAPS) + (m * (K * TAPS))[None, :]
    to += (k * TAPS)[:, None] + tl.trans(tap) if FLAT else (k * TAPS + tap)[:, None]
    tl.store(to, acc, mask=(r < ROWS)[:, None] & (m < M)[None, :])


@triton.jit
def reorder(WEIGHT, w_n, w_o, OUT, O, C: tl.constexpr, TAPS: tl.constexpr, SUM_OUTPUTS: tl.constexpr,
            BC: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    """Weights [n, O, C * taps] as [n, taps, O, C] or, if a product sums over the outputs, as [n, taps, C, O]. A tile is
    [BC, BO, BT] with an axis for the taps, so that the compiler sees which numbers are neighbours in memory. Threads
    run along the first axes first where they have the choice: they read the taps of one channel after the other."""
    CB: tl.constexpr = (C + BC - 1) // BC
    program = tl.program_id(0)
    c = program % CB * BC + tl.arange(0, BC)[:, None, None]
    program = program // CB
    o = program % tl.cdiv(O, BO) * BO + tl.arange(0, BO)[None, :, None]
    n = (program // tl.cdiv(O, BO)).to(tl.int64)
    t = tl.arange(0, BT)[None, None, :]
    ok = (o < O) & (c < C) & (t < TAPS)
    value = tl.load(WEIGHT + n * w_n + o * w_o + c * TAPS + t, mask=ok)
    to = t * C * O + (c * O + o if SUM_OUTPUTS else o * C + c)
    tl.store(OUT + n * O * (C * TAPS) + to, value.to(OUT.dtype.element_ty), mask=ok)


def forward(
    x: Tensor, w: Tensor, bias: Tensor | None, size: Sequence[int], window: Window, precision: str, last: bool = False
) -> Tensor:
    """The convolution of x [n, B, C, H, W], with outputs of this size; `last` as in `activations`."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    y = activations((len(w), x.shape[1], w.shape[1], *size), dtype, x, last)
    w, (w_n, w_o, w_c, w_t) = by_taps(w, False, w.shape[2], precision)
    weight = w, w_n, y.shape[2] // window.groups * w_o, w_o, w_c, w_t
    launch_convolve(x, weight, bias, y, window, False, precision)
    return y


def input_gradient(
    d: Tensor, w: Tensor, size: Sequence[int], window: Window, precision: str, dtype: torch.dtype, last: bool = False
) -> Tensor:
    """The gradient of an input of this size, from d [n, B, O, OH, OW]; `last` as in `activations`."""
    out = activations((len(w), d.shape[1], w.shape[2] * window.groups, *size), dtype, d, last)
    outputs = d.shape[2] // window.groups
    w, (w_n, w_o, w_c, w_t) = by_taps(w, True, outputs, precision)
    launch_convolve(d, (w, w_n, outputs * w_o, w_c, w_o, w_t), None, out, window, True, precision)
    return out


def launch_convolve(
    x: Tensor,
    weight: tuple[Any, ...],
    bias: Tensor | None,
    out: Tensor,
    window: Window,
    transposed: bool,
    precision: str,
) -> None:
    (n, samples, channels, *size), (*_, filters, height, width), groups = x.shape, out.shape, window.groups
    k, m, taps = channels // groups, filters // groups, window.kh * window.kw
    ch, cw = (s if transposed and d == 1 else 1 for s, d in ((window.sh, window.dh), (window.sw, window.dw)))
    pixels, kinds = samples * cdiv(height, ch) * cdiv(width, cw), ch * cw * groups
    rows, columns, warps = fitting_block(pixels, m, kinds, precision)
    flat = k < 16
    most = 64 if precision == "bf16" and x.stride(2) == 1 else 32
    depth = min(most, power_of_two(k * taps if flat else k))
    launcher(convolve, cdiv(m, columns) * cdiv(pixels, rows) * kinds * n)(
        x, *x.stride(), *weight, bias, *((0, 0) if bias is None else bias.stride()), out, samples, groups, k, *size, m,
        height, width, *window[:8], transposed, out.stride(2) == 1, precision, flat, rows, columns, depth,
        num_warps=warps, num_stages=3,
    )  # fmt: skip


def weight_gradient(x: Tensor, d: Tensor, window: Window, precision: str) -> Tensor:
    """Shares [S, n, O, C / groups, KH, KW] of the gradient of the weights, in float32."""
    (n, samples, channels, *size), (*_, filters, height, width), groups = x.shape, d.shape, window.groups
    k, m, taps = channels // groups, filters // groups, window.kh * window.kw
    pixels = samples * height * width
    last = x.stride(2) == 1
    # With few pixels, writing the result takes the time: rows then lie side by side in it. With channels side by side,
    # several taps of few channels share the gradient that they read.
    flat = k < (64 if last else 16) or (pixels <= 512 and not last)
    most = (64, 64 if last else 128) if flat else (64, 64) if last and precision == "tf32" else BLOCKS[0]
    rows, columns, warps = block(k * taps if flat else k, m, precision, most)
    if last and precision == "tf32":
        warps = max(1, rows * columns // 2048)  # four would copy every number alone to transpose it
    depth = 64 if rows * columns <= (4096 if last and precision == "bf16" else 1024) else 32
    programs = cdiv(m, columns) * (cdiv(k * taps, rows) if flat else cdiv(k, rows) * taps) * groups * n
    share = share_of(pixels, programs * warps)
    shares = cdiv(pixels, share)
    dw = empty((shares, n, filters, k, window.kh, window.kw), torch.float32, x)
    launcher(sum_pixels, programs * shares)(
        x, *x.stride(), d, *d.stride(), dw, n, samples, shares, share, groups, k, *size, m, height, width,
        *window[:8], precision, flat, rows, columns, depth, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return dw


def fitting_block(rows: int, columns: int, others: int, precision: str) -> tuple[int, int, int]:
    """The largest block that leaves each model 24 programs: ten models then fill an H200."""
    fits = (b for b in BLOCKS if cdiv(rows, b[0]) * cdiv(columns, b[1]) * others >= 24)
    return block(rows, columns, precision, next(fits, BLOCKS[-1]))


def block(rows: int, columns: int, precision: str, most: tuple[int, int]) -> tuple[int, int, int]:
    """The rows and columns of the product of a program, and its warps. Products in full precision need registers."""
    most = (64, 64) if precision == "float32" else most
    rows, columns = min(power_of_two(rows), most[0]), min(power_of_two(columns), most[1])
    return rows, columns, 8 if rows * columns > 8192 else max(1, min(4, rows * columns // 512))


def share_of(number: int, warps: int) -> int:
    """How many of these pixels or tokens a program sums up, if one share takes this many warps."""
    return cdiv(cdiv(number, cdiv(WARPS, warps)), 256) * 256


def by_taps(w: Tensor, sum_outputs: bool, summed: int, precision: str) -> tuple[Tensor, tuple[int, ...]]:
    """The weights, and their strides along the stack, outputs, inputs and taps. Every block of pixels reads them tap by
    tap, so they are copied once, with what a product sums over side by side."""
    n, filters, channels, *kernel = w.shape
    taps = kernel[0] * kernel[1]
    if w.stride()[2:] != (taps, kernel[1], 1):
        w = w.contiguous()
    if taps == 1 or summed < 16:
        return w, (*w.stride()[:3], 1)
    out = empty((n, taps, filters * channels), torch.bfloat16 if precision == "bf16" else torch.float32, w)
    block_t = power_of_two(taps, 1)
    # A long run of what lies side by side in the copy, and small tiles if large ones would be few.
    numbers = 4096 if out.numel() >= 1 << 21 else 1024
    run = max(1, min(64, power_of_two(filters if sum_outputs else channels, 1), numbers // block_t))
    others = max(1, numbers // (block_t * run))
    block_o, block_c = (run, others) if sum_outputs else (others, run)
    launcher(reorder, cdiv(channels, block_c) * cdiv(filters, block_o) * n)(
        w, *w.stride()[:2], out, filters, channels, taps, sum_outputs, block_c, block_o, block_t,
        num_warps=numbers // 1024,
    )  # fmt: skip
    return out, (out.stride(0), *((1, filters) if sum_outputs else (channels, 1)), out.stride(1))


def activations(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor, last: bool) -> Tensor:
    """Memory for activations [n, B, C, H, W]. If `last`, the channels of a pixel lie side by side."""
    n, samples, channels, *size = shape
    return empty((n, samples, *size, channels), dtype, like).movedim(-1, 2) if last else empty(shape, dtype, like)


def empty(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Memory for a result; zeros if kernels are only compiled, so that the operations after them see numbers."""
    make: Any = torch.zeros if Compiling.now else torch.empty
    result: Tensor = make(shape, dtype=dtype, device=like.device)
    return result
