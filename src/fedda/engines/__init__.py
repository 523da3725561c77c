"""Engines: implementations of ``cohort.average``. Every engine must equal the sequential one."""

from .counting import CountedClient, Counting, Counts
from .distributed import Distributed
from .sequential import Sequential, single_client
from .simulated import PERSONAL, Draws, Engine, Simulation
from .vectorised import Vectorised
from .world import SINGLE_PROCESS, SingleProcess, World, join

__all__ = [
    "PERSONAL", "SINGLE_PROCESS", "CountedClient", "Counting", "Counts", "Distributed", "Draws", "Engine", "Sequential",
    "Simulation", "SingleProcess", "Vectorised", "World", "join", "single_client",
]  # fmt: skip
