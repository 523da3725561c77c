"""A new Flower app: files to fill in, scripts that start everything, and a README."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..checks import count
from .server import Plan

# The path of each template in the app; @PACKAGE@ is the app's own package.
FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "task.py": "@PACKAGE@/task.py",
    "client_app.py": "@PACKAGE@/client_app.py",
    "server_app.py": "@PACKAGE@/server_app.py",
    "env.sh": "env.sh",
    "superlink.sh": "superlink.sh",
    "register.sh": "register.sh",
    "supernode.sh": "supernode.sh",
    "try.sh": "try.sh",
}
FIRST = {"algorithm": "fedda-mvr", "params": '{"lr": 0.08, "w": 1000.0, "steps": 5}', "rounds": 30}
MEANINGS = {
    "algorithm": "fedda list algorithms",
    "params": "its hyper-parameters, a JSON table",
    "clients": "number of sites; the start waits for them",
    "cohort": "sites per round; 0 means all",
    "batch": "samples per local step",
    "weights": "samples: sites are weighted by their samples; uniform: all alike",
    "dtype": "float32 or float64",
    "every": "rounds between two evaluations at the sites; 0 means never",
    "timeout": "seconds that a round waits for replies",
    "min-replies": "with fewer replies a round is repeated",
    "repeats": "at most this often; then the run stops with its state saved",
    "limit": "a reply with a larger value is rejected",
    "aggregation": "clipping, medians, noise, compression: a JSON list of tables",
    "budget": 'privacy budget, with noise: {"epsilon": 8, "delta": 1e-5}',
    "out": "folder of the results, where the SuperLink runs",
    "resume": "true: resume from the checkpoint in `out`",
}


def init(place: Path, clients: int = 3) -> list[Path]:
    """Write an app for this many sites into a new folder. The folder's name is the app's. Returns the files."""
    count("deploy init", "clients", clients)
    name = place.resolve().name
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]{0,31}", name):
        raise ValueError(
            f"{place}: the folder's name is the app's: a letter, then letters, digits and hyphens, at most 32 in all"
        )
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ValueError(f"{place}: exists and is not empty; give another folder")
    values = {
        "@NAME@": name, "@PACKAGE@": package(name), "@CLIENTS@": str(clients), "@LAST@": str(clients - 1),
        "@CONFIG@": config({**FIRST, "clients": clients}),
    }  # fmt: skip
    written: list[Path] = []
    for template, path in {**FILES, "": "@PACKAGE@/__init__.py"}.items():
        text = files(__package__).joinpath(f"templates/{template}.in").read_text("utf-8") if template else ""
        file = place / filled(path, values)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(filled(text, values), "utf-8")
        if template.endswith(".sh") and template != "env.sh":
            file.chmod(0o755)
        written.append(file)
    return written


def package(name: str) -> str:
    """The package of an app. The suffix keeps it apart from installed packages.

    >>> package("my-sites")
    'my_sites_app'
    """
    return name.lower().replace("-", "_") + "_app"


def config(given: dict[str, Any]) -> str:
    """Every setting of a Plan as TOML, with its meaning."""
    lines = []
    for field in fields(Plan):
        key, value = field.name.replace("_", "-"), given.get(field.name, field.default)
        text = f"{key} = {toml(value)}"
        lines.append(f"{text:<42}  # {MEANINGS[key]}" if key in MEANINGS else text)
    return "\n".join(lines)


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"'{value}'" if '"' in value else json.dumps(value)
    return repr(value)


def filled(text: str, values: dict[str, str]) -> str:
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text
