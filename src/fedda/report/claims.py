"""The paper's claims and their verdicts, as `claims.json` in a run folder holds them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from fedda.report import style
from fedda.runs import formats

# A sign beside the word: a verdict must not rest on its colour.
SIGNS = {"SUPPORTED": "✓", "PARTIAL": "◐", "INCONCLUSIVE": "?", "NOT SUPPORTED": "✗", "NOT TESTED": "–"}
NUMBERS = ("a", "b", "difference", "se", "area", "seeds")


def claims(folder: Path) -> list[dict[str, Any]]:
    """Read the settings with their claims, numbers written for people; an empty list where there is no such file.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> one = {"id": "C1", "text": "FedDA wins", "verdict": "PARTIAL", "reason": "one of two"}
    >>> _ = (folder / "claims.json").write_text(json.dumps({"settings": [{"setting": "paper", "claims": [one]}]}))
    >>> claims(folder)[0]["claims"][0]["sign"]
    '◐'
    """
    path = folder / "claims.json"
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path}: not valid JSON; `fedda claims` writes it anew") from None
    return [
        _setting(setting, f"{path}: settings[{i}]") for i, setting in enumerate(_list(found, "settings", f"{path}"))
    ]


def _setting(found: Any, place: str) -> dict[str, Any]:
    own = [_claim(claim, f"{place}.claims[{i}]") for i, claim in enumerate(_list(found, "claims", place))]
    runs = _list(found, "runs", place) if found.get("runs") is not None else []
    counts = Counter(claim["verdict"] for claim in own)
    return {
        "setting": _text(found, "setting", place),
        "runs": [str(run) for run in runs],
        "counts": " · ".join(f"{counts[verdict]} {verdict.lower()}" for verdict in SIGNS if counts[verdict]),
        "claims": own,
    }


def _claim(found: Any, place: str) -> dict[str, Any]:
    details = _list(found, "details", place) if isinstance(found, dict) and found.get("details") is not None else []
    return {
        **{key: _text(found, key, place) for key in ("id", "text", "reason")},
        **{key: _text(found, key, place) if found.get(key) is not None else "" for key in ("where", "stand_in")},
        **_verdict(found, place),
        "details": [_detail(detail, f"{place}.details[{i}]") for i, detail in enumerate(details)],
    }


def _detail(found: Any, place: str) -> dict[str, Any]:
    words = {"comparison": _text(found, "comparison", place), "metric": _text(found, "metric", place)}
    metric = style.metric(words["metric"])
    numbers = {}
    for key in NUMBERS:
        value = found.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{place}: {key} must be a number or null, got {value!r}")
        if value is None or value != value:
            numbers[key] = "–"
        elif metric.percent and key != "seeds":
            # A difference of accuracies is in points, not in per cent of either.
            numbers[key] = f"{100 * value:.2f} %" if key in ("a", "b") else f"{100 * value:+.2f} points"
        else:
            numbers[key] = formats.plain(value)
    numbers["se"] = numbers["se"].replace("+", "")
    return words | {"metric": metric.name} | numbers | _verdict(found, place)


def _verdict(found: Any, place: str) -> dict[str, str]:
    verdict = _text(found, "verdict", place)
    if verdict not in SIGNS:
        raise ValueError(f"{place}: verdict must be one of {', '.join(SIGNS)}, got {verdict!r}")
    return {"verdict": verdict, "sign": SIGNS[verdict], "kind": verdict.lower().replace(" ", "-")}


def _text(found: Any, key: str, place: str) -> str:
    value = found.get(key) if isinstance(found, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"{place}: {key} must be a text, got {value!r}")
    return value


def _list(found: Any, key: str, place: str) -> list[Any]:
    value = found.get(key) if isinstance(found, dict) else None
    if not isinstance(value, list):
        raise ValueError(f"{place}: {key} must be a list, got {value!r}")
    return value
