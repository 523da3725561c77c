"""One paper, one file. Importing this package registers every algorithm."""

from . import fedavg, fedda

__all__ = ["fedavg", "fedda"]
