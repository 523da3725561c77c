"""A data set by name that lies in files: which files, how they are read, and what is said where they are absent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..registry import Entry, datasets
from .cache import cached
from .datasets import Dataset
from .files import home


@dataclass(frozen=True)
class Download:
    """A file at its official place; `members` are taken out of it where it is an archive."""

    url: str
    md5: str
    file: str  # below the folder of the data
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class OnDisk:
    """Calling it opens the data set.

    Each of `files` is a group of patterns below the folder of the data; the first pattern that matches is taken.
    """

    name: str
    what: str
    files: tuple[tuple[str, ...], ...]
    read: Callable[[list[list[Path]]], Dataset]
    train: int
    test: int
    classes: int
    clients: str = ""  # whose the samples are, where the data says it
    downloads: tuple[Download, ...] = ()
    how: str = ""  # where there is no download: how to come by the files

    def found(self) -> list[list[Path]]:
        """The files of each group, none where it is absent."""
        return [next(filter(None, (sorted(home().glob(pattern)) for pattern in group)), []) for group in self.files]

    def __call__(self) -> Dataset:
        paths = [path for group in self.whole() for path in group]
        return cached(self.name, paths, self.parse)

    def parse(self) -> Dataset:
        """Read the files themselves, past the cache."""
        return self.read(self.whole())

    def whole(self) -> list[list[Path]]:
        found = self.found()
        if not all(found):
            raise ValueError(self.absent(found))
        return found

    def absent(self, found: list[list[Path]]) -> str:
        missing = [group[0] for group, files in zip(self.files, found, strict=True) if not files]
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        way = f"fetch it with: fedda data fetch {self.name}" if self.downloads else self.how
        words = f"{self.name}: {home() / missing[0]}{more} is absent; {way}"
        return f"{words} (set FEDDA_DATA to use another folder)"


ON_DISK: dict[str, OnDisk] = {}


def add(data: OnDisk) -> None:
    """Register a data set under its name."""
    ON_DISK[data.name] = data
    datasets.add(Entry(data.name, data, data.name, data.what, {}))
