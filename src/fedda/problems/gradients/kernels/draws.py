"""The random draws of batches (`fedda.rng`) in one kernel: the same bits with one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def mix(key, counter):
    """rng.fold: the finaliser of SplitMix64."""
    z = key.to(tl.uint64) + (counter + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def draw(KEY, IDS, OFFSETS, SIZES, INDEX, clients, BATCH: tl.constexpr, BP: tl.constexpr):
    """The indices of a client's samples: offset + integers(fold(key, j), size)."""
    k = tl.program_id(0)
    j = tl.arange(0, BP)
    client = tl.load(IDS + k % clients)
    bits = mix(tl.load(KEY + k), j.to(tl.int64)) >> 33
    size = tl.load(SIZES + client)
    index = tl.load(OFFSETS + client) + ((bits * size.to(tl.uint64)) >> 31).to(tl.int64)
    tl.store(INDEX + k * BATCH + j, index, mask=j < BATCH)


def draw_batches(key: Tensor, ids: Tensor, offsets: Tensor, sizes: Tensor, batch: int) -> Tensor:
    """The indices of the samples of batches, [draws, ..., c, batch], from keys [draws, ..., c] and ids [..., c]."""
    index = torch.empty(*key.shape, batch, dtype=torch.int64, device=key.device)
    width = triton.next_power_of_2(batch)
    draw[(key.numel(),)](key, ids, offsets, sizes, index, ids.numel(), batch, width, num_warps=1)
    return index
