"""Engines: implementations of ``cohort.average``. Every engine must equal the sequential one."""

from .distributed import Distributed
from .sequential import Sequential
from .simulated import Engine
from .vectorised import Vectorised
from .world import join

__all__ = ["Distributed", "Engine", "Sequential", "Vectorised", "join"]


def __dir__() -> list[str]:
    return sorted(__all__)
