"""A sweep folder in memory: `sweep.json`, checked, with the points of every algorithm."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Value = int | float | str | bool | None


@dataclass(frozen=True)
class Point:
    """One choice of values and what it reached; `value` is NaN where it diverged."""

    values: dict[str, Value]
    value: float
    std: float
    seeds: int
    note: str
    best: bool
    gradients: float

    @property
    def ok(self) -> bool:
        return math.isfinite(self.value)


@dataclass(frozen=True)
class Swept:
    """The points of one algorithm, over its words."""

    label: str
    words: list[str]
    points: list[Point]
    better: Literal["higher", "lower"]

    @property
    def ranked(self) -> list[Point]:
        """Best first, the diverged ones last.

        >>> points = [Point({"lr": v}, v, math.nan, 1, "", False, math.nan) for v in (0.1, math.nan, 0.3)]
        >>> [point.value for point in Swept("a", ["lr"], points, "higher").ranked]
        [0.3, 0.1, nan]
        """
        sign = 1 if self.better == "lower" else -1
        return sorted(self.points, key=lambda p: (not p.ok, not p.best, sign * p.value if p.ok else 0))


@dataclass(frozen=True)
class SweepResults:
    """All of `sweep.json`."""

    folder: Path
    metric: str
    better: Literal["higher", "lower"]
    rounds: int | None
    seeds: list[int]
    budget: int | None
    algorithms: list[Swept]


def is_sweep(folder: str | Path) -> bool:
    """Tell a sweep folder from a run folder.

    >>> is_sweep("nowhere")
    False
    """
    return (Path(folder) / "sweep.json").is_file()


def read_sweep(folder: str | Path) -> SweepResults:
    """Read a sweep folder; what is wrong with it is a ValueError of one line.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> found = {"words": ["lr"], "points": [{"values": {"lr": 0.1}, "value": 0.9, "best": True}]}
    >>> text = json.dumps({"metric": "validation_accuracy", "better": "higher", "algorithms": {"fedavg": found}})
    >>> _ = (folder / "sweep.json").write_text(text)
    >>> read_sweep(folder).algorithms[0].points[0].values
    {'lr': 0.1}
    """
    path = Path(folder) / "sweep.json"
    if not path.is_file():
        raise ValueError(f"{path}: not there; give a sweep folder, as `fedda sweep` writes it")
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path}: not valid JSON; let `fedda sweep` write it anew") from None
    found = _as(dict, found, f"{path}: it")
    better = found.get("better")
    if better not in ("higher", "lower"):
        raise ValueError(f"{path}: better must be 'higher' or 'lower', got {better!r}")
    algorithms = _as(dict, found.get("algorithms"), f"{path}: algorithms")
    return SweepResults(
        folder=Path(folder),
        metric=_as(str, found.get("metric"), f"{path}: metric"),
        better=better,
        rounds=_optional(int, found.get("rounds"), f"{path}: rounds"),
        seeds=_as(list, found.get("seeds", []), f"{path}: seeds"),
        budget=_optional(int, found.get("budget"), f"{path}: budget"),
        algorithms=[_swept(label, own, better, f"{path}: {label}") for label, own in algorithms.items()],
    )


def _swept(label: str, found: Any, better: Literal["higher", "lower"], place: str) -> Swept:
    found = _as(dict, found, place)
    words = [_as(str, word, f"{place}: a word") for word in _as(list, found.get("words"), f"{place}: words")]
    points = _as(list, found.get("points"), f"{place}: points")
    return Swept(label, words, [_point(p, words, f"{place}: points[{i}]") for i, p in enumerate(points)], better)


def _point(found: Any, words: list[str], place: str) -> Point:
    found = _as(dict, found, place)
    values = _as(dict, found.get("values"), f"{place}: values")
    for word in words:
        if word not in values:
            raise ValueError(f"{place}: values has no {word!r}, one of the words")
    note = found.get("note")
    return Point(
        # A list (a schedule) or a table (a prox) is a choice like a text.
        values={word: v if isinstance(v := values[word], Value) else json.dumps(v) for word in words},
        value=_number(found.get("value"), f"{place}: value"),
        std=_number(found.get("std"), f"{place}: std"),
        seeds=_optional(int, found.get("seeds"), f"{place}: seeds") or 0,
        note=_as(str, note, f"{place}: note") if note is not None else "",
        best=found.get("best") is True,
        gradients=_number(found.get("gradients"), f"{place}: gradients"),
    )


def _number(value: Any, place: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{place} must be a number or null, got {value!r}")
    return float(value) if math.isfinite(value) else math.nan


def _as(kind: type, value: Any, place: str) -> Any:
    if not isinstance(value, kind):
        names = {dict: "an object", list: "a list", str: "a text", int: "a whole number"}
        raise ValueError(f"{place} must be {names[kind]}, got {value!r:.80}")
    return value


def _optional(kind: type, value: Any, place: str) -> Any:
    return None if value is None else _as(kind, value, place)
