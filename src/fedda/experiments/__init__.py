"""Experiments: a problem, algorithms and seeds as data (TOML), run into a folder that can be resumed at any moment."""

from ..processes import Stopped
from .config import Experiment, builtin, find
from .runner import run

__all__ = ["Experiment", "Stopped", "builtin", "find", "run"]
