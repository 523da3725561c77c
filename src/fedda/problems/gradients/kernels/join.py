"""All parts of a gradient side by side, each the sum of its shares."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .implicit_gemm import empty
from .launch import cdiv, launcher, power_of_two

TILE = 1024  # numbers that a program reads at once
PARTS = 32  # of a kernel: the time to compile it grows with their square


@triton.jit
def add_up(PART, OUT, n, block, FIRST: tl.constexpr, PLACE: tl.constexpr, LENGTH: tl.constexpr, SHARES: tl.constexpr,
           share: tl.constexpr, model: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """The sum of SHARES of a part, if this block belongs to it; `share` and `model` are strides. ROWS of the shares are
    read at once, so that short parts with many shares do not wait for each other."""
    if (block >= FIRST) & (block < FIRST + (LENGTH + COLUMNS - 1) // COLUMNS):
        i = (block - FIRST) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        s = tl.arange(0, ROWS)[:, None]
        at = PART + n * model + s.to(tl.int64) * share + i
        total = tl.load(at, mask=(s < SHARES) & (i < LENGTH), other=0.0)
        for first in range(ROWS, SHARES, ROWS):
            at += ROWS * share
            total += tl.load(at, mask=(first + s < SHARES) & (i < LENGTH), other=0.0)
        tl.store(OUT + PLACE + i, tl.sum(total, 0)[None, :], mask=i < LENGTH)


@triton.jit
def join(SOURCES, OUT, D, blocks, LAYOUT: tl.constexpr):
    """Some parts of OUT [n, D]. A program has a block of one part of one model. LAYOUT says of each part its first
    block, its place, its length, the number of shares, their strides along shares and models, and the tile."""
    n = (tl.program_id(0) // blocks).to(tl.int64)
    for i in tl.static_range(len(SOURCES)):
        add_up(SOURCES[i], OUT + n * D, n, tl.program_id(0) % blocks, LAYOUT[i][0], LAYOUT[i][1], LAYOUT[i][2],
               LAYOUT[i][3], LAYOUT[i][4], LAYOUT[i][5], LAYOUT[i][6], LAYOUT[i][7])  # fmt: skip


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts [shares, n, length] as [n, d], in float32; numbers of a part lie side by side. The order of the sums is
    fixed."""
    n, d = parts[0].shape[1], sum(v.shape[2] for v in parts)
    out, place = empty((n, d), torch.float32, parts[0]), 0
    for start in range(0, len(parts), PARTS):
        some, blocks, layout = parts[start : start + PARTS], 0, []
        for v in some:
            shares, _, length = v.shape
            columns = min(TILE, power_of_two(length))
            rows = min(TILE // columns, power_of_two(shares, 1))
            layout.append((blocks, place, length, shares, *v.stride()[:2], rows, columns))
            blocks, place = blocks + cdiv(length, columns), place + length
        launcher(join, blocks * n)(tuple(some), out, d, blocks, tuple(layout), num_warps=4)
    return out
