"""One way to open a data set: by its name, or by the path of a .npz file or of a folder of images."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..registry import datasets
from .cache import cached
from .datasets import Dataset
from .files import BadFile
from .folder import files_of, read_folder
from .npz import read_npz
from .ondisk import ON_DISK

SMALL = 1 << 20  # bytes; what is smaller is read as quickly as it is looked up, and leaves nothing behind


def open_dataset(name: str, fresh: bool = False) -> Dataset:
    """A data set by its name (`fedda data list`), from a .npz file or from a folder of images by class.

    With `fresh`, the files are read from end to end, whatever the cache holds.

    >>> open_dataset("digits").x.shape
    (1438, 1, 8, 8)
    >>> open_dataset("cifar")
    Traceback (most recent call last):
    ValueError: unknown data set 'cifar'; did you mean 'cifar10'? (or give a .npz file or a folder)
    """
    return known(name, fresh)()


def known(name: str, fresh: bool = False) -> Callable[[], Dataset]:
    """What opens the data set of this name; an unknown name is refused, nothing is read.

    >>> known("digits")().classes
    10
    """
    name = os.fspath(name)
    try:
        entry = datasets.find(name)
    except ValueError as why:
        if os.path.exists(name) or "/" in name or os.sep in name or name.endswith(".npz"):
            return lambda: open_path(Path(name).expanduser(), fresh)
        raise ValueError(f"{why} (or give a .npz file or a folder)") from None
    return ON_DISK[name].parse if fresh and name in ON_DISK else entry


def open_path(path: Path, fresh: bool = False) -> Dataset:
    """A data set from a .npz file or from a folder of images by class."""
    if not os.path.exists(path):
        raise BadFile(path, "there is no such file or folder")
    if not path.is_dir() and path.suffix != ".npz":
        raise BadFile(path, "must be a .npz file, or a folder of images with a folder for each class")
    files, read = (files_of(path), read_folder) if path.is_dir() else ([path], read_npz)
    if fresh or sum(file.stat().st_size for file in files) < SMALL:
        return read(path)
    return cached(path.resolve().stem, files, lambda: read(path))
