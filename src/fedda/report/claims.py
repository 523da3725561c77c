"""The verdicts in `claims.json` of a folder, as the page shows them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from ..runs import formats
from ..runs.metrics import metric as metric_of
from ..runs.names import CLAIMS
from ..runs.sweeps import expect, optional

# A sign beside the verdict: it must not depend on colour alone.
SIGNS = {"SUPPORTED": "✓", "PARTIAL": "◐", "INCONCLUSIVE": "?", "NOT SUPPORTED": "✗", "NOT TESTED": "–"}
NUMBERS = ("a", "b", "difference", "interval", "p", "seeds")


def read_verdicts(folder: Path) -> list[dict[str, Any]]:
    """The settings with their claims, numbers as text; an empty list without the file."""
    path = folder / CLAIMS
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path}: not valid JSON; `fedda claims` writes it anew") from None
    settings = expect(list, expect(dict, content, f"{path}: it").get("settings"), f"{path}: settings")
    return [_setting(setting, f"{path}: settings[{i}]") for i, setting in enumerate(settings)]


def _setting(value: Any, where: str) -> dict[str, Any]:
    table = expect(dict, value, where)
    claims = expect(list, table.get("claims"), f"{where}: claims")
    claims = [_claim(claim, f"{where}.claims[{i}]") for i, claim in enumerate(claims)]
    counts = Counter(claim["verdict"] for claim in claims)
    return {
        "setting": expect(str, table.get("setting"), f"{where}: setting"),
        "runs": [str(run) for run in optional(list, table.get("runs"), f"{where}: runs") or []],
        "counts": " · ".join(f"{counts[verdict]} {verdict.lower()}" for verdict in SIGNS if counts[verdict]),
        "claims": claims,
    }


def _claim(value: Any, where: str) -> dict[str, Any]:
    table = expect(dict, value, where)
    details = optional(list, table.get("details"), f"{where}: details") or []
    return {
        **{key: expect(str, table.get(key), f"{where}: {key}") for key in ("id", "text", "reason")},
        **{key: optional(str, table.get(key), f"{where}: {key}") or "" for key in ("where", "stand_in")},
        **_verdict(table, where),
        "details": [_detail(detail, f"{where}.details[{i}]") for i, detail in enumerate(details)],
    }


def _detail(value: Any, where: str) -> dict[str, Any]:
    table = expect(dict, value, where)
    comparison, key = (expect(str, table.get(key), f"{where}: {key}") for key in ("comparison", "metric"))
    metric, texts = metric_of(key), {"comparison": comparison}
    for key in NUMBERS:
        number = table.get(key)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
            raise ValueError(f"{where}: {key} must be a number or null, got {number!r}")
        if number is None or number != number:
            texts[key] = "–"
        elif metric.percent and key not in ("seeds", "p"):
            # A difference of accuracies is in points, not in per cent.
            texts[key] = f"{100 * number:.2f} %" if key in ("a", "b") else f"{100 * number:+.2f} points"
        else:
            texts[key] = formats.plain(number)
    way = optional(str, table.get("way"), f"{where}: way") or ""
    texts |= {"metric": metric.name, "interval": texts["interval"].replace("+", ""), "way": way or "–"}
    return texts | _verdict(table, where)


def _verdict(table: dict[str, Any], where: str) -> dict[str, str]:
    verdict = table.get("verdict")
    if verdict not in SIGNS:
        raise ValueError(f"{where}: verdict must be one of {', '.join(SIGNS)}, got {verdict!r}")
    return {"verdict": verdict, "sign": SIGNS[verdict], "kind": verdict.lower().replace(" ", "-")}
