"""Randomness as a pure function of (seed, purpose, round, client, draw): a counter-based hash.

Every operation is on 64-bit integers, so the same bits come out on CPU and GPU, in any engine, in any order, and
a resumed run sees what the uninterrupted one saw. A *key* is an int64 tensor; `fold` derives a new key from it
and a counter. The hash is the finaliser of SplitMix64 (Steele, Lea, Flood 2014), one call a fold.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Purposes: one stream for each use of randomness, so that one never shifts another.
START, COHORT, BATCH, NOISE, SPLIT, MODEL = range(6)

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed 64-bit number
MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX2 = 0x94D049BB133111EB - (1 << 64)
MASK = (1 << 64) - 1
UNSIGNED = {n: np.uint64(n & MASK) for n in (1, 27, 30, 31, GOLDEN, MIX1, MIX2)}


def key(seed: int | Tensor, purpose: int) -> Tensor:
    """The key of one stream of one seed (or of a tensor of seeds: one for each replica)."""
    return fold(fold(torch.as_tensor(seed, dtype=torch.int64), 0), purpose)


def fold(key: Tensor, counter: int | Tensor) -> Tensor:
    """A new key from a key and a counter; both broadcast.

    >>> fold(key(0, COHORT), torch.arange(2)).tolist() == [fold(key(0, COHORT), i).item() for i in range(2)]
    True
    """
    if key.device.type == "cpu":
        return _fold_on_cpu(key, counter)
    z = key + (counter + 1) * GOLDEN if isinstance(counter, Tensor) else key + _wrap((counter + 1) * GOLDEN)
    z = (z ^ _shift(z, 30)) * MIX1
    z = (z ^ _shift(z, 27)) * MIX2
    return z ^ _shift(z, 31)


def _fold_on_cpu(key: Tensor, counter: int | Tensor) -> Tensor:
    """The same bits in NumPy's unsigned integers: no masks, and a third of the time on the few keys of a round."""
    if isinstance(counter, Tensor):
        step: Any = np.multiply(np.add(counter.numpy().view(np.uint64), UNSIGNED[1]), UNSIGNED[GOLDEN])
    else:
        step = np.uint64((counter + 1) * GOLDEN & MASK)
    z: Any = np.asarray(np.add(key.numpy().view(np.uint64), step))
    z ^= z >> UNSIGNED[30]
    z *= UNSIGNED[MIX1]
    z ^= z >> UNSIGNED[27]
    z *= UNSIGNED[MIX2]
    z ^= z >> UNSIGNED[31]
    return torch.from_numpy(z.view(np.int64))


def integers(key: Tensor, n: Tensor | int) -> Tensor:
    """Uniform integers in [0, n), n < 2^31: 31 bits times n, shifted; the bias is below n / 2^31."""
    return (_shift(key, 33) * n) >> 31


def uniform(key: Tensor) -> Tensor:
    """Uniform float64 in (0, 1): 52 bits, never 0 or 1."""
    return (_shift(key, 12).to(torch.float64) + 0.5) * 2.0**-52


def normal(key: Tensor) -> Tensor:
    """Standard normal float64 by Box and Muller (its log and cos may differ in the last bit between devices)."""
    radius = torch.sqrt(-2.0 * torch.log(uniform(fold(key, 0))))
    return radius * torch.cos(2.0 * math.pi * uniform(fold(key, 1)))


def permutation(key: Tensor, n: int) -> Tensor:
    """A permutation of 0..n-1, as the order of hashed keys."""
    return torch.argsort(fold(key, torch.arange(n, device=key.device)), stable=True)


def choose(key: Tensor, n: int, r: int) -> Tensor:
    """`r` of 0..n-1 without replacement, ascending; `key` [..., 1] gives [..., r]."""
    everyone = torch.arange(n, device=key.device)
    if r == n:
        return everyone.expand(*key.shape[:-1], n)
    return fold(key, everyone).topk(r, dim=-1, largest=False, sorted=False).indices.sort(dim=-1).values


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's own is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _wrap(value: int) -> int:
    value &= MASK
    return value - (1 << 64) if value >= 1 << 63 else value
