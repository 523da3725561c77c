"""Engines: implementations of ``cohort.average``. Every engine must equal the sequential one."""

from ..processes import Lost, started_by_torchrun
from .distributed import Distributed
from .sequential import Sequential
from .simulated import Draws, Engine, Simulation
from .vectorised import Vectorised
from .world import SINGLE_PROCESS, SingleProcess, World, join
from .wrappers import Counting, Counts

__all__ = [
    "SINGLE_PROCESS", "Counting", "Counts", "Distributed", "Draws", "Engine", "Lost", "Sequential", "Simulation",
    "SingleProcess", "Vectorised", "World", "join", "started_by_torchrun",
]  # fmt: skip
