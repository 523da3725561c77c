"""Axes, colours and dashes, the same in the figures and on the page."""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..runs.curves import Curve

# Okabe and Ito's palette without black and yellow, which vanish on a dark or a light page. Violet and crimson are as
# different from the others as these from each other, for colour-blind readers too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a4fff", "#dd0044")
# 8 colours and 5 patterns have no common factor: a pair repeats only after 40 curves.
DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2.5), (1.5, 2), (7, 2, 1.5, 2), (12, 3))


def pen(index: int) -> tuple[str, tuple[float, ...]]:
    """The colour and the dash pattern of the curve with this index."""
    return COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]


# The methods that are most often compared, in an order that keeps neighbours apart.
METHODS = (
    "fedda-mvr", "fedavg", "fedcm", "stem", "scaffold", "fedadam", "fedda-2-1", "fedda-cv", "local-amsgrad", "mime-mvr",
    "fedavgm", "local-adapt", "fedda-1-2", "fedda-2-2", "feddualavg", "fedmid", "fedda-cv-mvr", "fedprox",
)  # fmt: skip


def pen_of(method: str) -> tuple[str, tuple[float, ...]]:
    """The colour and the dash pattern of a method, the same in every figure."""
    return pen(METHODS.index(method) if method in METHODS else len(METHODS) + zlib.crc32(method.encode()))


@dataclass(frozen=True)
class Axis:
    """An x axis: a field of `Curve`, the text of its button, its label, the size of its unit, its figure's name."""

    key: Literal["round", "gradients", "bytes", "seconds"]
    name: str
    label: str
    scale: float
    figure: str | None = None


_ONE = ((1, ""),)
_COUNT = ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"), (1, ""))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))
_TIME = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
_AXES = (
    (Axis("round", "Rounds", "round", 1, "rounds"), _ONE),
    (Axis("gradients", "Gradients", "gradient evaluations", 1, "gradients"), _COUNT),
    (Axis("bytes", "Bytes", "sent up and down", 1, "bytes"), _BYTES),
    (Axis("seconds", "Time", "time", 1), _TIME),
)


def axes(curves: Iterable[Curve]) -> list[Axis]:
    """The x axes for which these curves have values, each in a unit that keeps the ticks short."""
    shown, curves = [], list(curves)
    for axis, units in _AXES:
        values = np.concatenate([np.zeros(1), *(getattr(curve, axis.key) for curve in curves)])
        top = float(np.nanmax(values))
        if top > 0 or axis.key == "round":
            scale, unit = next((u for u in units if top >= 2 * u[0]), units[-1])
            label = f"{axis.label} ({unit})" if unit else axis.label
            shown.append(replace(axis, label=label, scale=scale))
    return shown
