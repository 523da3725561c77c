"""Data of a figure made small enough for a CPU: some samples of its own, with smaller images."""

from __future__ import annotations

import numpy as np

from fedda import rng
from fedda.data import Dataset

SIDE = 8  # pixels of an image's side at least
SAMPLES, TESTED, WRITERS = 2000, 1000, 50

Array = np.ndarray


def shrunk(data: Dataset, by_owner: bool) -> Dataset:
    """Some samples, of some owners where there are owners, with smaller images.

    >>> from fedda.data import open_dataset
    >>> full = open_dataset("digits")
    >>> shrunk(full, False).x.shape
    (1438, 1, 8, 8)
    """
    if by_owner and data.client is not None and data.client_test is not None:
        owners = np.unique(data.client)
        some = owners[np.linspace(0, len(owners) - 1, WRITERS).round().astype(int)]
        train, test = np.flatnonzero(np.isin(data.client, some)), np.flatnonzero(np.isin(data.client_test, some))
    else:
        train, test = _some(len(data.y), SAMPLES), _some(len(data.y_test), TESTED)
    client = None if data.client is None or not by_owner else np.asarray(data.client)[train]
    tested = None if data.client_test is None or not by_owner else np.asarray(data.client_test)[test]
    return data._replace(
        x=pooled(data.x[train]), y=data.y[train], x_test=pooled(data.x_test[test]), y_test=data.y_test[test],
        client=client, client_test=tested,
    )  # fmt: skip


def _some(n: int, most: int) -> Array:
    return np.sort(rng.permutation(rng.key(0, rng.SPLIT), n).numpy()[:most])


def pooled(x: Array) -> Array:
    """Images averaged over squares, at least 8 x 8 of them unless they were smaller.

    >>> pooled(np.full((1, 1, 32, 32), 7, np.uint8)).shape
    (1, 1, 8, 8)
    """
    k = max(1, x.shape[-1] // SIDE)
    if k == 1 or x.ndim != 4:
        return x
    h, w = (n // k for n in x.shape[2:])
    means = x[:, :, : h * k, : w * k].reshape(*x.shape[:2], h, k, w, k).mean(axis=(3, 5))
    return np.asarray(means.round()).astype(x.dtype) if x.dtype == np.uint8 else means.astype(x.dtype)
