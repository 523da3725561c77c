"""Partitions: from labels y to the client of each sample, -1 for a sample that no client gets."""

import math
from typing import Any

import numpy as np

from .. import rng
from ..checks import count, one_of
from ..registry import partitions

Array = np.ndarray


@partitions.register("iid")
def iid(y: Array, clients: int, seed: int) -> Array:
    """All clients alike: samples are shuffled, sizes differ by at most one."""
    owner = np.empty(len(y), dtype=np.int64)
    owner[shuffled(np.arange(len(y)), seed)] = np.arange(len(y)) % clients
    return owner


@partitions.register("dominant_class")
def dominant_class(y: Array, clients: int, seed: int, rho: float = 0.8) -> Array:
    """The paper's heterogeneous CIFAR-10: client i gets the share rho of class i, (1 - rho) / 9 of each other class.

    With m clients per class, these share the dominant part equally. Shares are rounded down, so a few samples are
    left over (one per class on CIFAR-10: 4000 + 9 x 111 of 5000).

    Args:
        y: the labels.
        clients: how many.
        seed: of the random choices.
        rho: the share of the samples of its own class that a client gets.
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
    """Each class is divided in proportions from a Dirichlet distribution; a smaller alpha is more uneven.

    One draw without rejection: an empty client gets one sample of the largest client.

    Args:
        y: the labels.
        clients: how many.
        seed: of the random choices.
        alpha: the concentration: a smaller one is more uneven, 100 is nearly iid.
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
def by_client(client: Any, clients: int | None = None, seed: int = 0, choose: str = "spread") -> Array:
    """The owners that the data names: the distinct ids in ascending order become clients 0, 1, ...

    Args:
        client: the owner of each sample.
        clients: take only so many of them; the samples of the others are unused.
        seed: of the random choice.
        choose: with `clients`: "spread" takes them evenly over the sorted ids, "random" at random by the seed.
    """
    one_of("by_client", "choose", choose, ("spread", "random"))
    if client is None:
        others = ", ".join(entry.name for entry in partitions if entry.name != "by_client")
        raise ValueError(f"by_client: this data set names no clients; take one of {others}")
    names, owner = np.unique(np.asarray(client), return_inverse=True)
    if clients is None or clients == len(names):
        return owner.astype(np.int64)
    count("by_client", "clients", clients, at_most=len(names))
    if choose == "random":
        kept = np.sort(shuffled(np.arange(len(names)), seed)[:clients])
    else:
        kept = np.linspace(0, len(names) - 1, clients).round().astype(int)
    number = np.full(len(names), -1, dtype=np.int64)
    number[kept] = np.arange(clients)
    return number[owner]


@partitions.register("shards", reference="McMahan et al. 2017, section 3")
def shards(y: Array, clients: int, seed: int, shards: int = 2) -> Array:
    """Samples are sorted by label and cut into equal shards; each client gets `shards` of them at random.

    Args:
        y: the labels.
        clients: how many.
        seed: of the random choices.
        shards: shards per client.

    >>> owner = shards(np.arange(40) // 10, clients=4, seed=0)
    >>> np.bincount(owner).tolist()
    [10, 10, 10, 10]
    """
    if clients * shards > len(y):
        raise ValueError(f"shards: {clients} clients with {shards} shards each need as many samples, got {len(y)}")
    order = shuffled(np.arange(len(y)), seed)
    order = order[np.argsort(y[order], kind="stable")]  # still shuffled within a class
    owner = np.empty(len(y), dtype=np.int64)
    pieces = np.array_split(order, clients * shards)
    for i, piece in enumerate(shuffled(np.arange(len(pieces)), seed, len(y))):
        owner[pieces[piece]] = i // shards
    return owner


