"""Engines: implementations of ``cohort.average``. The sequential one is the truth; every other must equal it."""

from ..processes import Lost, started_by_torchrun
from .distributed import Distributed
from .joining import join
from .sequential import Sequential
from .simulated import Draws, Engine, Simulation
from .vectorised import Vectorised
from .world import ALONE, Alone, World
from .wrappers import Counting, Counts

__all__ = [
    "ALONE", "Alone", "Counting", "Counts", "Distributed", "Draws", "Engine", "Lost", "Sequential", "Simulation",
    "Vectorised", "World", "join", "started_by_torchrun",
]  # fmt: skip
