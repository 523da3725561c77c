"""Engines: implementations of ``cohort.average``. The sequential one is the truth; every other must equal it."""

from .sequential import Sequential
from .simulated import Engine, Simulation
from .vectorised import Vectorised
from .wrappers import Counting, Counts

__all__ = ["Counting", "Counts", "Engine", "Sequential", "Simulation", "Vectorised"]
