"""Algorithms (data sets, models, ...) that live outside the package: a file, a module, or an installed entry point.

An installed package registers its own with

    [project.entry-points."fedda.plugins"]
    mine = "mypackage.fedda_plugin"
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path

GROUP = "fedda.plugins"


def load(plugin: str) -> None:
    """Import a plugin by its file or module name; what it registers is then known by name."""
    try:
        if plugin.endswith(".py"):
            path = Path(plugin).resolve()
            name = f"fedda_plugin_{path.stem}"
            if name in sys.modules and sys.modules[name].__file__ == str(path):
                return
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec and spec.loader
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            importlib.import_module(plugin)
    except Exception as why:  # a plugin is somebody else's code: whatever it raises is told in one line
        raise ValueError(f"plugin {plugin!r} cannot be loaded: {type(why).__name__}: {why}") from why


def discover() -> None:
    """Import every installed plugin."""
    for point in entry_points(group=GROUP):
        load(point.value)
