"""Randomness as a pure function of (seed, purpose, round, client, draw): a counter-based hash.

Every operation is on 64-bit integers, so the same bits come out on CPU and GPU, in any engine, in any order, and
a resumed run sees what the uninterrupted one saw. A *key* is an int64 tensor; `fold` derives a new key from it
and a counter. The hash is the finaliser of SplitMix64 (Steele, Lea, Flood 2014), one call per fold.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .recording import is_recording

# Purposes: one stream for each use of randomness, so that the streams are independent.
START, COHORT, BATCH, NOISE, SPLIT, MODEL, STATISTICS, VALIDATION, LAYERS, AUGMENT, SHUFFLE = range(11)
EVALUATION, PERSONAL = 20, 21

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed 64-bit number
MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX2 = 0x94D049BB133111EB - (1 << 64)
MASK = (1 << 64) - 1
MANY = 4096  # with more clients than this, a small cohort is drawn without hashing all of them
FEISTEL, WALKS = 8, 16  # rounds of the network behind `shuffle`, and how often a number may go through it
LOW = (1 << 32) - 1  # the low half of a number
UNSIGNED = {n: np.uint64(n & MASK) for n in (1, 27, 30, 31, 33, GOLDEN, MIX1, MIX2)}


def key(seed: int | Tensor, purpose: int) -> Tensor:
    """The key of one stream of one seed (or of a tensor of seeds: one for each replica)."""
    return fold(fold(torch.as_tensor(seed, dtype=torch.int64), 0), purpose)


def on_cpu(v: Tensor) -> bool:
    """Whether NumPy may read the numbers: not on a GPU, and not in a round that is recorded to be replayed."""
    return v.device.type == "cpu" and not is_recording()


def fold(key: Tensor, counter: int | Tensor) -> Tensor:
    """A new key from a key and a counter; both broadcast.

    >>> fold(key(0, COHORT), torch.arange(2)).tolist() == [fold(key(0, COHORT), i).item() for i in range(2)]
    True
    """
    return _fold_on_cpu(key, counter) if on_cpu(key) else fold_traced(key, counter)


def fold_traced(key: Tensor, counter: int | Tensor) -> Tensor:
    """`fold` in PyTorch's operations alone, which vmap and a recording can take."""
    z = key + (counter + 1) * GOLDEN if isinstance(counter, Tensor) else key + _wrap((counter + 1) * GOLDEN)
    z = (z ^ _shift(z, 30)) * MIX1
    z = (z ^ _shift(z, 27)) * MIX2
    return z ^ _shift(z, 31)


def _fold_on_cpu(key: Tensor, counter: int | Tensor) -> Tensor:
    """The same bits in NumPy's unsigned integers: a third of the time for the few keys of a round."""
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
    if on_cpu(key):  # NumPy, as in `fold`
        high: Any = (key.numpy().view(np.uint64) >> UNSIGNED[33]).view(np.int64)
        return torch.from_numpy(np.asarray(high * (n.numpy() if isinstance(n, Tensor) else n) >> 31))
    return (bits(key) * n) >> 31


def bits(key: Tensor) -> Tensor:
    """The 31 high bits of a key, as integers in [0, 2^31)."""
    return _shift(key, 33)


def uniform(key: Tensor) -> Tensor:
    """Uniform float64 in (0, 1): 52 bits, never 0 or 1."""
    return (_shift(key, 12).to(torch.float64) + 0.5) * 2.0**-52


def normal(key: Tensor) -> Tensor:
    """Standard normal float64 by Box and Muller (its log and cos may differ in the last bit between devices)."""
    return box_muller(uniform(fold(key, 0)), uniform(fold(key, 1)))


def box_muller(u: Tensor, v: Tensor) -> Tensor:
    """A standard normal number from two uniform ones in (0, 1)."""
    return torch.sqrt(-2.0 * torch.log(u)) * torch.cos(2.0 * math.pi * v)


def permutation(key: Tensor, n: int) -> Tensor:
    """A permutation of 0..n-1: the order of hashed keys."""
    return torch.argsort(fold(key, torch.arange(n, device=key.device)), stable=True)


