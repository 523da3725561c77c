"""What a data set is, and two that come with scikit-learn: real data without a download."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import rng
from ..registry import datasets

Array = np.ndarray


class Dataset(NamedTuple):
    """Samples for training and testing, classes 0, 1, ...; `client` where the data says whose a sample is.

    Images stay bytes, uint8 [n, channels, height, width], and bring the mean and the deviation of each channel over the
    training part, in the same units: a quarter of the memory, and the model is given (x - mean) / std. Anything else is
    float32 as it is to be used, without `mean` and `std`. The arrays may be read-only views of files.
    """

    x: Array
    y: Array
    x_test: Array
    y_test: Array
    classes: int
    client: Array | None = None
    client_test: Array | None = None
    mean: Array | None = None
    std: Array | None = None
    names: tuple[str, ...] | None = None

    def validation(self) -> Dataset:
        """The training part alone, a fifth of it in the place of the test set; where the data names owners, a fifth of
        each owner's samples, so that none of them vanishes."""
        train, test = held_out(len(self.y), draw=1) if self.client is None else held_out_of_each(self.client, draw=1)
        x = self.x[train]
        mean, std = (None, None) if self.mean is None else moments(x)  # what is held out is not looked at
        return self._replace(
            mean=mean,
            std=std,
            x=x,
            y=self.y[train],
            x_test=self.x[test],
            y_test=self.y[test],
            client=None if self.client is None else self.client[train],
            client_test=None if self.client is None else self.client[test],
        )

    def resplit(self, fraction: float = 0.1) -> Dataset:
        """Both parts put together and divided anew: a tenth of the samples, of each owner where there are owners, drawn
        at random for testing. For files whose own test part is of another kind than their training part."""
        x, y = np.concatenate([self.x, self.x_test]), np.concatenate([self.y, self.y_test])
        owned = self.client is not None and self.client_test is not None
        client = np.concatenate([self.client, self.client_test]) if owned else None
        if client is None:
            train, test = held_out(len(y), 2, fraction)
        else:
            train, test = held_out_of_each(client, 2, fraction)
        mean, std = (None, None) if self.mean is None else moments(x[train])
        whose, tested = (None, None) if client is None else (client[train], client[test])
        return self._replace(
            x=x[train], y=y[train], x_test=x[test], y_test=y[test], client=whose, client_test=tested, mean=mean, std=std
        )

    def shift(self) -> float:
        """How far the classes of the test part are from those of the training part, 0 (alike) to 1 (none in common)."""
        if self.y.dtype.kind == "f":  # regression: there are no classes
            return 0.0
        shares = [np.bincount(y.ravel(), minlength=self.classes) / y.size for y in (self.y, self.y_test)]
        return float(np.abs(shares[0] - shares[1]).sum() / 2)


@datasets.register("digits")
def digits() -> Dataset:
    """1797 hand-written digits of 8x8 pixels in [0, 1], a fifth of them for testing (from scikit-learn)."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = (raw.images[:, None] / 16).astype(np.float32)
    return hold_out(x, raw.target, classes=10)


@datasets.register("breast-cancer")
def breast_cancer() -> Dataset:
    """569 breast tumours (Wisconsin), 30 features, malignant or benign, a fifth for testing (from scikit-learn).

    The features are standardised with the training part's mean and deviation.
    """
    from sklearn.datasets import load_breast_cancer

    raw = load_breast_cancer()
    data = hold_out(raw.data, raw.target, classes=2)
    mean, deviation = data.x.mean(axis=0), data.x.std(axis=0)
    x, x_test = (((part - mean) / deviation).astype(np.float32) for part in (data.x, data.x_test))
    return data._replace(x=x, x_test=x_test)


def hold_out(
    x: Array, y: Array, classes: int, client: Array | None = None, names: tuple[str, ...] | None = None
) -> Dataset:
    """A data set from samples that come without a test set."""
    train, test = held_out(len(y), draw=0)
    y = y.astype(np.int64)
    data = Dataset(x[train], y[train], x[test], y[test], classes, names=names)
    return data if client is None else data._replace(client=client[train], client_test=client[test])


def held_out(n: int, draw: int, fraction: float = 0.2) -> tuple[Array, Array]:
    """A fixed random split of n samples in training and held-out ones: the same on every machine."""
    order = rng.permutation(rng.fold(rng.key(0, rng.SPLIT), draw), n).numpy()
    test, train = np.split(order, [round(fraction * n)])
    return train, test


def held_out_of_each(client: Array, draw: int, fraction: float = 0.2) -> tuple[Array, Array]:
    """The same with a share of each owner's samples, rounded down: an owner keeps one at least."""
    _, owner, sizes = np.unique(np.asarray(client), return_inverse=True, return_counts=True)
    order = rng.permutation(rng.fold(rng.key(0, rng.SPLIT), draw), len(owner)).numpy()
    order = order[np.argsort(owner[order], kind="stable")]  # by owner, shuffled within
    rank = np.arange(len(order)) - (np.cumsum(sizes) - sizes)[owner[order]]
    test = rank < np.floor(fraction * sizes)[owner[order]]
    return order[~test], order[test]


def moments(x: Array, rows: Array | None = None) -> tuple[Array, Array]:
    """Mean and deviation of each channel of uint8 images, or of those in some rows, float32 [channels].

    From counts of the 256 values: exact in whole numbers, whatever the size, and without a copy as floats.

    >>> moments(np.array([[[[0, 4]]]], np.uint8))
    (array([2.], dtype=float32), array([2.], dtype=float32))
    """
    counts = np.zeros((x.shape[1], 256), dtype=np.int64)
    for begin in range(0, len(x) if rows is None else len(rows), 1024):
        few = x[begin : begin + 1024] if rows is None else x[rows[begin : begin + 1024]]
        for c, count in enumerate(counts):
            count += np.bincount(few[:, c].ravel(), minlength=256)
    values = np.arange(256, dtype=np.float64)
    total = counts.sum(axis=1)
    mean = counts @ values / total
    variance = (counts * (values - mean[:, None]) ** 2).sum(axis=1) / total
    # A channel without contrast is shifted to zero and not divided by it.
    std = np.sqrt(np.where(variance > 0, variance, 1.0))
    return mean.astype(np.float32), std.astype(np.float32)
