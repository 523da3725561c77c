"""The server's secret draws: which sites take part, and the keys from which they draw their batches.

A site gets one number for its batches. It is a keyed BLAKE2b hash, so it reveals nothing about the number of another
site or another round, nor about the cohort.
"""

import hashlib
import os
import struct
from collections.abc import Callable

import torch
from torch import Tensor

SECRET = 32  # bytes


class SecretDraws:
    """Cohorts and batch keys as a function of (secret, round, attempt, client).

    `attempts("starts")` or `attempts("rounds")` numbers the attempts and is called before each: with noise a repeated
    round gets a new cohort, and is charged. Without noise the attempt is always 0, and a resumed run repeats the round
    bit for bit.

    >>> draws = SecretDraws(bytes(32))
    >>> ids, keys = draws.cohort(0, clients=10, size=3)
    >>> len(set(ids.tolist())), keys.shape
    (3, torch.Size([3]))
    """

    secret = True

    def __init__(self, secret: bytes | None = None, attempts: Callable[[str], int] = lambda kind: 0):
        if secret is not None and not (isinstance(secret, bytes) and len(secret) == SECRET):
            raise ValueError(f"deploy: the secret must be {SECRET} bytes from a cryptographic generator")
        self.key = os.urandom(SECRET) if secret is None else secret
        self.attempts = attempts

    def everyone(self, clients: int) -> tuple[Tensor, Tensor]:
        return torch.arange(clients), self._numbers(b"start", 0, self.attempts("starts"), range(clients))

    def cohort(self, tau: int | Tensor, clients: int, size: int) -> tuple[Tensor, Tensor]:
        attempt = self.attempts("rounds")
        order = self._numbers(b"cohort", int(tau), attempt, range(clients))
        ids = torch.argsort(order)[:size].sort().values  # the smallest of independent random numbers
        return ids, self._numbers(b"batch", int(tau), attempt, ids.tolist())

    def _numbers(self, purpose: bytes, tau: int, attempt: int, clients: range | list[int]) -> Tensor:
        def number(client: int) -> int:
            about = struct.pack("<qqq", tau, attempt, client)
            digest = hashlib.blake2b(about, digest_size=8, key=self.key, person=b"fedda " + purpose).digest()
            return int.from_bytes(digest, "little", signed=True)

        return torch.tensor([number(client) for client in clients], dtype=torch.int64)
