"""More ways to divide data over clients: by shards, by a number of classes each, by size."""

from __future__ import annotations

import numpy as np

from .. import rng
from ..checks import count
from ..registry import partitions
from .partition import shuffled

Array = np.ndarray


@partitions.register("shards", reference="McMahan et al. 2017, section 3")
def shards(y: Array, clients: int, seed: int, shards: int = 2) -> Array:
    """Sorted by label and cut into equal shards, `shards` of them for each client at random: few classes each.

    >>> owner = shards(np.arange(40) // 10, clients=4, seed=0)
    >>> np.bincount(owner).tolist()
    [10, 10, 10, 10]
    """
    if clients * shards > len(y):
        raise ValueError(f"shards: {clients} clients with {shards} shards each need as many samples, got {len(y)}")
    order = shuffled(np.arange(len(y)), seed)
    order = order[np.argsort(y[order], kind="stable")]  # within a class the samples stay shuffled
    owner = np.empty(len(y), dtype=np.int64)
    pieces = np.array_split(order, clients * shards)
    for place, piece in enumerate(shuffled(np.arange(len(pieces)), seed, len(y))):
        owner[pieces[piece]] = place // shards
    return owner


@partitions.register("label_count")
def label_count(y: Array, clients: int, seed: int, labels: int = 2) -> Array:
    """Each client has `labels` classes and no other; the samples of a class are shared equally by those who have it.

    Every class has owners, equally many up to one, unless there are fewer places than classes: then its samples go to
    nobody.

    >>> y = np.arange(40) % 4
    >>> owner = label_count(y, clients=6, seed=0, labels=2)
    >>> [len(np.unique(y[owner == k])) for k in range(6)]
    [2, 2, 2, 2, 2, 2]
    """
    classes, number = np.unique(y, return_inverse=True)
    count("label_count", "labels", labels, at_most=len(classes))
    owners: list[list[int]] = [[] for _ in classes]
    key = rng.fold(rng.key(seed, rng.SPLIT), len(classes))
    for client in range(clients):
        # The classes that fewest have so far, in an order of the client's own among equals.
        order = rng.permutation(rng.fold(key, client), len(classes)).tolist()
        for c in sorted(order, key=lambda c: len(owners[c]))[:labels]:
            owners[c].append(client)
    owner = np.full(len(y), -1, dtype=np.int64)
    for c, who in enumerate(owners):
        members = shuffled(np.flatnonzero(number == c), seed, c)
        if len(members) < len(who):
            raise ValueError(
                f"label_count: class {classes[c]} has {len(members)} samples for {len(who)} clients; "
                "take fewer clients or labels"
            )
        for client, part in zip(who, np.array_split(members, len(who)) if who else [], strict=True):
            owner[part] = client
    return owner


@partitions.register("quantity_skew")
def quantity_skew(y: Array, clients: int, seed: int, alpha: float = 0.5) -> Array:
    """Alike in classes, not in size: shares from a Dirichlet distribution, the smaller alpha the more uneven.

    >>> sorted(np.bincount(quantity_skew(np.zeros(100), clients=4, seed=0, alpha=0.2)).tolist())
    [1, 16, 20, 63]
    """
    shares = np.random.default_rng(seed).dirichlet(np.full(clients, alpha))
    # One sample each, the rest by shares: the cuts are rounded, so the sizes add up.
    cuts = np.round(np.cumsum(shares)[:-1] * (len(y) - clients)).astype(int) + np.arange(1, clients)
    owner = np.empty(len(y), dtype=np.int64)
    for client, part in enumerate(np.split(shuffled(np.arange(len(y)), seed), cuts)):
        owner[part] = client
    return owner
