"""The figures of a run as PNG, in the paper's layout: one row, one panel a metric."""

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from fedda.report.curves import Curve
from fedda.report.format import plain
from fedda.report.read import Run
from fedda.report.style import Axis, Metric, metric, pen

PANELS = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "density")
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
}


def draw(run: Run, axis: Axis) -> bytes:
    """Draw the panels of `run` against `axis` and give the PNG.

    >>> from pathlib import Path
    >>> from fedda.report.curves import aggregate
    >>> rows = [{"algorithm": "a", "seed": 0, "round": r, "train_loss": 1 / (r + 1)} for r in range(5)]
    >>> curves = aggregate(rows, {}, ["train_loss"])
    >>> run = Run(Path("a"), {}, {}, {}, rows, {}, ["a"], ["train_loss"], curves)
    >>> draw(run, Axis("round", "Rounds", "round", 1))[1:4]
    b'PNG'
    """
    shown = [key for key in PANELS if key in run.metrics] or run.metrics[:4]
    with rc_context(RC):
        # No pyplot: a library must not touch the user's figures or backend.
        figure = Figure(figsize=(max(4.4, 3.2 * len(shown)), 3.5), dpi=160, layout="constrained")
        FigureCanvasAgg(figure)
        for panel, key in zip(np.atleast_1d(figure.subplots(1, max(1, len(shown)))), shown, strict=False):
            _panel(panel, run, metric(key), axis)
        _legend(figure, run, len(shown))
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def band(run: Run) -> str:
    """Say in words what the lines and the bands are.

    >>> from pathlib import Path
    >>> band(Run(Path("a"), {}, {}, {}, [], {}, [], [], {}))
    'one seed'
    """
    seeds = {int(n) for own in run.curves.values() for curve in own.values() for n in curve.seeds} or {1}
    if max(seeds) == 1:
        return "one seed"
    number = f"{max(seeds)}" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"
    return f"line: mean, band: ±1 standard deviation, over {number} seeds"


def limits(curves: Sequence[Curve], shown: Metric) -> tuple[float, float, bool]:
    """Give bottom and top of the y axis and whether it is logarithmic (a loss over more than two decades).

    The axis ends at ten times the highest start: a curve that diverges leaves the panel instead of flattening
    the others.

    >>> x = np.arange(3.0)
    >>> curve = Curve(x, x, x, x, mean=np.array([1.0, 0.1, 0.001]), std=x * math.nan, seeds=x)
    >>> limits([curve], metric("train_loss"))[2]
    True
    """
    means = [curve.mean[np.isfinite(curve.mean)] for curve in curves]
    means = [mean for mean in means if mean.size]
    if not means:
        return 0.0, 1.0, False
    low, high = float(min(m.min() for m in means)), float(max(m.max() for m in means))
    start = float(max(m[0] for m in means))
    cap = 10 * start if shown.better == "lower" and start > 0 else math.inf
    if shown.better == "lower" and low > 0 and min(high, cap) > 100 * low:
        margin = (min(high, cap) / low) ** 0.04
        return low / margin, min(high, cap) * margin, True
    for curve in curves:
        std = np.nan_to_num(curve.std)
        low = float(np.nanmin([low, *(curve.mean - std)]))
        high = float(np.nanmax([high, *(curve.mean + std)]))
    high = min(high, cap)
    low = max(low, -cap)
    margin = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
    low, high = low - margin, high + margin
    return (max(low, -0.02), min(high, 1.02), False) if shown.percent else (low, high, False)


def _panel(panel: Axes, run: Run, shown: Metric, axis: Axis) -> None:
    found = [(i, run.curves.get(label, {}).get(shown.key)) for i, label in enumerate(run.labels)]
    own = [(i, curve) for i, curve in found if curve is not None]
    low, high, log = limits([curve for _, curve in own], shown)
    # Far outside the panel, yet near enough for the renderer's integer arithmetic.
    outside = (low / 1e6, high * 1e6) if log else (low - 50 * (high - low), high + 50 * (high - low))
    for i, curve in own:
        colour, dash = pen(i)
        x = getattr(curve, axis.key) / axis.scale
        y = np.clip(curve.mean, *outside)
        there = np.isfinite(np.concatenate([[math.nan], y, [math.nan]]))
        lone = there[1:-1] & ~there[:-2] & ~there[2:]  # no line leads to such a point
        panel.plot(x, y, color=colour, linestyle=(0, dash) if dash else "-", linewidth=1.5)
        panel.plot(x[lone], y[lone], color=colour, linestyle="", marker="o", markersize=4)
        if np.isfinite(curve.std).any():
            bottom, top = np.clip(curve.mean - curve.std, *outside), np.clip(curve.mean + curve.std, *outside)
            panel.fill_between(x, bottom, top, color=colour, alpha=0.16, linewidth=0)
    panel.set(title=shown.name, xlabel=axis.label, yscale="log" if log else "linear", ylim=(low, high))
    panel.xaxis.set_major_locator(MaxNLocator(5))
    if shown.percent:
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif not log:
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


def _legend(figure: Figure, run: Run, panels: int) -> None:
    drawn = [(i, label) for i, label in enumerate(run.labels) if run.curves.get(label)]
    lines = []
    for i, _ in drawn:
        colour, dash = pen(i)
        lines.append(Line2D([], [], color=colour, linestyle=(0, dash) if dash else "-", linewidth=1.8))
    names = [label if len(label) <= 40 else label[:39] + "…" for _, label in drawn]
    legend = figure.legend(
        lines,
        [str(i) for i, _ in drawn],
        loc="outside lower center",
        ncols=max(1, min(len(names), round(1.6 * max(panels, 1)), 120 // max(map(len, names), default=1))),
        frameon=False,
        title=band(run),
        title_fontsize=8,
        handlelength=3.2,
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)  # a label is the user's text: `$` is a dollar
        text.set_text(name)  # set here, since a legend leaves out names that begin with `_`