@partitions.register("label_count")
def label_count(y: Array, clients: int, seed: int, labels: int = 2) -> Array:
    """Each client has exactly `labels` classes; the clients that have a class share its samples equally.

    The numbers of clients per class differ by at most one. If there are too few clients for all classes, the samples of
    some classes are unused.

    Args:
        y: the labels.
        clients: how many.
        seed: of the random choices.
        labels: classes per client.

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
        # The classes with the fewest clients so far; ties are broken at random.
        order = rng.permutation(rng.fold(key, client), len(classes)).tolist()
        for c in sorted(order, key=lambda c: len(owners[c]))[:labels]:
            owners[c].append(client)
    owner = np.full(len(y), -1, dtype=np.int64)
    for c, owners_of_class in enumerate(owners):
        members = shuffled(np.flatnonzero(number == c), seed, c)
        if len(members) < len(owners_of_class):
            raise ValueError(
                f"label_count: class {classes[c]} has {len(members)} samples for {len(owners_of_class)} clients; "
                "take fewer clients or labels"
            )
        if owners_of_class:
            for client, part in zip(owners_of_class, np.array_split(members, len(owners_of_class)), strict=True):
                owner[part] = client
    return owner


@partitions.register("quantity_skew")
def quantity_skew(y: Array, clients: int, seed: int, alpha: float = 0.5) -> Array:
    """Equal classes, unequal sizes from a Dirichlet distribution; a smaller alpha is more uneven.

    Args:
        y: the labels.
        clients: how many.
        seed: of the random choices.
        alpha: the concentration: a smaller one gives more uneven sizes.

    >>> sorted(np.bincount(quantity_skew(np.zeros(100), clients=4, seed=0, alpha=0.2)).tolist())
    [1, 16, 20, 63]
    """
    shares = np.random.default_rng(seed).dirichlet(np.full(clients, alpha))
    # One sample each, the rest by shares. The cuts are rounded, so the sizes add up.
    cuts = np.round(np.cumsum(shares)[:-1] * (len(y) - clients)).astype(int) + np.arange(1, clients)
    owner = np.empty(len(y), dtype=np.int64)
    for client, part in enumerate(np.split(shuffled(np.arange(len(y)), seed), cuts)):
        owner[part] = client
    return owner


ARGUMENTS = ("y", "clients", "seed", "client")  # of `split`; all other arguments are options of the partition


BY_CLASS = frozenset(("dominant_class", "dirichlet", "label_count"))  # these need classes


def split(name: str, y: Array, clients: int, seed: int = 0, client: Any = None, **options: Any) -> Array:
    """The client of each sample by a partition, given by its name; every client gets at least one sample.

    Args:
        name: the partition (`fedda list partitions`).
        y: the labels.
        clients: how many.
        seed: of the random choices.
        client: the owners that the data names.
        options: of the partition, such as `alpha`.

    >>> split("iid", np.array([0, 1, 0, 1]), clients=2).tolist().count(0)
    2
    """
    entry = partitions.find(name)
    if name in BY_CLASS and (y.ndim != 1 or y.dtype.kind not in "biuUS"):
        raise ValueError(
            f"{name} divides by class, so y must be whole numbers or texts, got {y.dtype} {list(y.shape)}; for "
            "other numbers give their quantiles, such as np.digitize(y, np.quantile(y, [0.25, 0.5, 0.75]))"
        )
    count(name, "clients", clients, at_most=len(y))
    arguments = dict(zip(ARGUMENTS, (y, clients, seed, client), strict=True))
    owner: Array = entry(**{k: v for k, v in arguments.items() if k in entry.defaults}, **options)
    empty = np.flatnonzero(np.bincount(owner[owner >= 0], minlength=clients) == 0)
    if len(empty):
        raise ValueError(f"{name}: client {empty[0]} of {clients} would get no sample; take fewer clients")
    return owner


def partition(y: Any, kind: str = "iid", clients: int = 10, seed: int = 0, client: Any = None, **options: Any) -> Array:
    """The client of each sample; -1 for a sample that no client gets.

    Args:
        y: the labels, whole numbers.
        kind: the partition (`fedda list partitions`).
        clients: how many.
        seed: the seed of the random choices.
        client: the owners that the data names, for the partition `by_client` and its relatives.
        options: of the partition, such as `alpha` or `rho`.

    >>> owner = partition([0, 1] * 50, "dirichlet", clients=4, alpha=0.3)
    >>> len(owner), sorted(set(owner.tolist()))
    (100, [0, 1, 2, 3])
    """
    return split(kind, np.asarray(y), clients, seed, client, **options)


def shuffled(index: Array, seed: int, label: int | None = None) -> Array:
    """The index in a random order that depends on the seed and on the label, if given."""
    key = rng.fold(rng.key(seed, rng.SPLIT), len(index))
    key = key if label is None else rng.fold(key, label)
    order: Array = index[rng.permutation(key, len(index)).numpy()]
    return order
