"""Bytes to arrays over clients; knows no models."""

from . import catalogue, medmnist, skews  # noqa: F401  register data sets and partitions
from .datasets import Dataset
from .opening import known, open_dataset
from .partition import split

__all__ = ["Dataset", "known", "open_dataset", "split"]
