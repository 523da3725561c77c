"""Data sets in .npz files: with the arrays `x`, `y`, ... or with those of MedMNIST (`train_images`, ...)."""

import math
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from .arrays import assemble
from .datasets import Dataset
from .files import BadFile, reading

Array = np.ndarray
PLAIN = ("x", "y", "x_test", "y_test", "client", "client_test")
MEDMNIST = ("train_images", "train_labels", "test_images", "test_labels")


def read_npz(path: Path, names: Sequence[str] | None = None) -> Dataset:
    """A data set from a .npz file in either layout."""
    with reading(path, ".npz file"):
        content = read_arrays(path, (*PLAIN, *MEDMNIST))
        medmnist = "train_images" in content
        for need in MEDMNIST if medmnist else ("x", "y"):
            if need not in content:
                have = ", ".join(content) or "none of them"
                raise BadFile(path, f"must hold the arrays x and y, or {', '.join(MEDMNIST)}; it has {have}")
        if (
            medmnist
        ):  # its validation part is unused: as for all data sets, validation samples come from the training part
            for part in ("train_images", "test_images"):
                if content[part].dtype != np.uint8:
                    raise BadFile(path, f"{part} must be uint8 images, got {content[part].dtype}")
            parts = [content[part] for part in MEDMNIST]
            return assemble(path, parts[0], parts[1], parts[2], parts[3], names=names, called=MEDMNIST)
        x_test, y_test, client, client_test = (content.get(name) for name in PLAIN[2:])
        return assemble(path, content["x"], content["y"], x_test, y_test, client, client_test, names)


def npz_reader(names: Sequence[str]) -> Callable[[list[list[Path]]], Dataset]:
    """A reader for a data set in one .npz file, with these names of the classes."""
    return lambda paths: read_npz(paths[0][0], names)


def read_arrays(path: Path, wanted: Sequence[str]) -> dict[str, Array]:
    """Those of the wanted arrays that the file has; pickled objects are never read."""
    with zipfile.ZipFile(path) as file:
        members = {member.filename: member for member in file.infolist()}
        return {name: read_array(path, file, members[f"{name}.npy"]) for name in wanted if f"{name}.npy" in members}


def read_array(path: Path, file: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """One array. If its header and its size disagree, it is refused before memory is allocated."""
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
        array: Array = np.lib.format.read_array(stream, allow_pickle=False)
    return array
