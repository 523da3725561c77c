"""New samples for a trained model: from files of the kinds that it can be trained on, without targets."""

from pathlib import Path

import numpy as np

from .arrays import images
from .files import BadFile, reading
from .folder import SUFFIXES, read_image
from .npz import read_arrays
from .tables import TABLES, Columns, read_new_rows

Array = np.ndarray
ARRAYS = ("x", "test_images")  # of a .npz file: the first that it has


def read_new(path: Path, shape: tuple[int, ...], dtype: np.dtype, columns: Columns | None) -> tuple[Array, list[str]]:
    """Samples of this shape and dtype, and the names of their files if each has one. `columns` are those of the table
    that the model was trained on."""
    if not path.exists():
        raise BadFile(path, "there is no such file or folder")
    kind = ".csv or .parquet file" if columns is not None else ".npz file or a folder of images"
    if (path.suffix in TABLES) != (columns is not None) or not (path.is_dir() or path.suffix in (".npz", *TABLES)):
        raise BadFile(path, f"must be a {kind}, as the training data")
    names: list[str] = []
    if columns is not None:
        x = read_new_rows(path, columns)
    elif path.is_dir():
        x, names = read_new_images(path, shape)
    else:
        x = read_new_array(path, dtype)
    if x.shape[1:] != shape or len(x) == 0:
        raise BadFile(path, f"must hold samples of shape {list(shape)}, as the training data, got {list(x.shape[1:])}")
    if (dtype == np.uint8 != x.dtype) or (dtype.kind == "i" and x.dtype.kind not in "ui"):
        raise BadFile(path, f"must hold {dtype} numbers, as the training data, got {x.dtype}")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise BadFile(path, f"must hold finite numbers, sample {np.argwhere(~np.isfinite(x))[0][0]} does not")
    return x.astype(dtype), names


def read_new_array(path: Path, dtype: np.dtype) -> Array:
    with reading(path, ".npz file"):
        content = read_arrays(path, ARRAYS)
        x = next((content[name] for name in ARRAYS if name in content), None)
        if x is None or x.ndim < 2 or x.dtype.kind not in "buif":
            raise BadFile(path, "must hold an array of numbers x, [samples, ...]")
        return images(path, "x", x) if x.dtype == dtype == np.uint8 and x.ndim > 2 else x


def read_new_images(folder: Path, shape: tuple[int, ...]) -> tuple[Array, list[str]]:
    """All images in a folder and in the folders below it, in the order of their names."""
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES and path.is_file()]
    if not paths:
        raise BadFile(folder, f"must hold images ({', '.join(SUFFIXES)}), it has none")
    images = []
    for path in paths:
        image = read_image(path)
        image = image[None] if image.ndim == 2 else image.transpose(2, 0, 1)
        if len(shape) == 3 and len(image) == 1:  # a grey image among coloured ones
            image = np.repeat(image, shape[0], axis=0)
        if image.shape != shape:
            raise BadFile(path, f"must be an image of shape {list(shape)}, got {list(image.shape)}")
        images.append(image)
    return np.stack(images), [str(path.relative_to(folder)) for path in paths]
