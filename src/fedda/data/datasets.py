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
        """The training part alone, a fifth of it in the place of the test set."""
        train, test = held_out(len(self.y), draw=1)
        return self._replace(
            x=self.x[train],
            y=self.y[train],
            x_test=self.x[test],
            y_test=self.y[test],
            client=None if self.client is None else self.client[train],
            client_test=None if self.client is None else self.client[test],
        )


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
