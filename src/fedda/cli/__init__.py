"""The command line, one module per group of commands: `fedda --help` lists them.

A command imports what it needs when it runs: `fedda --help` imports neither torch nor matplotlib.
"""

from . import bench, claims, data, deploy, doctor, export, list_report, plan, run, sweep, theory  # noqa: F401  each adds its commands to the app
from .app import main

__all__ = ["main"]
