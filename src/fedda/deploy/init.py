"""A new Flower app: files to fill in, scripts that start everything, and a README."""

import json
import re
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from .check import NODE_CALLS
from .server import Plan

SCRIPTS = ("superlink.sh", "register.sh", "supernode.sh", "try.sh")
TEMPLATES = (
    "pyproject.toml",
    "README.md",
    "gitignore",
    "task.py",
    "client_app.py",
    "server_app.py",
    "env.sh",
    "nginx.conf",
    "Caddyfile",
    *SCRIPTS,
)
FIRST: dict[str, Any] = {
    "algorithm": "fedda-mvr", "params": '{"lr": 0.08, "w": 1000.0, "steps": 5}', "rounds": 30, "participants": "keys",
}  # fmt: skip


def init(place: Path, clients: int = 3) -> list[Path]:
    """Write an app for this many sites into a new folder. The folder's name is the app's. Returns the files."""
    if clients < 2:
        raise ValueError(f"deploy init: --clients must be at least 2, got {clients}: one site needs no federation")
    first = {**FIRST, "clients": clients}
    Plan(**first)  # refuses what no run could start with
    name = place.resolve().name
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]{0,31}", name):
        raise ValueError(
            f"{place}: the folder's name is the app's: a letter, then letters, digits and hyphens, at most 32 in all"
        )
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ValueError(f"{place}: exists and is not empty; give another folder")
    values = {
        "@NAME@": name, "@PACKAGE@": package(name), "@CLIENTS@": str(clients), "@LAST@": str(clients - 1),
        "@CONFIG@": config(first), "@PATHS@": "|".join(NODE_CALLS),
    }  # fmt: skip
    written: list[Path] = []
    (place / package(name)).mkdir(parents=True)
    for template in (*TEMPLATES, "__init__.py"):
        file = place / (package(name) if template.endswith(".py") else "") / template.replace("gitignore", ".gitignore")
        source = files(__package__).joinpath(f"templates/{template}.in")
        text = "" if template == "__init__.py" else source.read_text("utf-8")
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        file.write_text(text, "utf-8")
        if template in SCRIPTS:
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
        meaning = field.metadata.get("meaning")
        lines.append(f"{text:<42}  # {meaning}" if meaning else text)
    return "\n".join(lines)


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"'{value}'" if '"' in value else json.dumps(value)
    return repr(value)
