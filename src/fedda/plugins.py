"""Plugins: algorithms, data sets, models and commands that live outside the package.

A plugin is a file, a module, or an entry point of an installed package:

    [project.entry-points."fedda.plugins"]
    clipped = "mypackage.clipped"       # a module: importing it registers what it holds
    study = "mypackage.commands:app"    # a typer.Typer in a module: it becomes the command `fedda study`
"""

import importlib
import importlib.util
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

GROUP = "fedda.plugins"


def load(plugin: str) -> ModuleType:
    """Import a plugin by its file or its module name. What it registers is then known by name."""
    try:
        if not plugin.endswith(".py"):
            return importlib.import_module(plugin)
        path = Path(plugin).resolve()
        name = f"fedda_plugin_{path.stem}"
        if name in sys.modules and sys.modules[name].__file__ == str(path):
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except Exception as why:  # a plugin can raise anything: the user gets one line
        said = " ".join(str(why).split())[:300]
        raise ValueError(f"plugin {plugin!r} cannot be loaded: {type(why).__name__}: {said}") from why


def discover() -> None:
    """Import every installed plugin that registers something; commands are imported only when they are called."""
    for point in entry_points(group=GROUP):
        if not point.attr:
            load(point.value)


def commands() -> dict[str, EntryPoint]:
    """The installed commands by name. Nothing is imported."""
    return {point.name: point for point in entry_points(group=GROUP) if point.attr}
