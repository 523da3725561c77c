"""Arrays of a .npz file: the layout of one's own (`x`, `y`, ...) and that of MedMNIST (`train_images`, ...)."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from .arrays import assemble
from .datasets import Dataset
from .files import BadFile, reading

Array = np.ndarray
OWN = ("x", "y", "x_test", "y_test", "client", "client_test")
MEDMNIST = ("train_images", "train_labels", "test_images", "test_labels")


def read_npz(path: Path, names: Sequence[str] | None = None) -> Dataset:
    """A data set from a .npz file in either layout."""
    with reading(path, ".npz file"):
        found = arrays(path, (*OWN, *MEDMNIST))
        medmnist = "train_images" in found
        for need in MEDMNIST if medmnist else ("x", "y"):
            if need not in found:
                have = ", ".join(found) or "none of them"
                raise BadFile(path, f"must hold the arrays x and y, or {', '.join(MEDMNIST)}; it has {have}")
        if medmnist:  # its validation part is left alone: sweeps hold out samples of the training part, as everywhere
            for part in ("train_images", "test_images"):
                if found[part].dtype != np.uint8:
                    raise BadFile(path, f"{part} must be uint8 images, got {found[part].dtype}")
            parts = [found[part] for part in MEDMNIST]
            return assemble(path, parts[0], parts[1], parts[2], parts[3], names=names, called=MEDMNIST)
        x_test, y_test, client, client_test = (found.get(name) for name in OWN[2:])
        return assemble(path, found["x"], found["y"], x_test, y_test, client, client_test, names)


def named(names: Sequence[str]) -> Callable[[list[list[Path]]], Dataset]:
    """A reader for a set that is one .npz file with classes of these names."""
    return lambda found: read_npz(found[0][0], names)


def arrays(path: Path, wanted: Sequence[str]) -> dict[str, Array]:
    """The wanted arrays that the file has; pickled objects are never read."""
    with zipfile.ZipFile(path) as file:
        members = {member.filename: member for member in file.infolist()}
        return {name: array(path, file, members[f"{name}.npy"]) for name in wanted if f"{name}.npy" in members}


def array(path: Path, file: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """One array; one whose header promises more than it holds is refused before memory is reserved for it."""
    name = member.filename.removesuffix(".npy")
    with file.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, _, dtype = read(stream)
        if dtype.hasobject:
            raise BadFile(path, f"{name} must be numbers or texts, got objects (pickled objects are never read)")
        wants, holds = math.prod(shape) * dtype.itemsize, member.file_size - stream.tell()
    if wants != holds:
        raise BadFile(path, f"{name} must hold {wants} bytes, got {holds}")
    with file.open(member) as stream:
        found: Array = np.lib.format.read_array(stream, allow_pickle=False)
    return found
