"""Images in a folder per class: FOLDER/CLASS/*.png, or FOLDER/train/CLASS and FOLDER/test/CLASS. There may be a folder
per client around the classes, FOLDER/CLIENT/CLASS/*.png."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..extras import needed_for
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
    x, x_test = (stack(part, paths[0][0]) for part in paths)
    y, y_test = (
        np.repeat([classes.index(n) for n in sorted(p)], [len(p[n]) for n in sorted(p)]) for p in (train, test)
    )
    if test and x.shape[1] != x_test.shape[1]:  # grey images in one part, colours in the other
        x, x_test = (np.repeat(part, 3, axis=1) if part.shape[1] == 1 else part for part in (x, x_test))
    client, client_test = (
        np.array([path.parent.parent.name for path in part]) if part and nested(folder) else None for part in paths
    )
    if not test:
        return assemble(folder, x, y, client=client, names=classes)
    return assemble(folder, x, y, x_test, y_test, client, client_test, classes)


def parts(folder: Path) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    """The files of each class, for training and for testing."""
    try:
        split = (folder / "train").is_dir() and any(p.is_dir() for p in (folder / "train").iterdir())
        clients = nested(folder)
        train = by_class(folder / "train" if split else folder, clients)
        return train, by_class(folder / "test", clients) if split and (folder / "test").is_dir() else {}
    except OSError as why:
        raise BadFile(why.filename or folder, f"cannot be read: {why.strerror}") from None


def nested(folder: Path) -> bool:
    """Whether the folders in a folder (or in its `train`) are clients: they hold folders and no image."""
    inner = (
        folder / "train"
        if (folder / "train").is_dir() and any(map(Path.is_dir, (folder / "train").iterdir()))
        else folder
    )
    return any(folders(part) and not images_in(part) for part in folders(inner)[:1])


def folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def images_in(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def by_class(folder: Path, clients: bool = False) -> dict[str, list[Path]]:
    """The images of each class; with `clients`, the classes are inside the clients."""
    paths: dict[str, list[Path]] = {}
    for part in [inner for client in folders(folder) for inner in folders(client)] if clients else folders(folder):
        images = images_in(part)
        if not images:
            raise BadFile(part, f"must hold images ({', '.join(SUFFIXES)}), it has none")
        paths.setdefault(part.name, []).extend(images)
    return paths


def files_of(folder: Path) -> list[Path]:
    """All images: the cache checks them for changes."""
    return [path for part in parts(folder) for images in part.values() for path in images]


def stack(paths: Sequence[Path], first: Path) -> Array:
    """All images as uint8 [n, 1 or 3, height, width]: one channel if all images are grey."""
    images, size = [read_image(path) for path in paths], read_image(first).shape[:2]
    for path, image in zip(paths, images, strict=True):
        if image.shape[:2] != size:
            have, want = (f"{width}x{height}" for height, width in (image.shape[:2], size))
            raise BadFile(path, f"is {have} pixels, but {first} is {want}: all images must have one size")
    if any(image.ndim == 3 for image in images):
        return np.stack([np.broadcast_to(i.reshape(*size, -1), (*size, 3)) for i in images]).transpose(0, 3, 1, 2)
    return np.array(images, np.uint8).reshape(-1, 1, *size)


def read_image(path: Path) -> Array:
    """uint8 [height, width], or [height, width, 3] in colour."""
    with needed_for("a folder of images"):
        from PIL import Image

    with reading(path, "image"), Image.open(path, formats=FORMATS) as image:
        if image.mode[0] in "IF":
            raise BadFile(path, f"must have 8 bits per pixel and channel, got Pillow's mode {image.mode}")
        return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
