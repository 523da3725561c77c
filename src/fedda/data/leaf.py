"""LEAF's JSON files under any path: texts such as its Shakespeare, and FEMNIST's images."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import femnist
from .datasets import Dataset
from .files import BadFile, reading
from .holdout import random_split

Array = np.ndarray


def leaf_files(path: Path) -> tuple[list[Path], list[Path]] | None:
    """The training and the test files of a .json file, or of a folder with `train` and `test`, `all_data`, or JSON
    files themselves; None if there are none."""
    if path.is_file():
        return ([path], []) if path.suffix == ".json" else None
    data = path / "data" if (path / "data").is_dir() else path
    if any((data / "train").glob("*.json")):
        return sorted((data / "train").glob("*.json")), sorted((data / "test").glob("*.json"))
    files = sorted((data / "all_data").glob("*.json")) or sorted(data.glob("*.json"))
    return (files, []) if files else None


def read_leaf(path: Path) -> Dataset:
    """The data set of LEAF's files. Without test files, a fifth of each user's samples is held out.

    A text x and the character y after it become a sequence whose target at each position is the next character.
    """
    files = leaf_files(path)
    assert files is not None
    train, test = files
    samples = [sample for file in train for sample in users_of(file)]
    if samples and not isinstance(samples[0][1], str):
        if not test:
            raise BadFile(path, "images need test files as well: make them with LEAF's -t sample")
        return femnist.read_femnist(train, test)
    tested = [sample for file in test for sample in users_of(file)]
    if not samples:
        raise BadFile(path, "holds no sample")
    alphabet = sorted({letter for _, x, y in samples + tested for letter in x + y})
    number = {letter: i for i, letter in enumerate(alphabet)}
    length = len(samples[0][1])
    for user, x, y in samples + tested:
        if len(x) != length or len(y) != 1:
            raise BadFile(path, f"{user}: samples must be {length} characters and the next one, got {len(x)}, {len(y)}")

    def arrays(part: Sequence[tuple[str, str, str]]) -> tuple[Array, Array, Array]:
        tokens = np.array([[number[letter] for letter in x + y] for _, x, y in part], dtype=np.int64)
        return tokens[:, :-1], tokens[:, 1:], np.array([user for user, _, _ in part])

    x, y, client = arrays(samples)
    if tested:
        x_test, y_test, client_test = arrays(tested)
        return Dataset(x, y, x_test, y_test, len(alphabet), client, client_test, names=tuple(alphabet))
    train_rows, test_rows = random_split(len(y), draw=0, owner=client)
    if not len(test_rows):
        raise BadFile(path, "its users have too few samples to hold some out for testing: five or more are needed")
    return Dataset(
        x[train_rows], y[train_rows], x[test_rows], y[test_rows], len(alphabet), client[train_rows], client[test_rows],
        names=tuple(alphabet),
    )  # fmt: skip


def users_of(path: Path) -> list[tuple[str, Any, Any]]:
    """The samples of one file: user, x, y."""
    with reading(path, "LEAF JSON file"):
        content = json.loads(path.read_bytes().decode("utf-8"))
        pairs = [(str(user), content["user_data"][user]) for user in content["users"]]
        for user, own in pairs:
            if len(own["x"]) != len(own["y"]):
                raise BadFile(path, f"{user} has {len(own['x'])} samples and {len(own['y'])} targets")
        return [(user, x, y) for user, own in pairs for x, y in zip(own["x"], own["y"], strict=True)]
