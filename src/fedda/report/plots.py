"""The figures of a run, in the paper's layout: four panels per row, one row per group."""

import io
import math
import re
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.mathtext import MathTextParser
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from ..runs.curves import Curve
from ..runs.formats import plain
from ..runs.metrics import ShownMetric
from . import limits
from .picture import Picture
from .style import Axis

NAMES = 40  # in the legend: then colours and dashes repeat
ROWS = 12  # a taller figure does not fit on paper; the page shows all rows
RC: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.scale_dashes": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedda",  # ids in an SVG are random otherwise
}


INK, LINE = "#1c1f23", "#e4e4e4"  # on a page these follow its theme
THEMED = RC | {"text.parse_math": False, "grid.color": LINE}
THEMED |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
NO_DATE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}


def draw(shown: Picture, axis: Axis, kind: str = "png", dpi: int = 300) -> bytes:
    """Draw the panels of `shown` against `axis` as PNG, SVG or PDF; the same numbers give the same bytes."""
    rows = shown.rows[:ROWS]
    # All groups of one line of metrics are adjacent, so that a column compares them.
    lines = [(i, title, metrics) for metrics in shown.lines for i, title in enumerate(rows)]
    columns = min(4, max(1, *map(len, shown.lines)))
    lines = [(i, title, part) for i, title, metrics in lines for part in _parts(metrics, columns)]
    with rc_context(RC):
        # Without pyplot: a library must not change the user's figures or backend.
        figure = Figure(dpi=dpi, layout="constrained")
        under = _legend(figure, shown, columns)
        height = (2.9 if len(lines) == 1 else 2.45 * len(lines)) + 0.21 * under + 0.25
        figure.set_size_inches(max(4.4, 3.2 * columns), height)
        grid = figure.subplots(len(lines), columns, squeeze=False)
        for at, (row, title, metrics) in enumerate(lines):
            first = at == 0 or lines[at - 1][2] != metrics
            last = at == len(lines) - 1 or lines[at + 1][2] != metrics
            for column in range(columns):
                panel = grid[at, column]
                if column >= len(metrics):
                    panel.set_axis_off()
                    continue
                _panel(panel, shown, row, shown.metric(metrics[column]), axis)
                panel.set(title=shown.metric(metrics[column]).name if first else "", xlabel=axis.label if last else "")
            if title:
                name = grid[at, 0].set_ylabel("", fontsize=11, fontweight="bold")
                literal(name, title)
        file = io.BytesIO()
        figure.savefig(file, format=kind, metadata=NO_DATE[kind])
    if kind == "svg":  # hundredths of a point halve the length of a path and look the same
        return re.sub(rb' d="[^"]*"', lambda path: re.sub(rb"(\.\d\d)\d+", rb"\1", path[0]), file.getvalue())
    return file.getvalue()


def themed_svg(figure: Figure, label: str, width: int) -> Markup:
    """A figure, drawn in the style `THEMED`, as an SVG element for a page: its ink follows the page's theme."""
    file = io.StringIO()
    with rc_context(THEMED):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    drawing = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", file.getvalue(), flags=re.DOTALL)
    drawing = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), drawing)
    drawing = drawing.replace(INK, "var(--ink)").replace(LINE, "var(--line)")
    head = f'<svg class="drawing" role="img" aria-label="{escape(label)}" style="min-width:{width}px" '
    return Markup(head + drawing[drawing.index("<svg ") + 5 :])


def band(shown: Picture) -> str:
    """A note on the lines and the bands."""
    seeds = {int(n) for series in shown.series for curve in series.curves.values() for n in curve.seeds} or {1}
    if max(seeds) == 1:
        return "one seed"
    number = f"{max(seeds)}" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"
    return f"line: mean, band: ±1 standard deviation, over {number} seeds"


def lost(curve: Curve) -> int | None:
    """The index of the last point before a seed diverged; None if none did."""
    finite = np.flatnonzero(np.isfinite(curve.mean))
    return int(finite[-1]) if finite.size and finite[-1] < curve.mean.size - 1 else None


def _parts(metrics: list[str], most: int) -> list[list[str]]:
    return [metrics[i : i + most] for i in range(0, len(metrics), most)] or [[]]


