"""Presets: tuned hyper-parameters by name (`presets.toml`) or from a TOML file, as a sweep writes it."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from . import checks

Params = dict[str, Any]


@cache
def builtin() -> dict[str, dict[str, Params]]:
    """The presets that come with fedda: hyper-parameters by preset and algorithm."""
    tables = tomllib.loads((resources.files(__package__) / "presets.toml").read_text(encoding="utf-8"))
    return {name: tables.get(table.pop("base", ""), {}) | table for name, table in tables.items()}


def preset(name: str, which: str) -> Params:
    """The hyper-parameters of one algorithm in a preset.

    >>> preset("stem", "cifar10")
    {'lr': 0.1, 'w': 100.0, 'c': 2000.0, 'old_point': 'server'}
    """
    if str(which).endswith(".toml"):
        table = read(Path(which))
    elif which in builtin():
        table = builtin()[which]
    else:
        raise ValueError(f"unknown preset {which!r}; {checks.nearest(str(which), builtin())} (or give a .toml file)")
    if name not in table:
        raise ValueError(f"the preset {which!r} has no values for {name!r}; it has {', '.join(table)}")
    return dict(table[name])


def read(path: Path) -> dict[str, Params]:
    """The hyper-parameters in a file: one table per label."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as why:
        raise ValueError(f"{path}: cannot be read: {why.strerror}") from None
    except (ValueError, RecursionError) as why:
        raise ValueError(f"{path}: is not TOML: {checks.one_line(why)}") from None
    for label, params in table.items():
        if not isinstance(params, dict):
            raise ValueError(f"{path}: a preset file holds a table for each algorithm, such as [fedavg], got {label!r}")
    return table
