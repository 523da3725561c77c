"""Which training samples are held out for validation: a share of each client's, in proportion to its classes."""

from __future__ import annotations

import numpy as np
import torch

from .. import rng

Array = np.ndarray


def held_out_for_validation(owner: Array, y: Array, share: float) -> Array:
    """True for the samples that are held out, from the clients 0, 1, ... of all samples (-1 for nobody's).

    A client with n samples gives floor(share * n) of them and keeps at least one. Where y are classes, each of its
    classes gives its part, to within one sample. The draw depends on nothing but the arguments: neither the seed of a
    run nor its algorithm changes it.

    >>> held = held_out_for_validation(np.zeros(20, int), np.arange(20) % 2, 0.2)
    >>> held.sum(), (np.arange(20) % 2)[held].sum()
    (np.int64(4), np.int64(2))
    """
    members = np.flatnonzero(owner >= 0)
    key = rng.key(0, rng.VALIDATION)
    classes = y[members] if y.ndim == 1 and y.dtype.kind in "biu" else np.zeros(len(members), dtype=np.int64)
    shuffled = rng.fold(key, torch.as_tensor(members)).numpy()
    members = members[np.lexsort((shuffled, classes, owner[members]))]  # by client, then by class, then at random
    own = owner[members]
    sizes = np.bincount(own)
    given = np.minimum(np.floor(share * sizes + 1e-9).astype(np.int64), np.maximum(sizes - 1, 0))
    rank = np.arange(len(own)) - (np.cumsum(sizes) - sizes)[own]
    # `given` of `size` places, evenly spread, from a random place on: no class is always the one that is rounded up.
    first = rng.integers(rng.fold(rng.fold(key, 0), torch.arange(len(sizes))), torch.as_tensor(sizes)).numpy()
    before, after = ((rank + step) * given[own] + first[own] for step in (0, 1))
    held = np.zeros(len(owner), dtype=bool)
    held[members[before // sizes[own] != after // sizes[own]]] = True
    return held
