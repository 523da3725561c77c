"""All algorithms of a sweep in one panel: the best value at each level of a hyper-parameter, most often the rate."""

import math
from typing import Any

import numpy as np

from ...runs.metrics import metric
from ...runs.sweeps import SweepResults, Swept
from ..style import distinct_pens


def shared_param(sweep: SweepResults) -> str | None:
    """The hyper-parameter of the overview: `lr`, or else the one with numbers that most algorithms have."""
    counts: dict[str, int] = {}
    for swept in sweep.algorithms:
        for name in swept.params:
            if _levels(swept, name):
                counts[name] = counts.get(name, 0) + 1
    return "lr" if "lr" in counts else max(counts, key=lambda name: counts[name], default=None)


def overview(sweep: SweepResults) -> dict[str, Any] | None:
    """The data of the page's script; None if no hyper-parameter has numbers for its values."""
    param = shared_param(sweep)
    drawn = [s for s in sweep.algorithms if param and param in s.params and _levels(s, param) and s.best]
    if param is None or not drawn:
        return None
    shown = metric(sweep.metric)
    pens = distinct_pens([swept.label for swept in drawn])
    series, everything = [], []
    for i, (swept, (colour, dash)) in enumerate(zip(drawn, pens, strict=True)):
        levels = _levels(swept, param)
        best = [next((p for p in swept.ranked if p.ok and p.values[param] == level), None) for level in levels]
        everything += [point.value for point in best if point]
        curve = {
            "x": 0,
            "mean": [_finite(point.value) if point else None for point in best],
            "std": [_finite(point.std) if point else None for point in best],
            "seeds": [],
        }
        one = {"label": swept.label, "name": swept.label, "row": 0, "colour": colour, "dash": dash, "entries": [i]}
        series.append(one | {"x": [{param: levels}], "curves": [curve]})
    levels = [level for swept in drawn for level in _levels(swept, param)]
    log = min(levels) > 0 and max(levels) >= 10 * min(levels)
    ends = _limits([v for v in everything if abs(v) < 1e300], shown.better or sweep.better, shown.percent)
    axis = {"key": param, "name": param, "label": f"{param} (log scale)" if log else param, "scale": 1, "log": log}
    return {
        "sweep": True,
        "name": "sweep",
        "axes": [axis | {"begin": min(levels), "end": max(levels) or 1.0}],
        "metrics": [vars(shown) | {"better": sweep.better}],
        "rows": [""],
        "panels": [
            {"key": "overview", "row": 0, "metric": 0, "title": f"{shown.name} by {param}", "outside": [], **ends}
        ],
        "series": series,
        "entries": [{"text": s["label"], "colour": s["colour"], "dash": s["dash"], "section": 0} for s in series],
        "groups": [],
        "goals": [],
        "files": {},
    }


def _limits(values: list[float], better: str, percent: bool) -> dict[str, Any]:
    """Limits that the worst fifth of the points does not set: at a bad rate a method is far from all others."""
    if not values:
        return {"linear": (0.0, 1.0), "log": None, "preferLog": False}
    low, high = np.quantile(values, (0.2, 1.0) if better == "higher" else (0.0, 0.8)).tolist()
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    linear = (low - margin, min(high + margin, 1.02) if percent else high + margin)
    log = (low / 1.2, high * 1.2) if low > 0 and better == "lower" else None
    return {"linear": linear, "log": log, "preferLog": bool(log and high > 20 * low)}


def _levels(swept: Swept, name: str) -> list[float]:
    """The values of a hyper-parameter in order; empty if one of them is not a number."""
    values = [point.values.get(name) for point in swept.points]
    numbers = {v for v in values if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)}
    return sorted(numbers) if len(numbers) == len(set(map(str, values))) else []


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) and abs(value) < 1e300 else None