def shuffle(key: Tensor, place: Tensor, n: Tensor) -> Tensor:
    """What stands at a place in a random order of 0..n-1, without making the order; all arguments broadcast.

    A Feistel network on a grid of about sqrt(n) x sqrt(n) numbers (Black, Rogaway 2002). A number that falls outside
    0..n-1 goes through it again, which happens with probability below 1 / sqrt(n).

    >>> sorted(shuffle(key(0, BATCH), torch.arange(10), torch.tensor(10)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    a = n.double().sqrt().ceil().long()
    b = (n + a - 1) // a
    keys = [fold(key, i) for i in range(FEISTEL)]
    for walk in range(WALKS):
        left, right = place % a, place // a
        for one, two in zip(keys[::2], keys[1::2], strict=True):
            left = (left + bits(fold(one, right))) % a
            right = (right + bits(fold(two, left))) % b
        place = left + a * right if walk == 0 else torch.where(place < n, place, left + a * right)
        if on_cpu(place) and bool((place < n).all()):
            break
    return place % n


def choose(key: Tensor, n: int, r: int) -> Tensor:
    """`r` of 0..n-1 without replacement, ascending; `key` [..., 1] gives [..., r]."""
    if r == n:
        return torch.arange(n, device=key.device).expand(*key.shape[:-1], n)
    if n > MANY and r <= n // 4:
        return _few_of_many(key, n, r)
    hashed = fold(key, torch.arange(n, device=key.device))
    if on_cpu(key):
        return torch.from_numpy(np.sort(np.argpartition(hashed.numpy(), r - 1, axis=-1)[..., :r], axis=-1))
    return hashed.topk(r, dim=-1, largest=False, sorted=False).indices.sort(dim=-1).values


def _few_of_many(key: Tensor, n: int, r: int) -> Tensor:
    """The first r different numbers among 2 r + 64 draws; the work does not grow with n.

    A draw repeats an earlier one with probability below 1/4. Too few are different if r + 65 draws repeat, with
    probability below 2^(2 r + 64) / 4^(r + 65) = 2^-66. The numbers 0..r-1 follow the draws, so that even then there
    are r different numbers.
    """
    draws = fold(key, torch.arange(2 * r + 64, device=key.device))
    return (_first_on_cpu if on_cpu(key) else _first)(draws, n, r)


def _first(draws: Tensor, n: int, r: int) -> Tensor:
    """All shapes are fixed and the host reads no number, so that a CUDA graph can contain it."""
    few = torch.arange(r, device=draws.device).expand(*draws.shape[:-1], r)
    drawn = torch.cat([integers(draws, n), few], dim=-1)
    # Sorted by value and then by position, in one number: an entry repeats another if it equals the one before it.
    order = ((drawn << 32) + torch.arange(drawn.shape[-1], device=draws.device)).sort(dim=-1).values
    value, position = order >> 32, order & LOW
    position[..., 1:] += (value[..., 1:] == value[..., :-1]) * (LOW + 1)
    first = position.topk(r, dim=-1, largest=False, sorted=False).indices
    return value.gather(-1, first).sort(dim=-1).values


def _first_on_cpu(draws: Tensor, n: int, r: int) -> Tensor:
    """The same in NumPy, in half the time."""
    drawn: Any = integers(draws, n).numpy()
    drawn = np.concatenate([drawn, np.broadcast_to(np.arange(r), (*drawn.shape[:-1], r))], axis=-1)
    order = np.sort((drawn << 32) + np.arange(drawn.shape[-1]), axis=-1)
    value, position = order >> 32, order & LOW
    position[..., 1:] += (value[..., 1:] == value[..., :-1]) * (LOW + 1)
    last = np.partition(position, r - 1, axis=-1)[..., r - 1 : r]
    return torch.from_numpy(value[position <= last].reshape(*draws.shape[:-1], r))


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's >> is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _wrap(value: int) -> int:
    value &= MASK
    return value - (1 << 64) if value >= 1 << 63 else value
