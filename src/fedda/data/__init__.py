"""Bytes to arrays over clients; knows no models."""

from .datasets import Dataset
from .partition import split

__all__ = ["Dataset", "split"]
