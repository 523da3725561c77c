"""The command line: `fedda run | sweep | claims | report | bench | data | list`, a module a group of commands."""

from . import bench, claims, data, look, run, sweep  # noqa: F401  each adds its commands to the app
from .app import main

__all__ = ["main"]
