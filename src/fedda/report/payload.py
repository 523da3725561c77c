"""What the page's script is given: every curve, thinned to what a panel can show."""

import json
from typing import Any

import numpy as np
from markupsafe import Markup

from fedda.report import style
from fedda.report.export import csv_text, latex_text, packed
from fedda.report.picture import Dash, Picture
from fedda.report.tables import Table
from fedda.runs.curves import Array, Curve

POINTS = 500  # a curve on the page: more than its panel has pixels


def payload(shown: Picture, found: Table, name: str) -> dict[str, Any]:
    """Give the data of the page; `name` begins the names of the files that it saves.

    >>> payload(Picture([""], ["test_loss"], [], []), Table([], [], [""]), "a")["metrics"][0]["name"]
    'Test loss'
    """
    axes, metrics = shown.axes, [m for line in shown.lines for m in line]
    series = [
        {
            "label": one.label,
            "row": one.row,
            "colour": one.colour,
            "dash": dashes(one.dash),
            "entries": one.entries,
            "curves": [_points(one.curves[m], axes) if m in one.curves else None for m in metrics],
        }
        for one in shown.series
        if one.curves
    ]
    return {
        "name": name,
        "axes": [vars(axis) for axis in axes],
        "metrics": [vars(style.metric(m)) for m in metrics],
        "lines": [len(line) for line in shown.lines],
        "rows": shown.rows,
        "series": series,
        "entries": [vars(entry) | {"dash": dashes(entry.dash)} for entry in shown.entries],
        "files": {"csv": packed(csv_text(shown)), "tex": packed(latex_text(found))},
    }


def embed(value: object) -> Markup:
    """Write a value as JSON that may stand in a script element.

    >>> print(embed({"a": "</script>"}))
    {"a":"\\u003c/script\\u003e"}
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    # Inside <script> only `<` can end the element or open a comment; JSON may write it as an escape.
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def dashes(dash: Dash) -> str:
    """Write a dash pattern as SVG does.

    >>> dashes((6, 2.5))
    '6 2.5'
    """
    return " ".join(map(str, dash))


def _points(curve: Curve, axes: list[style.Axis]) -> dict[str, list[float | None]]:
    size = len(curve.round)
    keep = np.unique(np.linspace(0, size - 1, min(size, POINTS)).round().astype(int))

    def short(values: Array) -> list[float | None]:
        # Beyond 1e300 the page's own arithmetic would overflow.
        return [float(f"{v:.6g}") if abs(v) < 1e300 else None for v in values[keep].tolist()]

    columns = {axis.key: short(getattr(curve, axis.key) / axis.scale) for axis in axes}
    return columns | {"mean": short(curve.mean), "std": short(curve.std), "seeds": short(curve.seeds)}
