"""Which samples are held out for testing or validation: fixed random choices, the same on every machine."""

import numpy as np
import torch

from .. import rng

Array = np.ndarray


def random_split(n: int, draw: int, share: float = 0.2, owner: Array | None = None) -> tuple[Array, Array]:
    """The indices of the training samples and of the held-out ones. With `owner`, each owner gives this share of its
    samples, rounded down, so that it keeps at least one. `draw` is the number of the random choice."""
    order = rng.permutation(rng.fold(rng.key(0, rng.SPLIT), draw), n).numpy()
    if owner is None:
        test, train = np.split(order, [round(share * n)])
        return train, test
    _, number, sizes = np.unique(np.asarray(owner), return_inverse=True, return_counts=True)
    order = order[np.argsort(number[order], kind="stable")]  # by owner, shuffled within
    rank = np.arange(n) - (np.cumsum(sizes) - sizes)[number[order]]
    held = rank < np.floor(share * sizes)[number[order]]
    return order[~held], order[held]


def validation_mask(owner: Array, y: Array, share: float) -> Array:
    """True for the samples that are held out; `owner` is the client of each sample, 0, 1, ..., or -1 for none.

    A client with n samples gives floor(share * n) of them and keeps at least one. If y are classes, each of its
    classes gives its share, to within one sample. The choice depends on the arguments only: neither the seed of a run
    nor its algorithm changes it.

    >>> held = validation_mask(np.zeros(20, int), np.arange(20) % 2, 0.2)
    >>> held.sum(), (np.arange(20) % 2)[held].sum()
    (np.int64(4), np.int64(2))
    """
    members = np.flatnonzero(owner >= 0)
    key = rng.key(0, rng.VALIDATION)
    classes = y[members] if y.ndim == 1 and y.dtype.kind in "biu" else np.zeros(len(members), dtype=np.int64)
    shuffled = rng.fold(key, torch.as_tensor(members)).numpy()
    members = members[np.lexsort((shuffled, classes, owner[members]))]  # by client, then by class, then at random
    client = owner[members]
    sizes = np.bincount(client)
    number = np.minimum(np.floor(share * sizes + 1e-9).astype(np.int64), np.maximum(sizes - 1, 0))  # to hold out
    rank = np.arange(len(client)) - (np.cumsum(sizes) - sizes)[client]
    # Evenly spread over the sorted samples, from a random start: so no class is always the one that is rounded up.
    first = rng.integers(rng.fold(rng.fold(key, 0), torch.arange(len(sizes))), torch.as_tensor(sizes)).numpy()
    before, after = ((rank + step) * number[client] + first[client] for step in (0, 1))
    held = np.zeros(len(owner), dtype=bool)
    held[members[before // sizes[client] != after // sizes[client]]] = True
    return held
