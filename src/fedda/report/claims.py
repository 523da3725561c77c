"""The verdicts in `claims.json` of a folder, as the page shows them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from ..runs import formats
from ..runs.names import CLAIMS
from . import style

# A sign beside the verdict: it must not depend on colour alone.
SIGNS = {"SUPPORTED": "✓", "PARTIAL": "◐", "INCONCLUSIVE": "?", "NOT SUPPORTED": "✗", "NOT TESTED": "–"}
NUMBERS = ("a", "b", "difference", "se", "area", "seeds")


def read_verdicts(folder: Path) -> list[dict[str, Any]]:
    """The settings with their claims, numbers as text; an empty list without the file.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> one = {"id": "C1", "text": "FedDA wins", "verdict": "PARTIAL", "reason": "one of two"}
    >>> _ = (folder / "claims.json").write_text(json.dumps({"settings": [{"setting": "paper", "claims": [one]}]}))
    >>> read_verdicts(folder)[0]["claims"][0]["sign"]
    '◐'
    """
    path = folder / CLAIMS
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path}: not valid JSON; `fedda claims` writes it anew") from None
    settings = _list(content, "settings", f"{path}")
    return [_setting(setting, f"{path}: settings[{i}]") for i, setting in enumerate(settings)]


def _setting(table: Any, where: str) -> dict[str, Any]:
    claims = [_claim(claim, f"{where}.claims[{i}]") for i, claim in enumerate(_list(table, "claims", where))]
    runs = _list(table, "runs", where) if table.get("runs") is not None else []
    counts = Counter(claim["verdict"] for claim in claims)
    return {
        "setting": _text(table, "setting", where),
        "runs": [str(run) for run in runs],
        "counts": " · ".join(f"{counts[verdict]} {verdict.lower()}" for verdict in SIGNS if counts[verdict]),
        "claims": claims,
    }


def _claim(table: Any, where: str) -> dict[str, Any]:
    details = _list(table, "details", where) if isinstance(table, dict) and table.get("details") is not None else []
    return {
        **{key: _text(table, key, where) for key in ("id", "text", "reason")},
        **{key: _text(table, key, where) if table.get(key) is not None else "" for key in ("where", "stand_in")},
        **_verdict(table, where),
        "details": [_detail(detail, f"{where}.details[{i}]") for i, detail in enumerate(details)],
    }


def _detail(table: Any, where: str) -> dict[str, Any]:
    texts = {"comparison": _text(table, "comparison", where), "metric": _text(table, "metric", where)}
    metric = style.metric(texts["metric"])
    numbers = {}
    for key in NUMBERS:
        value = table.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{where}: {key} must be a number or null, got {value!r}")
        if value is None or value != value:
            numbers[key] = "–"
        elif metric.percent and key != "seeds":
            # A difference of accuracies is in points, not in per cent.
            numbers[key] = f"{100 * value:.2f} %" if key in ("a", "b") else f"{100 * value:+.2f} points"
        else:
            numbers[key] = formats.plain(value)
    numbers["se"] = numbers["se"].replace("+", "")
    return texts | {"metric": metric.name} | numbers | _verdict(table, where)


def _verdict(table: Any, where: str) -> dict[str, str]:
    verdict = _text(table, "verdict", where)
    if verdict not in SIGNS:
        raise ValueError(f"{where}: verdict must be one of {', '.join(SIGNS)}, got {verdict!r}")
    return {"verdict": verdict, "sign": SIGNS[verdict], "kind": verdict.lower().replace(" ", "-")}


def _text(table: Any, key: str, where: str) -> str:
    value = table.get(key) if isinstance(table, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key} must be a text, got {value!r}")
    return value


def _list(table: Any, key: str, where: str) -> list[Any]:
    value = table.get(key) if isinstance(table, dict) else None
    if not isinstance(value, list):
        raise ValueError(f"{where}: {key} must be a list, got {value!r}")
    return value
