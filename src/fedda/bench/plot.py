"""The figure of `fedda bench --scaling`: a panel for each quantity, both axes logarithmic."""

import io
from typing import Any

import numpy as np

from ..extras import needed_for
from ..report.plots import RC
from ..report.style import COLOURS
from ..runs.formats import plain as written
from .measure import PLAIN

with needed_for("a picture"):
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

# quantity, x axis, figure of a row, title
PANELS = (
    ("clients", "clients in a round", "ms_per_step", "ms a step"),
    ("clients", "clients in a round", "us_per_client_step", "µs a client and step"),
    ("steps", "local steps in a round", "ms_per_step", "ms a step"),
    ("parameters", "parameters of the model", "ms_per_step", "ms a step"),
    ("seeds", "seeds in one program", "ms_per_step", "ms a step"),
    ("population", "clients in all, 100 of them in a round", "ms_per_round", "ms a round"),
)
GREY, DASHED = "#8a8a8a", (0, (4, 2))


def draw(algorithms: dict[str, Any], title: str) -> bytes:
    """The PNG for {algorithm: {quantity: rows}}."""
    shown = [panel for panel in PANELS if any(panel[0] in own for own in algorithms.values())]
    with rc_context(RC):
        figure = Figure(figsize=(10.2, 3.1 * -(-len(shown) // 3) + 0.7), dpi=160, layout="constrained")
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        grid = figure.subplots(-(-len(shown) // 3), 3, squeeze=False).flatten()
        for panel, what in zip(grid, shown, strict=False):
            _panel(panel, algorithms, *what)
        for panel in grid[len(shown) :]:
            panel.set_axis_off()
        lines = [Line2D([], [], color=colour, marker="o", markersize=3.5) for colour in COLOURS[: len(algorithms)]]
        lines += [
            Line2D([], [], color="#444444", linestyle=DASHED, marker="o", markersize=3.5, markerfacecolor="white"),
            Line2D([], [], color=GREY, linewidth=0.8),
        ]
        names = [*algorithms, "a plain loop over clients", "in proportion"]
        figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False, handlelength=3)
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _panel(panel: Axes, algorithms: dict[str, Any], quantity: str, label: str, figure: str, title: str) -> None:
    panel.set(xscale="log", yscale="log", xlabel=label, title=title)
    drawn: list[float] = []
    for colour, own in zip(COLOURS, algorithms.values(), strict=False):
        rows = own.get(quantity, [])
        for who, style in (("fedda", "-"), (PLAIN, DASHED)):
            there = [row for row in rows if who in row]
            if not there:
                continue
            x, y = np.array([row["value"] for row in there]), np.array([row[who][figure] for row in there])
            fill = colour if who == "fedda" else "white"  # tells a single point of a curve from the dashed one
            panel.plot(x, y, color=colour, linestyle=style, marker="o", markersize=3.5, markerfacecolor=fill)
            drawn.extend(y)
            first = own is next(iter(algorithms.values()))
            if who == "fedda" and first and figure != "us_per_client_step" and quantity != "steps":
                panel.plot(x, y[0] * x / x[0], color=GREY, linewidth=0.8, zorder=0)
    if drawn:  # the guide may leave the panel, so the curves are not flattened
        middle = np.sqrt(min(drawn) * max(drawn))
        panel.set_ylim(min(min(drawn) / 1.4, middle / 4), max(max(drawn) * 1.4, middle * 4))
    values = sorted({row["value"] for own in algorithms.values() for row in own.get(quantity, [])})
    panel.xaxis.set_major_locator(LogLocator() if quantity == "parameters" else FixedLocator(values))
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(FuncFormatter(_number))
        axis.set_minor_formatter(NullFormatter())


def _number(value: float, _: object) -> str:
    """Large numbers with separators, small numbers as they are."""
    return f"{value:,.0f}" if value >= 10 else written(value)
