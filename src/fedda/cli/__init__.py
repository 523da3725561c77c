"""The command line: `fedda run | list | report`, one module for each group of commands."""

from . import look, run  # noqa: F401  each adds its commands to the app
from .app import main

__all__ = ["main"]
