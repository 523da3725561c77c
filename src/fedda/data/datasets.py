"""The type of a data set, and two that come with fedda: real data without a download."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..registry import datasets
from .holdout import random_split

Array = np.ndarray


class Dataset(NamedTuple):
    """Samples for training and testing, with classes 0, 1, ... or numbers as targets; `client` is the owner of each
    sample, if known.

    Images stay bytes, uint8 [n, channels, height, width], a quarter of the memory of floats. They come with the mean
    and the standard deviation of each channel over the training part, and the model gets (x - mean) / std. A table,
    float32 [n, columns], has those of each column. Other data is float32, ready for use, without `mean` and `std`. For
    regression y is float32 and there are 0 `classes`. The arrays may be read-only views of files.

    Args:
        x: the samples for training.
        y: their classes or numbers.
        x_test: the samples for testing.
        y_test: their classes or numbers.
        classes: how many classes; 0 for regression.
        client: the owner of each training sample, if known.
        client_test: the owner of each test sample, if known.
        mean: of each channel or column over the training part.
        std: the standard deviation, likewise.
        names: of the classes.
        columns: of a table.
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
    columns: tuple[tuple[str, tuple[str, ...] | None], ...] | None = None  # of a table (`tables.Columns`)

    def validation(self) -> Dataset:
        """The training part only, with a fifth of it as the test set; if the data names owners, a fifth of each
        owner's samples, so that every owner stays."""
        return self.divide(self.x, self.y, self.client, draw=1, share=0.2)

    def resplit(self, share: float = 0.1) -> Dataset:
        """Both parts joined and divided again at random, within each owner if there are owners: for files whose test
        part differs in kind from their training part.

        Args:
            share: the part that becomes the test set.
        """
        x, y = np.concatenate([self.x, self.x_test]), np.concatenate([self.y, self.y_test])
        owned = self.client is not None and self.client_test is not None
        return self.divide(x, y, np.concatenate([self.client, self.client_test]) if owned else None, 2, share)

    def divide(self, x: Array, y: Array, client: Array | None, draw: int, share: float) -> Dataset:
        """The data set with other samples.

        Args:
            x: the samples.
            y: their targets.
            client: their owners, if known.
            draw: the number of the random division.
            share: the part that becomes the test set.
        """
        train, test = random_split(len(y), draw, share, client)
        owner, owner_test = (None, None) if client is None else (client[train], client[test])
        kept = x[train]
        mean, std = (None, None) if self.mean is None else moments(kept)
        return self._replace(
            x=kept, y=y[train], x_test=x[test], y_test=y[test], client=owner, client_test=owner_test, mean=mean, std=std
        )

    def by_quantiles(self, parts: int = 5) -> Dataset:
        """For pictures and counts of a regression: as classes, the ranges between the quantiles of the targets.

        Args:
            parts: how many ranges.
        """
        edges = np.unique(np.quantile(self.y, np.linspace(0, 1, parts + 1)))
        names = tuple(f"{low:.4g} to {high:.4g}" for low, high in itertools.pairwise(edges)) or ("all",)
        y, y_test = (np.digitize(part, edges[1:-1]) for part in (self.y, self.y_test))
        return self._replace(y=y, y_test=y_test, classes=len(names), names=names)

    def shift(self) -> float:
        """The distance between the classes of the test part and of the training part: 0 (alike) to 1 (disjoint)."""
        if self.y.dtype.kind == "f":  # regression: there are no classes
            return 0.0
        shares = [np.bincount(y.ravel(), minlength=self.classes) / y.size for y in (self.y, self.y_test)]
        return float(np.abs(shares[0] - shares[1]).sum() / 2)


@datasets.register("digits")
def digits() -> Dataset:
    """1797 hand-written digits of 8x8 pixels in [0, 1], a fifth of them for testing (from UCI)."""
    x, y = embedded("digits")
    return with_test_part((x[:, None] / 16).astype(np.float32), y, classes=10)


@datasets.register("breast-cancer")
def breast_cancer() -> Dataset:
    """569 breast tumours (Wisconsin), 30 features, malignant or benign, a fifth for testing (from UCI).

    The features are standardised with the training part's mean and deviation.
    """
    data = with_test_part(*embedded("breast_cancer"), classes=2)
    mean, deviation = data.x.mean(axis=0), data.x.std(axis=0)
    x, x_test = (((part - mean) / deviation).astype(np.float32) for part in (data.x, data.x_test))
    return data._replace(x=x, x_test=x_test)


def embedded(name: str) -> tuple[Array, Array]:
    """The samples and classes of a data set in the folder `embedded`."""
    with np.load(Path(__file__).parent / "embedded" / f"{name}.npz") as file:
        return file["x"], file["y"].astype(np.int64)


def with_test_part(
    x: Array, y: Array, classes: int, client: Array | None = None, names: tuple[str, ...] | None = None
) -> Dataset:
    """A data set from samples without a test part: a fifth of them becomes one."""
    train, test = random_split(len(y), draw=0)
    y = y if y.dtype.kind == "f" else y.astype(np.int64)
    data = Dataset(x[train], y[train], x[test], y[test], classes, names=names)
    return data if client is None else data._replace(client=client[train], client_test=client[test])


def moments(x: Array, rows: Array | None = None) -> tuple[Array, Array]:
    """Mean and standard deviation, float32 [channels], of each channel of uint8 images, or of some rows of them.

    Computed from counts of the 256 values: exact for any size, and without a copy as floats.

    >>> moments(np.array([[[[0, 4]]]], np.uint8))
    (array([2.], dtype=float32), array([2.], dtype=float32))
    """
    if x.dtype != np.uint8:  # a table: each column
        part = np.asarray(x if rows is None else x[rows], dtype=np.float64)
        std = part.std(axis=0)
        return part.mean(axis=0).astype(np.float32), np.where(std > 0, std, 1.0).astype(np.float32)
    counts = np.zeros((x.shape[1], 256), dtype=np.int64)
    for begin in range(0, len(x) if rows is None else len(rows), 1024):
        chunk = x[begin : begin + 1024] if rows is None else x[rows[begin : begin + 1024]]
        for c, count in enumerate(counts):
            count += np.bincount(chunk[:, c].ravel(), minlength=256)
    values = np.arange(256, dtype=np.float64)
    total = counts.sum(axis=1)
    mean = counts @ values / total
    variance = (counts * (values - mean[:, None]) ** 2).sum(axis=1) / total
    # A constant channel becomes zero: it is not divided by a deviation of zero.
    std = np.sqrt(np.where(variance > 0, variance, 1.0))
    return mean.astype(np.float32), std.astype(np.float32)
