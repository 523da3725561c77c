"""Who owns which sample: from labels y to a client number for each sample (-1 for one that nobody gets)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import rng
from ..checks import count
from ..registry import partitions

Array = np.ndarray


@partitions.register("iid")
def iid(y: Array, clients: int, seed: int) -> Array:
    """All clients alike: shuffled, sizes equal up to one sample."""
    owner = np.empty(len(y), dtype=np.int64)
    owner[shuffled(np.arange(len(y)), seed)] = np.arange(len(y)) % clients
    return owner


@partitions.register("dominant_class")
def dominant_class(y: Array, clients: int, seed: int, rho: float = 0.8) -> Array:
    """The paper's heterogeneous CIFAR-10: client i gets the share rho of class i, (1 - rho) / 9 of each other class.

    With m clients for each class, these share the dominant part equally. Shares are rounded down, so a few samples
    are left over (one a class on CIFAR-10: 4000 + 9 x 111 of 5000).
    """
    classes = np.unique(y)
    each, rest = divmod(clients, len(classes))
    if rest or each == 0 or len(classes) < 2:
        raise ValueError(
            f"dominant_class: clients must be a multiple of the number of classes, {len(classes)}, got {clients}"
        )
    owner = np.full(len(y), -1, dtype=np.int64)
    for c, label in enumerate(classes):
        members = shuffled(np.flatnonzero(y == label), seed, c)
        # A share such as 0.8 x 5000 / 1 must not fall below 4000 by rounding.
        dominant = math.floor(rho * len(members) / each + 1e-9)
        other = math.floor((1 - rho) * len(members) / (clients - each) + 1e-9)
        taken = 0
        for client in range(clients):
            n = dominant if client % len(classes) == c else other
            owner[members[taken : taken + n]] = client
            taken += n
    return owner


@partitions.register("dirichlet")
def dirichlet(y: Array, clients: int, seed: int, alpha: float = 0.5) -> Array:
    """Each class is divided by proportions drawn from a Dirichlet distribution: the smaller alpha, the more uneven.

    One draw, no rejection: a client that is left empty gets one sample of the largest client.
    """
    owner = np.empty(len(y), dtype=np.int64)
    random = np.random.default_rng(seed)
    for c, label in enumerate(np.unique(y)):
        members = shuffled(np.flatnonzero(y == label), seed, c)
        cuts = np.cumsum(random.dirichlet(np.full(clients, alpha)))[:-1]
        for client, part in enumerate(np.split(members, np.round(cuts * len(members)).astype(int))):
            owner[part] = client
    sizes = np.bincount(owner, minlength=clients)
    for empty in np.flatnonzero(sizes == 0):
        largest = sizes.argmax()
        owner[np.flatnonzero(owner == largest)[0]] = empty
        sizes[largest] -= 1
        sizes[empty] += 1
    return owner


@partitions.register("by_client")
def by_client(client: Any, clients: int | None = None) -> Array:
    """The owners that the data itself names: the distinct ids in ascending order become clients 0, 1, ...

    With `clients`, only that many of them, evenly spread over the sorted ids; the samples of others go to nobody.
    """
    if client is None:
        others = ", ".join(entry.name for entry in partitions if entry.name != "by_client")
        raise ValueError(f"by_client: this data set names no clients; take one of {others}")
    names, owner = np.unique(np.asarray(client), return_inverse=True)
    if clients is None or clients == len(names):
        return owner.astype(np.int64)
    count("by_client", "clients", clients, at_most=len(names))
    kept = np.linspace(0, len(names) - 1, clients).round().astype(int)
    number = np.full(len(names), -1, dtype=np.int64)
    number[kept] = np.arange(clients)
    return number[owner]


GIVEN = ("y", "clients", "seed", "client")  # what `split` hands on; all other words are a partition's options


def split(name: str, y: Array, clients: int, seed: int = 0, client: Any = None, **options: Any) -> Array:
    """The owners by the name of the partition; every client gets at least one sample.

    >>> split("iid", np.array([0, 1, 0, 1]), clients=2).tolist().count(0)
    2
    """
    entry = partitions.find(name)
    count(name, "clients", clients, at_most=len(y))
    given = dict(zip(GIVEN, (y, clients, seed, client), strict=True))
    owner: Array = entry(**{word: given[word] for word in GIVEN if word in entry.defaults}, **options)
    empty = np.flatnonzero(np.bincount(owner[owner >= 0], minlength=clients) == 0)
    if len(empty):
        raise ValueError(f"{name}: client {empty[0]} of {clients} would get no sample; take fewer clients")
    return owner


def shuffled(index: Array, seed: int, label: int | None = None) -> Array:
    """In an order that is the seed's and, where it is given, the class's own."""
    key = rng.fold(rng.key(seed, rng.SPLIT), len(index))
    key = key if label is None else rng.fold(key, label)
    return index[rng.permutation(key, len(index)).numpy()]
