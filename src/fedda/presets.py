"""Presets: tuned hyper-parameters by name (`presets.toml`) or from a TOML file, as a sweep writes it."""

import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from . import checks
from .runs.toml import read_toml

Params = dict[str, Any]


@cache
def builtin() -> dict[str, dict[str, Params]]:
    """The presets that come with fedda: hyper-parameters by preset and algorithm."""
    tables = tomllib.loads((resources.files(__package__) / "presets.toml").read_text(encoding="utf-8"))
    return {name: tables.get(table.pop("base", ""), {}) | table for name, table in tables.items()}


def find(preset: str, algorithm: str) -> Params:
    """The hyper-parameters of one algorithm in a preset: a built-in one or a file.

    >>> find("cifar10", "stem")
    {'lr': 0.1, 'w': 100.0, 'c': 2000.0, 'old_point': 'server'}
    """
    if str(preset).endswith(".toml"):
        table = read(Path(preset))
    elif preset in builtin():
        table = builtin()[preset]
    else:
        raise ValueError(f"unknown preset {preset!r}; {checks.nearest(str(preset), builtin())} (or give a .toml file)")
    if algorithm not in table:
        raise ValueError(f"the preset {preset!r} has no values for {algorithm!r}; it has {', '.join(table)}")
    return dict(table[algorithm])


def read(path: Path) -> dict[str, Params]:
    """The hyper-parameters in a file: one table per label."""
    table = read_toml(path)
    for label, params in table.items():
        if not isinstance(params, dict):
            raise ValueError(f"{path}: a preset file holds a table for each algorithm, such as [fedavg], got {label!r}")
    return table
