"""Gaussian noise that nobody can predict: ChaCha20 under a key from the operating system that is used once.

The noisy sum lies on a grid that does not depend on the data. Plain floating-point noise leaves traces of the sum in
the last bits (Mironov 2012); a multiple of the grid's width has none. docs/aggregation.md says which attacks remain.
"""

import math
import os

import numpy as np
import torch
from torch import Tensor

from ..extras import needed_for

KEY = 32  # bytes of a key
CHUNK = 1 << 16  # numbers drawn at a time, so that they fit in the cache
SLACK = 2.0**-10  # the share by which the noise is larger, so that rounding to the grid costs no privacy


def new_key() -> bytes:
    return os.urandom(KEY)


def normal(key: bytes, shape: tuple[int, ...]) -> Tensor:
    """Standard normal float64 by Box and Muller, from the ChaCha20 stream of a key of 256 bits.

    >>> normal(bytes(32), (2, 3)).shape
    torch.Size([2, 3])
    """
    stream = chacha20(key)
    out = torch.empty(math.prod(shape), dtype=torch.float64)
    for part in out.split(CHUNK):
        half = (len(part) + 1) // 2
        bits = torch.from_numpy(np.frombuffer(stream.update(bytes(24 * half)), np.int64).copy())
        high, low, turn = ((bits >> 11) & (2**53 - 1)).double().split(half)
        distance, angle = radius(high, low), turn.mul_(2.0**-53 * 2 * math.pi)
        part[:half] = distance * angle.cos()
        part[half:] = (distance * angle.sin())[: len(part) - half]
    return out.view(shape)


def radius(high: Tensor, low: Tensor) -> Tensor:
    """sqrt(-2 log u) of a uniform u of 106 bits, given as two halves, which are overwritten.

    So u has 53 significant bits, however small it is. With only 53 bits, large radii would be few and far apart, and a
    pair of numbers between two of them would show that a sum is impossible.
    """
    uniform = low.add_(0.5).mul_(2.0**-53).add_(high).mul_(2.0**-53)  # in (0, 1]
    return uniform.log_().mul_(-2).clamp_(min=0).sqrt_()


def noisy(total: Tensor, norm: float, multiplier: float, key: bytes) -> Tensor:
    """total + multiplier norm xi, both rounded to multiples of one power of two. `total` [..., m] is a float64 sum of
    vectors of at most this norm.

    Rounding moves a sum by at most half a width in each coordinate, so two sums that are 2 norm apart are at most
    2 norm + width sqrt(m) apart on the grid. The width is such that this is 2 norm (1 + SLACK), and the noise is
    larger by the same factor.
    """
    width = 2.0 ** math.floor(math.log2(2 * norm * SLACK / math.sqrt(total.shape[-1])))
    noise = normal(key, tuple(total.shape)).to(total.device) * (multiplier * norm * (1 + SLACK) / width)
    return (torch.round(total / width) + torch.round(noise)) * width


def uniform_integers(key: bytes, count: int, bits: int) -> np.ndarray:
    """Integers from 0 to 2^bits - 1, all equally likely, from the ChaCha20 stream of a key; bits is 32 or 64.

    >>> uniform_integers(bytes(32), 2, 32)
    array([2917185654, 2419978656], dtype=uint32)
    """
    kind = np.dtype(f"<u{bits // 8}")
    return np.frombuffer(chacha20(key).update(bytes(count * kind.itemsize)), kind)


def chacha20(key: bytes):  # type: ignore[no-untyped-def]
    """The ChaCha20 stream of a key of 256 bits, which must be used once."""
    with needed_for("Noise", more="; a simulation can use Noise(..., seed=0), which is reproducible and not private"):
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    return Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
