"""Read a sweep folder: `sweep.json`, checked, with the points of every algorithm."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .names import SWEEP

Value = int | float | str | bool | None
Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Point:
    """One choice of hyper-parameters and the value it reached, which is NaN if it diverged."""

    values: dict[str, Value]
    value: float
    std: float = math.nan
    seeds: int = 0
    note: str = ""
    best: bool = False
    gradients: float = math.nan

    @property
    def ok(self) -> bool:
        return math.isfinite(self.value)


@dataclass(frozen=True)
class Swept:
    """The points of one algorithm; `params` are the hyper-parameters that were searched."""

    label: str
    params: list[str]
    points: list[Point]
    better: Better

    @property
    def ranked(self) -> list[Point]:
        """Best first, diverged points last.

        >>> points = [Point({"lr": v}, v) for v in (0.1, math.nan, 0.3)]
        >>> [point.value for point in Swept("a", ["lr"], points, "higher").ranked]
        [0.3, 0.1, nan]
        """
        sign = 1 if self.better == "lower" else -1
        return sorted(self.points, key=lambda p: (not p.ok, not p.best, sign * p.value if p.ok else 0))

    @property
    def best(self) -> Point | None:
        """The point that was chosen, else the best that did not diverge."""
        return next((point for point in self.ranked if point.ok), None)


@dataclass(frozen=True)
class SweepResults:
    """The content of `sweep.json`."""

    folder: Path
    metric: str
    better: Better
    rounds: int | None
    seeds: list[int]
    budget: int | None
    algorithms: list[Swept]


def is_sweep(folder: str | Path) -> bool:
    """Whether a folder holds a sweep, not a run.

    Args:
        folder: any folder.

    >>> is_sweep("nowhere")
    False
    """
    return (Path(folder) / SWEEP).is_file()


def read_sweep(folder: str | Path) -> SweepResults:
    """Read a sweep folder; a mistake in it is a ValueError of one line.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> table = {"words": ["lr"], "points": [{"values": {"lr": 0.1}, "value": 0.9, "best": True}]}
    >>> text = json.dumps({"metric": "validation_accuracy", "better": "higher", "algorithms": {"fedavg": table}})
    >>> _ = (folder / "sweep.json").write_text(text)
    >>> read_sweep(folder).algorithms[0].points[0].values
    {'lr': 0.1}
    """
    path = Path(folder) / SWEEP
    if not path.is_file():
        raise ValueError(f"{path}: not there; give a sweep folder, as `fedda sweep` writes it")
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path}: not valid JSON; run `fedda sweep` again") from None
    table = expect(dict, content, f"{path}: it")
    better = table.get("better")
    if better not in ("higher", "lower"):
        raise ValueError(f"{path}: better must be 'higher' or 'lower', got {better!r}")
    algorithms = expect(dict, table.get("algorithms"), f"{path}: algorithms")
    return SweepResults(
        folder=Path(folder),
        metric=expect(str, table.get("metric"), f"{path}: metric"),
        better=better,
        rounds=optional(int, table.get("rounds"), f"{path}: rounds"),
        seeds=expect(list, table.get("seeds", []), f"{path}: seeds"),
        budget=optional(int, table.get("budget"), f"{path}: budget"),
        algorithms=[_swept(label, value, better, f"{path}: {label}") for label, value in algorithms.items()],
    )


def _swept(label: str, value: Any, better: Better, where: str) -> Swept:
    table = expect(dict, value, where)
    params = [expect(str, name, f"{where}: a name") for name in expect(list, table.get("words"), f"{where}: words")]
    points = expect(list, table.get("points"), f"{where}: points")
    return Swept(label, params, [_point(p, params, f"{where}: points[{i}]") for i, p in enumerate(points)], better)


def _point(value: Any, params: list[str], where: str) -> Point:
    table = expect(dict, value, where)
    values = expect(dict, table.get("values"), f"{where}: values")
    for name in params:
        if name not in values:
            raise ValueError(f"{where}: values has no {name!r}, which is among the words")
    return Point(
        # A list (a schedule) or a table (a prox) is shown as text.
        values={name: v if isinstance(v := values[name], Value) else json.dumps(v) for name in params},
        value=_number(table.get("value"), f"{where}: value"),
        std=_number(table.get("std"), f"{where}: std"),
        seeds=optional(int, table.get("seeds"), f"{where}: seeds") or 0,
        note=optional(str, table.get("note"), f"{where}: note") or "",
        best=table.get("best") is True,
        gradients=_number(table.get("gradients"), f"{where}: gradients"),
    )


def _number(value: Any, where: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where} must be a number or null, got {value!r}")
    return float(value) if math.isfinite(value) else math.nan


def expect(kind: type, value: Any, where: str) -> Any:
    """A value from a JSON file, if it is of this kind."""
    if not isinstance(value, kind):
        names = {dict: "an object", list: "a list", str: "a text", int: "a whole number"}
        raise ValueError(f"{where} must be {names[kind]}, got {value!r:.80}")
    return value


def optional(kind: type, value: Any, where: str) -> Any:
    """The same, or None."""
    return None if value is None else expect(kind, value, where)
