"""Write TOML, which the standard library only reads, and read a file or a single value of it."""

import json
import re
import tomllib
from datetime import date, time
from pathlib import Path
from typing import Any


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; a mark that some editors put at its beginning is skipped."""
    try:
        return loads(path.read_text(encoding="utf-8-sig"), str(path))
    except OSError as why:
        raise ValueError(f"{path}: cannot be read: {why.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text, which TOML must be") from None


def loads(text: str, where: str) -> dict[str, Any]:
    """Parse a TOML document; a message about it begins with `where` and has one line."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as why:
        line = (str(why).splitlines() or [type(why).__name__])[0]
        raise ValueError(f"{where}: not valid TOML: {line[:300]}") from None


def dumps(table: dict[str, Any]) -> str:
    """A document that `tomllib` reads back as the same table; None is left out, because TOML has no such value.

    >>> print(dumps({"rounds": 5, "algorithms": {"fedavg": {"lr": 0.1}}}).strip())
    rounds = 5
    <BLANKLINE>
    [algorithms.fedavg]
    lr = 0.1
    """
    return "\n".join(_lines(table, ())).strip() + "\n"


def literal(text: str) -> Any:
    """The value of a TOML text; any other text stands for itself.

    >>> literal("0.1"), literal("[1, 2]"), literal("zero")
    (0.1, [1, 2], 'zero')
    """
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _lines(table: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    plain = {k: v for k, v in table.items() if v is not None and not _is_section(v, path)}
    lines = [f"{_key(k)} = {inline(v)}" for k, v in plain.items()]
    sections = {k: v for k, v in table.items() if _is_section(v, path)}
    if path and (lines or not sections):
        lines = ["", f"[{'.'.join(map(_key, path))}]", *lines]
    for k, v in sections.items():
        lines += _lines(v, (*path, k))
    return lines


def _is_section(value: Any, path: tuple[str, ...]) -> bool:
    """Tables get a heading down to the second level; deeper ones, such as a prox, stay inline."""
    return isinstance(value, dict) and len(path) < 2


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def _string(text: str) -> str:
    # A JSON string is a TOML string, except that TOML needs DEL escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def inline(value: Any) -> str:
    """A value as it stands in one line of a document."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {inline(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, int | float):
        return repr(value)
    raise ValueError(f"TOML cannot hold {value!r}")
