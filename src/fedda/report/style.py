"""Axes, colours and dashes, the same in the figures and on the page."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..runs.curves import Curve

# Each colour has a contrast of 3:1 or more on white and on the page's dark background, and differs from the others for
# colour-blind readers too: the first three are Okabe and Ito's, the others were found by a search over such colours.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#c30f96", "#872dff", "#6996c3", "#ff4b78", "#b469ff")
# The first eight curves are solid; a pair of a colour and a pattern repeats only after 40 curves.
DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2.5), (1.5, 2), (7, 2, 1.5, 2), (12, 3))
Pen = tuple[str, tuple[float, ...]]


def pen(index: int) -> Pen:
    """The colour and the dash pattern of the curve with this index."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]


# Every method has a place of its own: the ones that are most often compared first, so that their colours differ.
METHODS = (
    "fedda-mvr", "fedavg", "fedcm", "stem", "scaffold", "fedadam", "fedda-2-1", "fedda-cv", "local-amsgrad", "mime-mvr",
    "fedavgm", "local-adapt", "fedda-1-2", "fedda-2-2", "feddualavg", "fedmid", "fedda-cv-mvr", "fedprox", "feddyn",
    "mimelite", "mime", "fafed", "fedexp", "fedglomo", "fednova", "fedyogi", "fedadagrad", "fedams", "scaffold-m",
    "mimelite-mvr", "fedavg-subgradient", "fedda",
)  # fmt: skip
SAME = {"fedda-1-1": "fedda-mvr"}  # other names of a method


def pen_of(method: str) -> Pen:
    """The colour and the dash pattern of a method, the same in every figure and on every page.

    >>> pen_of("fedda-mvr") == pen_of("fedda-1-1"), pen_of("fedavg")[0]
    (True, '#d55e00')
    """
    place = _place(method)
    return pen(len(METHODS) + zlib.crc32(method.encode()) if place is None else place)


def _place(method: str) -> int | None:
    name = SAME.get(method.lower(), method.lower())
    return METHODS.index(name) if name in METHODS else None


def distinct_pens(methods: Sequence[str]) -> list[Pen]:
    """The pens of curves that are shown together, by the names of their methods: the colour is the method's, and a
    second curve of one method gets other dashes. A name that is no method of fedda gives way to those that are.

    >>> distinct_pens(["fedavg", "fedavg"])
    [('#d55e00', ()), ('#d55e00', (6, 2.5))]
    """
    pens: dict[int, Pen] = {}
    everything = [pen(i) for i in range(len(COLOURS) * len(DASHES))]
    for i in sorted(range(len(methods)), key=lambda i: _place(methods[i]) is None):
        own, used = pen_of(methods[i]), {colour for colour, _ in pens.values()}
        again = any(methods[j] == methods[i] for j in pens)
        if _place(methods[i]) is None and not again and own[0] in used:
            own = next((one for one in everything if one[0] not in used), own)
        choices = [own, *((own[0], dash) for dash in DASHES), *everything]
        pens[i] = next((one for one in choices if one not in pens.values()), own)
    return [pens[i] for i in range(len(methods))]


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
