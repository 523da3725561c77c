"""From raw arrays to a `Dataset`, with checks of layouts, labels and lengths; errors name the file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..checks import warn
from .datasets import Dataset, moments, with_test_part
from .files import BadFile

Array = np.ndarray
MOST_RATINGS = 100  # up to so many whole numbers of type float may be meant as classes
MOST_CLASSES = 1 << 16  # a larger label is an identifier or an overflow; its model would fill the memory


def assemble(
    where: Path, x: Array, y: Array, x_test: Array | None = None, y_test: Array | None = None,
    client: Array | None = None, client_test: Array | None = None, names: Sequence[str] | None = None,
    called: Sequence[str] = ("x", "y", "x_test", "y_test"),
) -> Dataset:  # fmt: skip
    """The data set of these arrays; without a test part, a fifth is held out.

    `names` are the names of the classes, if known; `called` are the names of the arrays in the file.

    >>> data = assemble(Path("a"), np.zeros((10, 4, 4), np.uint8), np.arange(10) % 2)
    >>> data.x.shape, data.x_test.shape, data.classes
    ((8, 1, 4, 4), (2, 1, 4, 4), 2)
    """
    if (x_test is None) != (y_test is None):
        raise BadFile(where, "x_test and y_test must come together")
    x = samples(where, called[0], x)
    y = one_per_sample(where, called[1], y, len(x))
    if x_test is not None and y_test is not None:
        x_test = samples(where, called[2], x_test)
        y_test = one_per_sample(where, called[3], y_test, len(x_test))
        if x_test.shape[1:] != x.shape[1:] or x_test.dtype != x.dtype:
            shapes = [f"{list(part.shape[1:])} of {part.dtype}" for part in (x, x_test)]
            raise BadFile(where, f"{called[0]} and {called[2]} must be alike, got {shapes[0]} and {shapes[1]}")
    elif len(x) < 3:
        raise BadFile(where, f"x must hold at least 3 samples to hold some out for testing, got {len(x)}")
    if names is None and y.dtype.kind == "f":
        y, y_test, classes, labels = *regression_targets(where, y, y_test, called[1::2]), 0, None
    else:
        known = None if names is None else len(names)
        y, y_test, classes, labels = class_numbers(where, y, y_test, known, called[1::2])
    names = tuple(names) if names is not None else labels
    client = None if client is None else owners(where, "client", client, len(x))
    if client_test is not None:
        if x_test is None:
            raise BadFile(where, "client_test needs x_test")
        client_test = owners(where, "client_test", client_test, len(x_test))
    if x_test is None or y_test is None:
        data = with_test_part(x, y, classes, client, names)
    else:
        data = Dataset(x, y, x_test, y_test, classes, client, client_test, names=names)
    if data.x.dtype == np.uint8 or data.x.ndim == 2:  # images of bytes, and tables
        mean, std = moments(data.x)
        data = data._replace(mean=mean, std=std)
    return data


def samples(where: Path, name: str, x: Array) -> Array:
    """Images as uint8 [n, channels, height, width], anything else as float32 [n, ...]."""
    if x.dtype.kind not in "buif":
        raise BadFile(where, f"{name} must be numbers, got {x.dtype}")
    if x.ndim < 2 or 0 in x.shape:
        raise BadFile(where, f"{name} must be [samples, ...] and not empty, got shape {list(x.shape)}")
    if x.dtype == np.uint8 and x.ndim > 2:
        return images(where, name, x)
    with np.errstate(over="ignore"):  # values too large for float32 become infinite and are refused below
        x = x.astype(np.float32)
    if not np.isfinite(x).all():
        raise BadFile(where, f"{name} must be finite numbers, sample {np.argwhere(~np.isfinite(x))[0][0]} is not")
    return x


def images(where: Path, name: str, x: Array) -> Array:
    if x.ndim == 3:
        return np.ascontiguousarray(x[:, None])
    if x.ndim == 4 and x.shape[3] in (1, 3):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    if x.ndim == 4 and x.shape[1] in (1, 3):
        return np.ascontiguousarray(x)
    layouts = "[n, height, width], [n, height, width, 1 or 3] or [n, 1 or 3, height, width]"
    raise BadFile(where, f"{name}: images must be {layouts}, got shape {list(x.shape)}")


def one_per_sample(where: Path, name: str, y: Array, n: int) -> Array:
    """One value per sample, [n], from [n] or [n, 1]."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise BadFile(where, f"{name} must hold one value per sample, got shape {list(y.shape)}")
    if len(y) != n:
        raise BadFile(where, f"{name} must be as long as its samples, {n}, got {len(y)}")
    return y