def _panel(panel: Axes, shown: Picture, row: int, what: ShownMetric, axis: Axis) -> None:
    data = shown.data[row]  # all rows of a data set have one scale
    drawn = [(s, s.curves[what.key]) for s in shown.series if what.key in s.curves and shown.data[s.row] == data]
    ends = shown.limits(data, what.key)
    (low, high), log = ends.shown, ends.prefer_log
    end = max((float(np.nanmax(getattr(curve, axis.key), initial=0)) for _, curve in drawn), default=0) / axis.scale
    # Far outside the panel, but not too far for the renderer's integer arithmetic.
    outside = (low / 1e6, high * 1e6) if log else (low - 50 * (high - low), high + 50 * (high - low))
    for series, curve in drawn:
        if series.row != row:
            continue
        x = getattr(curve, axis.key) / axis.scale
        y = np.clip(curve.mean, *outside)
        finite = np.isfinite(np.concatenate([[math.nan], y, [math.nan]]))
        lone = finite[1:-1] & ~finite[:-2] & ~finite[2:]  # a point without a line to it
        line = (0, series.dash) if series.dash else "-"
        panel.plot(x, y, color=series.colour, linestyle=line, linewidth=1.5)
        if lone.any():
            panel.plot(x[lone], y[lone], color=series.colour, linestyle="", marker="o", markersize=4)
        if (last := lost(curve)) is not None:
            at = np.clip(curve.mean[last], low, high)
            panel.plot(x[last], at, color=series.colour, marker="x", markersize=7, markeredgewidth=2, clip_on=False)
        if np.isfinite(curve.std).any():
            bottom, top = limits.band(curve.mean, curve.std, log)
            panel.fill_between(
                x, np.clip(bottom, *outside), np.clip(top, *outside), color=series.colour, alpha=0.16, linewidth=0
            )
    panel.set(yscale="log" if log else "linear", ylim=(low, high))
    panel.set_xlim(-0.03 * (end or 1), 1.03 * (end or 1))
    panel.xaxis.set_major_locator(MaxNLocator(5))
    if what.percent:
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif not log:
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


def _legend(figure: Figure, shown: Picture, columns: int) -> int:
    """Draw the legend and return its number of lines."""
    entries = shown.entries[:NAMES]
    lines = [
        Line2D([], [], color=entry.colour or "#444444", linestyle=(0, entry.dash) if entry.dash else "-", linewidth=1.8)
        for entry in entries
    ]
    names = [entry.text if len(entry.text) <= 40 else entry.text[:39] + "…" for entry in entries]
    room = max(1, 30 * columns // (9 + max(map(len, names), default=1)))
    deep = math.ceil(len(names) / room)
    notes = [band(shown)]
    if any(lost(curve) is not None for series in shown.series for curve in series.curves.values()):
        notes.append("×: a seed diverged")
    if len(shown.rows) > ROWS:
        notes.append(f"the first {ROWS} of {len(shown.rows)} rows")
    if len(shown.entries) > NAMES:
        notes.append(f"the first {NAMES} of {len(shown.entries)} names")
    legend = figure.legend(
        lines,
        [str(i) for i in range(len(lines))],
        loc="outside lower center",
        ncols=math.ceil(len(names) / max(1, deep)) or 1,  # lines of equal length
        frameon=False,
        title="; ".join(notes),
        title_fontsize=8,
        handlelength=3.2,
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
        literal(text, name)  # set here, because a legend omits names that begin with `_`
    return deep + 1


def literal(text: Text, content: str) -> None:
    """Set a text. `$...$` in it is mathematics if matplotlib can read it, otherwise `$` is a dollar sign."""
    text.set_parse_math(is_math(content))
    text.set_text(content)


def is_math(content: str) -> bool:
    r"""Whether a text has mathematics that matplotlib can read.

    >>> is_math(r"FedDA, $\beta = 0.9$"), is_math("5 $"), is_math("$x_{$")
    (True, False, False)
    """
    if content.count("$") < 2 or content.count("$") % 2:
        return False
    try:
        MathTextParser("path").parse(content)
    except (ValueError, RuntimeError):
        return False
    return True
