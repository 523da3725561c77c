"""What only the server knows: who takes part, and from which keys sites draw their batches.

A site is told one number for its batches. It is a keyed BLAKE2b hash, so it says nothing about the number of another
site, of another round, or about who takes part.
"""

from __future__ import annotations

import hashlib
import os
import struct

import torch
from torch import Tensor

SECRET = 32  # bytes


class SecretDraws:
    """Cohorts and batch keys as a function of (secret, round, attempt, client).

    With noise every attempt at a round has a number of its own, so that a repeated round has a cohort of its own.
    Without noise the attempt is always 0, and a resumed run repeats the round bit for bit.

    >>> draws = SecretDraws(bytes(32))
    >>> ids, keys = draws.cohort(0, clients=10, size=3)
    >>> len(set(ids.tolist())), keys.shape
    (3, torch.Size([3]))
    """

    secret = True

    def __init__(self, secret: bytes | None = None):
        self.key = os.urandom(SECRET) if secret is None else secret
        self.attempt = 0

    def everyone(self, clients: int) -> tuple[Tensor, Tensor]:
        ids = range(clients)
        return torch.arange(clients), self._numbers(b"start", 0, ids)

    def cohort(self, tau: int | Tensor, clients: int, size: int) -> tuple[Tensor, Tensor]:
        order = self._numbers(b"cohort", int(tau), range(clients))
        ids = torch.argsort(order)[:size].sort().values  # the smallest of independent random numbers
        return ids, self._numbers(b"batch", int(tau), ids.tolist())

    def _numbers(self, purpose: bytes, tau: int, clients: range | list[int]) -> Tensor:
        def number(client: int) -> int:
            about = struct.pack("<qqq", tau, self.attempt, client)
            digest = hashlib.blake2b(about, digest_size=8, key=self.key, person=b"fedda " + purpose).digest()
            return int.from_bytes(digest, "little", signed=True)

        return torch.tensor([number(client) for client in clients], dtype=torch.int64)
