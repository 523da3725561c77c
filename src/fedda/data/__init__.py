"""Data sets: from files to arrays that belong to clients; no models."""

from . import catalogue, shakespeare  # noqa: F401  register data sets
from .datasets import Dataset
from .from_files import absolute, find_dataset, open_dataset
from .partition import split

__all__ = ["Dataset", "absolute", "find_dataset", "open_dataset", "split"]


def __dir__() -> list[str]:
    return sorted(__all__)