def regression_targets(
    where: Path, y: Array, y_test: Array | None, called: Sequence[str]
) -> tuple[Array, Array | None]:
    """Numbers with a decimal point, as float32."""
    parts = [y] if y_test is None else [y, y_test]
    for name, part in zip(called, parts, strict=False):
        if part.dtype.kind != "f" or not np.isfinite(part).all():
            raise BadFile(where, f"{name} must be finite numbers, as the targets of a regression are")
    values = np.unique(y)
    if np.array_equal(values, values.round()) and len(values) <= MOST_RATINGS:
        warn(
            f"{where}: {called[0]} has {len(values)} different values of type {y.dtype}: this is taken as regression; "
            "save whole numbers (int64) for classes"
        )
    return y.astype(np.float32), None if y_test is None else y_test.astype(np.float32)


def class_numbers(
    where: Path, y: Array, y_test: Array | None, labels: int | None, called: Sequence[str]
) -> tuple[Array, Array | None, int, tuple[str, ...] | None]:
    """Labels as class numbers, the number of classes and their names: texts are numbered in sorted order."""
    parts = [y] if y_test is None else [y, y_test]
    if all(part.dtype.kind in "US" for part in parts) and labels is None:
        parts = [part.astype(str) if part.dtype.kind == "U" else np.char.decode(part, "utf-8") for part in parts]
        names, number = np.unique(np.concatenate(parts), return_inverse=True)
        if len(names) < 2:
            raise BadFile(where, f"{called[0]} must have two classes or more, all samples have {str(names[0])!r}")
        new = np.split(number.astype(np.int64), [len(y)])
        return new[0], None if y_test is None else new[1], len(names), tuple(map(str, names))
    for name, part in zip(called, parts, strict=False):
        if part.dtype.kind not in "bui":
            raise BadFile(where, f"{name} must be whole numbers from 0 or texts, got {part.dtype}")
        low, high = int(part.min()), int(part.max())
        top = (labels or MOST_CLASSES) - 1
        if low < 0 or high > top:
            raise BadFile(where, f"{name} must hold classes from 0 to {top}, got {low if low < 0 else high}")
    new = [part.astype(np.int64) for part in parts]
    present = np.unique(np.concatenate(new))
    if len(present) < 2:
        raise BadFile(where, f"{called[0]} must have two classes or more, all samples have {present[0]}")
    if labels is None and len(present) <= present[-1]:
        absent = np.setdiff1d(np.arange(present[-1] + 1), present)
        some = ", ".join(map(str, absent[:5])) + (", ..." if len(absent) > 5 else "")
        warn(
            f"{where}: the classes {some} have no sample; the model gets {present[-1] + 1} classes, number them from 0 "
            "without gaps for fewer"
        )
    classes = labels or 1 + int(max(part.max() for part in new))
    return new[0], None if y_test is None else new[1], classes, None


def owners(where: Path, name: str, client: Array, n: int) -> Array:
    client = one_per_sample(where, name, client, n)
    if client.dtype.kind not in "uiUS":
        raise BadFile(where, f"{name} must be whole numbers or texts, got {client.dtype}")
    return client.astype(np.int64) if client.dtype.kind in "ui" else client
