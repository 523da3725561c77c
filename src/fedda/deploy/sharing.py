"""Shamir's secret sharing of 256-bit keys: pycryptodome's scheme over GF(2^128), once for each half."""

from collections.abc import Mapping

from Crypto.Protocol.SecretSharing import Shamir

SECRET = 32  # bytes of a secret, and of a share
HALF = SECRET // 2


def split(secret: bytes, threshold: int, shares: int) -> list[bytes]:
    """Shares number 1, 2, ... of a secret: any `threshold` of them give it, fewer say nothing about it.

    >>> parts = split(bytes(range(32)), 2, 3)
    >>> combine({1: parts[0], 3: parts[2]}) == bytes(range(32))
    True
    """
    halves = (Shamir.split(threshold, shares, half, ssss=False) for half in (secret[:HALF], secret[HALF:]))
    return [low + high for (_, low), (_, high) in zip(*halves, strict=True)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret of exactly `threshold` shares, by their numbers. Wrong shares give a wrong secret."""
    halves = ([(number, share[part]) for number, share in shares.items()] for part in (slice(HALF), slice(HALF, None)))
    return b"".join(Shamir.combine(half, ssss=False) for half in halves)
