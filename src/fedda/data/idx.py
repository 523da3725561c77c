"""MNIST's format, idx: a big-endian header with the shape, then the bytes; plain or gzipped."""

import gzip
import math
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .arrays import assemble
from .datasets import Dataset
from .files import BadFile, reading

Array = np.ndarray
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
UINT8 = 0x08


PARTS = (("train*images*idx3*", "train*labels*idx1*"), ("t*images*idx3*", "t*labels*idx1*"))  # test or t10k


def idx_files(folder: Path) -> list[list[Path]]:
    """The idx files in a folder: images and labels for training, then those for testing, if there are any. Names may
    have a prefix, as in EMNIST."""
    pairs = []
    for number, patterns in enumerate(PARTS):
        matches = [
            sorted(p for p in folder.glob(f"*{pattern}") if number == 0 or "train" not in p.name)
            for pattern in patterns
        ]
        if all(matches):
            pairs.append([paths[0] for paths in matches])
    return pairs


def read_idx(folder: Path) -> Dataset:
    """A data set from the idx files in a folder; without test files, a fifth is held out."""
    (x, y), *test = [(idx(images, 3), idx(labels, 1)) for images, labels in idx_files(folder)]
    return assemble(folder, x, y, *test[0]) if test else assemble(folder, x, y)


def read_mnist(paths: Sequence[Path]) -> Dataset:
    """MNIST from its four files: images and labels for training, images and labels for testing."""
    x, y, x_test, y_test = (idx(path, dims) for path, dims in zip(paths, (3, 1, 3, 1), strict=True))
    for images, labels, path in ((x, y, paths[1]), (x_test, y_test, paths[3])):
        if len(labels) != len(images):
            raise BadFile(path, f"must hold a label for each of {len(images)} images, got {len(labels)}")
        if labels.max(initial=0) > 9:
            raise BadFile(path, f"labels must be from 0 to 9, got {labels.max()}")
    return assemble(paths[0], x, y, x_test, y_test, names=[str(digit) for digit in range(10)])


def idx(path: Path, dims: int) -> Array:
    """The array of one file, uint8 with `dims` axes."""
    with reading(path, "idx file"), (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        head = file.read(4 + 4 * dims)
        if head[:4] != bytes([0, 0, UINT8, dims]):
            raise BadFile(
                path, f"must be an idx file of bytes with {dims} axes, it begins with {head[:4].hex(' ') or '-'}"
            )
        shape = struct.unpack(f">{dims}I", head[4:])
        # One byte more than the header says, to detect a file that is too long.
        raw = file.read(math.prod(shape) + 1)
        if len(raw) != math.prod(shape):
            got = "more" if len(raw) > math.prod(shape) else str(len(raw))
            raise BadFile(path, f"must hold {' x '.join(map(str, shape))} bytes, got {got}")
        if not raw:
            raise BadFile(path, "holds nothing")
        return np.frombuffer(raw, np.uint8).reshape(shape)
