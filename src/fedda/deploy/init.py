"""A new Flower app: files to fill in, scripts that start everything, a page that says how."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..checks import count
from .server import Plan

# Where the templates go; @PACKAGE@ is the app's own package.
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
FIRST = {"algorithm": "fedda-mvr", "words": '{"lr": 0.08, "w": 1000.0, "steps": 5}', "rounds": 30}
MEANINGS = {
    "algorithm": "fedda list algorithms",
    "words": "its hyper-parameters, a JSON table",
    "clients": "sites to wait for at the start",
    "cohort": "sites a round; 0 is all of them",
    "batch": "samples of a local step",
    "weights": "samples: a site counts by its samples; uniform: all the same",
    "dtype": "float32 or float64",
    "every": "rounds between two evaluations at the sites; 0 is never",
    "timeout": "seconds that a round waits for replies",
    "min-replies": "with fewer a round is repeated",
    "repeats": "so often, and then the run stops with its state saved",
    "limit": "a reply with a larger number is rejected",
    "aggregation": "clipping, medians, noise, compression: a JSON list of tables",
    "budget": 'of privacy, with noise: {"epsilon": 8, "delta": 1e-5}',
    "out": "folder of the results, where the SuperLink runs",
    "resume": "true: go on from the checkpoint in `out`",
}


def init(place: Path, clients: int = 3) -> list[Path]:
    """Write an app for so many sites into a new folder, which gives it its name; the files written."""
    count("deploy init", "clients", clients)
    name = place.resolve().name
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]{0,31}", name):
        raise ValueError(
            f"{place}: the folder's name is the app's: a letter, then letters, digits and hyphens, at most 32 in all"
        )
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ValueError(f"{place}: is there already, and not empty; give another folder")
    words = {
        "@NAME@": name, "@PACKAGE@": package(name), "@CLIENTS@": str(clients), "@LAST@": str(clients - 1),
        "@CONFIG@": config({**FIRST, "clients": clients}),
    }  # fmt: skip
    made = []
    for template, path in {**FILES, "": "@PACKAGE@/__init__.py"}.items():
        text = files(__package__).joinpath(f"templates/{template}.in").read_text("utf-8") if template else ""
        made.append(place / filled(path, words))
        made[-1].parent.mkdir(parents=True, exist_ok=True)
        made[-1].write_text(filled(text, words), "utf-8")
        if template.endswith(".sh") and template != "env.sh":
            made[-1].chmod(0o755)
    return made


def package(name: str) -> str:
    """The package of an app: no package that is installed has such a name.

    >>> package("my-sites")
    'my_sites_app'
    """
    return name.lower().replace("-", "_") + "_app"


def config(given: dict[str, Any]) -> str:
    """Every word of a Plan as TOML, with what it means."""
    lines = []
    for field in fields(Plan):
        word, value = field.name.replace("_", "-"), given.get(field.name, field.default)
        text = f"{word} = {toml(value)}"
        lines.append(f"{text:<42}  # {MEANINGS[word]}" if word in MEANINGS else text)
    return "\n".join(lines)


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"'{value}'" if '"' in value else json.dumps(value)
    return repr(value)


def filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text
