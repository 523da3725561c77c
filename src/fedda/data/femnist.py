"""FEMNIST in the JSON files of LEAF: `femnist/data/{train,test}/*.json`."""

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .arrays import assemble
from .datasets import Dataset
from .files import BadFile, reading

Array = np.ndarray
NAMES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)


def read_femnist(train: Sequence[Path], test: Sequence[Path]) -> Dataset:
    """FEMNIST from LEAF's files; `client` is the writer's id."""
    x, y, client = read_files(train)
    x_test, y_test, client_test = read_files(test)
    return assemble(train[0].parent, x, y, x_test, y_test, client, client_test, names=NAMES)


def read_files(paths: Sequence[Path]) -> list[Array]:
    parts = [read_file(path) for path in paths]
    return [np.concatenate([part[i] for part in parts]) for i in range(3)]


def read_file(path: Path) -> tuple[Array, Array, Array]:
    """Images [n, 28, 28], labels and writers of one file, in the file's order."""
    with reading(path, "LEAF JSON file"):
        content = json.loads(path.read_bytes().decode("utf-8"), parse_constant=refuse_constant)
        users, counts, data = (content[key] for key in ("users", "num_samples", "user_data"))
        if len(users) != len(data) or len(users) != len(counts):
            raise BadFile(path, f"names {len(users)} users, {len(counts)} counts and the data of {len(data)}")
        parts = [read_writer(path, user, count, data[user]) for user, count in zip(users, counts, strict=True)]
        parts = [part for part in parts if len(part[1])]
        if not parts:
            raise BadFile(path, "holds no image")
        names = np.repeat(np.array([str(u) for u in users if data[u]["y"]]), [len(y) for _, y in parts])
        return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]), names


def read_writer(path: Path, user: str, count: Any, samples: dict[str, Any]) -> tuple[Array, Array]:
    x, y = samples["x"], samples["y"]
    if len(x) != len(y) or len(y) != count:
        raise BadFile(path, f"{user} has {len(x)} images, {len(y)} labels and the count {count}")
    if not all(type(label) is int and 0 <= label < len(NAMES) for label in y):
        raise BadFile(path, f"{user}: labels must be whole numbers from 0 to {len(NAMES) - 1}")
    pixels = np.array(x, dtype=np.float64).reshape(len(x), -1) if x else np.empty((0, 784))
    if pixels.shape[1] != 784:
        raise BadFile(path, f"{user}: images must have 784 pixels, got {pixels.shape[1]}")
    # LEAF divided bytes by 255 and rounded: the nearest byte is the original one.
    values = np.rint(pixels * 255)
    if not (np.abs(pixels * 255 - values) < 0.05).all() or values.min(initial=0) < 0 or values.max(initial=0) > 255:
        raise BadFile(path, f"{user}: pixels must be whole 255ths from 0 to 1")
    return values.astype(np.uint8).reshape(-1, 28, 28), np.array(y, dtype=np.int64)


def refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a pixel")
