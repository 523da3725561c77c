"""Data sets from files: by name from the data folder, or by the path of a file or a folder."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..registry import Entry, datasets
from .cache import cached
from .datasets import Dataset
from .files import BadFile, data_folder
from .folder import files_of, read_folder
from .idx import idx_files, read_idx
from .leaf import leaf_files, read_leaf
from .npz import read_npz
from .tables import GAPS, TABLES, TASKS, Ignored, read_table

FOR_TABLES = "target, client, ignore, missing and task"
SMALL = 1 << 20  # bytes: smaller files are as fast to read as their cache


@dataclass(frozen=True)
class Download:
    """An official download. If it is an archive, `members` are the files to extract."""

    url: str
    md5: str
    file: str  # below the data folder
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileDataset:
    """A named data set in files of the data folder; a call opens it.

    Each of `files` is a tuple of patterns, of which the first that matches is taken.
    """

    name: str
    summary: str
    files: tuple[tuple[str, ...], ...]
    read: Callable[[list[list[Path]]], Dataset]  # from the paths that each of `files` matches
    train: int  # samples; 0 if unknown
    test: int
    classes: int
    clients: str = ""  # who owns the samples, if the data says so
    downloads: tuple[Download, ...] = ()
    how: str = ""  # how to get the files if there is no download

    def paths(self) -> list[list[Path]]:
        """The paths that each of `files` matches; empty for absent files."""
        folder = data_folder()
        return [next(filter(None, (sorted(folder.glob(pattern)) for pattern in group)), []) for group in self.files]

    def __call__(self) -> Dataset:
        return cached(self.name, [path for group in self.present_paths() for path in group], self.parse)

    def parse(self) -> Dataset:
        """Read the files and not the cache."""
        return self.read(self.present_paths())

    def present_paths(self) -> list[list[Path]]:
        """The same as `paths`; absent files are an error."""
        paths = self.paths()
        if not all(paths):
            raise ValueError(self.describe_absent(paths))
        return paths

    def describe_absent(self, paths: list[list[Path]]) -> str:
        missing = [group[0] for group, there in zip(self.files, paths, strict=True) if not there]
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        how = f"fetch it with: fedda data fetch {self.name}" if self.downloads else self.how
        absent = f"{self.name}: {data_folder() / missing[0]}{more} is absent"
        return f"{absent}; {how} (set FEDDA_DATA to use another folder)"


FILE_DATASETS: dict[str, FileDataset] = {}


def add(data: FileDataset) -> None:
    """Register a data set under its name."""
    FILE_DATASETS[data.name] = data
    datasets.add(Entry(data.name, data, data.name, data.summary, {}))


def open_dataset(
    name: str,
    fresh: bool = False,
    target: str | None = None,
    client: str | None = None,
    ignore: Ignored = (),
    missing: str = "refuse",
    task: str | None = None,
) -> Dataset:
    """A data set by its name, from a file, or from a folder.

    Args:
        name: a data set (`fedda data list`), a .npz, .csv or .parquet file, or a folder of images.
        fresh: read the files and not the cache.
        target: in a table, the column to predict.
        client: in a table, the column that says who owns a row.
        ignore: in a table, the columns that are not features.
        missing: in a table, "drop" leaves out rows with gaps, with a warning; "refuse" (the default) names the gaps.
        task: in a table, what the target is: "regression" or "classes". By default decimal points mean regression.

    >>> open_dataset("digits").x.shape
    (1438, 1, 8, 8)
    >>> open_dataset("cifar")
    Traceback (most recent call last):
    ValueError: unknown data set 'cifar'; did you mean 'cifar10'? (or give a .npz or .csv file, or a folder)
    """
    return find_dataset(name, fresh, target, client, ignore, missing, task)()


def find_dataset(
    name: str,
    fresh: bool = False,
    target: str | None = None,
    client: str | None = None,
    ignore: Ignored = (),
    missing: str = "refuse",
    task: str | None = None,
) -> Callable[[], Dataset]:
    """A function that opens the data set of this name or path. An unknown name is refused; no file is read.

    Args:
        name: a data set (`fedda data list`), a .npz, .csv or .parquet file, or a folder of images.
        fresh: read the files and not the cache.
        target: in a table, the column to predict.
        client: in a table, the column that says who owns a row.
        ignore: in a table, the columns that are not features.
        missing: in a table, "drop" leaves out rows with gaps, with a warning; "refuse" (the default) names the gaps.
        task: in a table, what the target is: "regression" or "classes". By default decimal points mean regression.

    >>> find_dataset("digits")().classes
    10
    """
    if not isinstance(name, str | os.PathLike):
        got = type(name).__name__
        raise ValueError(f"load: data must be a name or a path, got a {got}; arrays are for fedda.problem")
    for key, column in {"target": target, "client": client}.items():
        if column is not None and not isinstance(column, str):
            raise ValueError(f"load: {key} must be the name of a column, got a {type(column).__name__}")
    if not isinstance(ignore, str | list | tuple):
        raise ValueError(f"load: ignore must be the name of a column or a list of names, got {ignore!r}")
    for key, value, known in (("missing", missing, GAPS), ("task", task, (None, *TASKS))):
        if value not in known:
            raise ValueError(f"load: {key} must be {' or '.join(repr(k) for k in known if k)}, got {value!r}")
    name = os.fspath(name)
    try:
        entry = datasets.find(name)
    except ValueError as why:
        if is_path(name):
            return lambda: open_path(Path(name).expanduser(), fresh, target, client, ignore, missing, task)
        raise ValueError(f"{why} (or give a .npz or .csv file, or a folder)") from None
    if target is not None or client is not None or ignore or missing != "refuse" or task is not None:
        raise ValueError(f"{name}: {FOR_TABLES} are for tables, and this data set is not one")
    return FILE_DATASETS[name].parse if fresh and name in FILE_DATASETS else entry


def is_path(name: str, base: Path = Path()) -> bool:
    """Whether the name of a data set that is not registered is a path, relative to `base`."""
    looks = "/" in name or os.sep in name or name.endswith((".npz", ".json", *TABLES))
    return looks or (base / name).exists()


def absolute(name: str, base: Path) -> str:
    """The absolute form of a path relative to `base`; the name of a registered data set stays.

    Args:
        name: a path, or the name of a data set.
        base: the folder that paths are relative to.

    >>> absolute("digits", Path("/data")), absolute("mine.npz", Path("/data"))
    ('digits', '/data/mine.npz')
    """
    if name in datasets.entries or not is_path(name, base):
        return name
    return os.path.abspath(base / Path(name).expanduser())


def reader_of(path: Path) -> tuple[list[Path], Callable[[Path], Dataset]]:
    """The files of a data set, and the function that reads them."""
    if path.suffix == ".npz" and not path.is_dir():
        return [path], read_npz
    leaf = leaf_files(path)
    if leaf is not None:
        return [*leaf[0], *leaf[1]], read_leaf
    if not path.is_dir():
        raise BadFile(path, "must be a .npz, .csv, .parquet or LEAF .json file, or a folder of images or idx files")
    pairs = idx_files(path)
    return ([file for pair in pairs for file in pair], read_idx) if pairs else (files_of(path), read_folder)


def open_path(
    path: Path,
    fresh: bool = False,
    target: str | None = None,
    client: str | None = None,
    ignore: Ignored = (),
    missing: str = "refuse",
    task: str | None = None,
) -> Dataset:
    """A data set from a .npz, .csv or .parquet file, from LEAF's JSON, or from a folder of images or idx files."""
    if not os.path.exists(path):
        raise BadFile(path, "there is no such file or folder")
    if path.suffix in TABLES:
        return read_table(path, target, client, ignore, missing, task)
    if target is not None or client is not None or ignore or missing != "refuse" or task is not None:
        raise BadFile(path, f"{FOR_TABLES} are for tables: .csv or .parquet files")
    files, read = reader_of(path)
    if fresh or sum(file.stat().st_size for file in files) < SMALL:
        return read(path)
    return cached(path.resolve().stem, files, lambda: read(path))
