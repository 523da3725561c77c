"""The command line: `fedda run | sweep | claims | report | data | list`, one module for each group of commands."""

from . import claims, data, look, run, sweep  # noqa: F401  each adds its commands to the app
from .app import main

__all__ = ["main"]
