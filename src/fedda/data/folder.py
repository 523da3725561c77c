"""Images in a folder per class: FOLDER/CLASS/*.png, or FOLDER/train/CLASS and FOLDER/test/CLASS."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .arrays import assemble
from .datasets import Dataset
from .files import BadFile, reading

Array = np.ndarray
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # Pillow would run Ghostscript on a PostScript file


def read_folder(folder: Path) -> Dataset:
    """A data set from a folder of images; without a `test` folder, a fifth is held out."""
    train, test = parts(folder)
    classes = tuple(sorted(train))
    if len(classes) < 2:
        raise BadFile(folder, f"must hold a folder of images for each class, two or more, got {len(classes)}")
    if unknown := sorted(set(test) - set(classes)):
        raise BadFile(folder / "test" / unknown[0], "is a class that train does not have")
    paths = [[path for name in sorted(part) for path in part[name]] for part in (train, test)]
    size = first_size(paths[0][0])
    x, x_test = (stack(part, size, paths[0][0]) for part in paths)
    y, y_test = (
        np.repeat([classes.index(n) for n in sorted(p)], [len(p[n]) for n in sorted(p)]) for p in (train, test)
    )
    if test and x.shape[1] != x_test.shape[1]:  # grey images in one part, colours in the other
        x, x_test = (np.repeat(part, 3, axis=1) if part.shape[1] == 1 else part for part in (x, x_test))
    return assemble(folder, x, y, x_test if test else None, y_test if test else None, names=classes)


def parts(folder: Path) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    """The files of each class, for training and for testing."""
    try:
        split = (folder / "train").is_dir() and any(p.is_dir() for p in (folder / "train").iterdir())
        train = by_class(folder / "train" if split else folder)
        return train, by_class(folder / "test") if split and (folder / "test").is_dir() else {}
    except OSError as why:
        raise BadFile(why.filename or folder, f"cannot be read: {why.strerror}") from None


def by_class(folder: Path) -> dict[str, list[Path]]:
    paths = {}
    for part in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")):
        images = sorted(p for p in part.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
        if not images:
            raise BadFile(part, f"must hold images ({', '.join(SUFFIXES)}), it has none")
        paths[part.name] = images
    return paths


def files_of(folder: Path) -> list[Path]:
    """All images: the cache checks them for changes."""
    return [path for part in parts(folder) for images in part.values() for path in images]


def first_size(path: Path) -> tuple[int, int]:
    from PIL import Image

    with reading(path, "image"), Image.open(path, formats=FORMATS) as image:
        return image.size


def stack(paths: Sequence[Path], size: tuple[int, int], first: Path) -> Array:
    """All images as uint8 [n, 1 or 3, height, width]: one channel if all images are grey."""
    read = [pixels(path, size, first) for path in paths]
    colour = any(image.ndim == 3 for image in read)
    read = [np.repeat(i[:, :, None], 3, axis=2) if colour and i.ndim == 2 else i for i in read]
    x = np.stack(read) if read else np.empty((0, 1, *size[::-1]), np.uint8)
    return x.transpose(0, 3, 1, 2) if colour else x.reshape(len(x), 1, *size[::-1])


def pixels(path: Path, size: tuple[int, int], first: Path) -> Array:
    from PIL import Image

    with reading(path, "image"), Image.open(path, formats=FORMATS) as image:
        if image.size != size:
            have, want = (f"{width}x{height}" for width, height in (image.size, size))
            raise BadFile(path, f"is {have} pixels, but {first} is {want}: all images must have one size")
        if image.mode[0] in "IF":
            raise BadFile(path, f"must have 8 bits per pixel and channel, got Pillow's mode {image.mode}")
        return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
