"""Engines: implementations of ``cohort.average``. Every engine must equal the sequential one."""

from .counting import CountedClient, Counting, Counts
from .distributed import Distributed
from .participation import CounterDraws, Draws, Participation, cohort_size
from .sequential import Sequential, single_client
from .simulated import PERSONAL, Engine, Simulation
from .vectorised import Vectorised
from .world import SINGLE_PROCESS, SingleProcess, World, join

__all__ = [
    "PERSONAL", "SINGLE_PROCESS", "CountedClient", "CounterDraws", "Counting", "Counts", "Distributed", "Draws",
    "Engine", "Participation", "Sequential", "Simulation", "SingleProcess", "Vectorised", "World", "cohort_size",
    "join", "single_client",
]  # fmt: skip
