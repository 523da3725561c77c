"""Experiments: a problem, algorithms and seeds as data (TOML), run into a folder from which they can resume."""

from .config import Experiment, builtin, find
from .runner import run

__all__ = ["Experiment", "builtin", "find", "run"]
