"""The figure of one algorithm's sweep as PNG: lines, heat maps or scatters, as on the page."""

import io
import math

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fedda.report.plots import RC, literal
from fedda.report.style import COLOURS, metric
from fedda.report.sweep.grid import Map, best, maps, scale, text
from fedda.report.sweep.shades import Shades, shades, widened
from fedda.report.sweep.svg import marks
from fedda.runs.sweeps import Swept

COLUMNS = 3


def charted(swept: Swept) -> list[str]:
    """List the words that are drawn against the metric: all but those that one heat map shows whole.

    >>> charted(Swept("a", ["lr"], [], "higher"))
    ['lr']
    """
    return [] if len(swept.words) == 2 and maps(swept) else swept.words


def draw(swept: Swept, name: str) -> bytes:
    """Draw the sweep of one algorithm and give the PNG.

    >>> from fedda.runs.sweeps import Point
    >>> points = [Point({"lr": v}, v, 0.1, 2, "", False, math.nan) for v in (0.1, 0.2)]
    >>> draw(Swept("a", ["lr"], points, "higher"), "validation_accuracy")[1:4]
    b'PNG'
    """
    words, heat = charted(swept), maps(swept)
    count = max(1, len(words) + len(heat))
    columns = min(COLUMNS, count)
    rows = math.ceil(count / columns)
    with rc_context(RC):
        figure = Figure(figsize=(4.4 * columns, 3.4 * rows + 0.3), dpi=160, layout="constrained")
        FigureCanvasAgg(figure)
        literal(figure.suptitle("", fontsize=11, fontweight="bold"), swept.label)
        panels = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
        for panel in panels[len(words) + len(heat) :]:
            panel.set_axis_off()
        if swept.points:
            for panel, word in zip(panels, words, strict=False):
                _chart(panel, swept, word, name)
            for panel, one in zip(panels[len(words) :], heat, strict=False):
                _heat(panel, one, swept, name)
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _chart(panel: Axes, swept: Swept, word: str, name: str) -> None:
    axis, top = scale(swept, word), best(swept)
    ok = sorted(((axis.place(p.values[word]), p) for p in swept.points if p.ok), key=lambda pair: pair[0])
    reach = [p.value + s * (0 if math.isnan(p.std) else p.std) for _, p in ok for s in (-1, 1)]
    own = widened(shades([v for v in reach if v > 0 or swept.better == "higher"], name, swept.better))
    x, y = [at for at, _ in ok], [p.value for _, p in ok]
    line = "-" if len(swept.words) == 1 and axis.kind != "ordinal" else ""
    # Where other words vary as well, many points stand at one place: their bars would hide them.
    errors = [0 if math.isnan(p.std) else p.std for _, p in ok] if len(swept.words) == 1 else None
    panel.errorbar(x, y, errors, color=COLOURS[0], linestyle=line, marker="o", markersize=4, capsize=2, linewidth=1.4)
    if top is not None:
        at = axis.place(top.values[word])
        panel.plot([at], [top.value], linestyle="", marker="o", markersize=10, fillstyle="none", color="#1c1f23")
    lost = [axis.place(p.values[word]) for p in swept.points if not p.ok]
    edge = 0.03 if swept.better == "higher" else 0.97
    panel.plot(lost, [edge] * len(lost), "x", color=COLOURS[1], transform=panel.get_xaxis_transform())
    if axis.kind == "ordinal":
        panel.set_xlim(-0.5, len(axis.levels) - 0.5)
    panel.set(yscale="log" if own.log else "linear", ylim=(own.low, own.high))
    panel.set_xticks([at for at, _ in marks(axis)], [label[:14] for _, label in marks(axis)])
    panel.set_yticks([at for at, _ in own.ticks()], [label for _, label in own.ticks()], minor=False)
    literal(panel.set_xlabel(""), f"{word} (log scale)" if axis.kind == "log" else word)
    panel.set_ylabel(metric(name).name)


def _heat(panel: Axes, shown: Map, swept: Swept, name: str) -> None:
    own: Shades = shades((p.value for p in swept.points), name, swept.better)
    top = best(swept)
    fits = len(shown.across.levels) <= 9 and len(shown.down.levels) <= 12
    for i, row in enumerate(shown.cells):
        for j, cell in enumerate(row):
            corner = (j - 0.5, i - 0.5)
            if cell.point is None:
                hatch = "////" if cell.tried else None
                panel.add_patch(
                    Rectangle(corner, 1, 1, facecolor="#f4f4f4", edgecolor="#999999", hatch=hatch, linewidth=0)
                )
                continue
            shade, ink = own.colours(cell.point.value)
            panel.add_patch(Rectangle(corner, 1, 1, facecolor=shade, edgecolor="white", linewidth=0.5))
            if fits:
                star = "★ " if cell.point is top else ""
                panel.text(j, i, star + own.text(cell.point.value), ha="center", va="center", color=ink, fontsize=8)
            if cell.point is top:
                panel.add_patch(
                    Rectangle((j - 0.46, i - 0.46), 0.92, 0.92, fill=False, edgecolor=COLOURS[1], linewidth=2)
                )
    panel.set(xlim=(-0.5, len(shown.across.levels) - 0.5), ylim=(-0.5, len(shown.down.levels) - 0.5))
    _levels(panel, shown)
    panel.grid(False)
    unit = " in %" if own.percent else ""
    rest = f", best over {', '.join(shown.rest)}" if shown.rest else ""
    literal(panel.set_title("", fontsize=9), f"{metric(name).name}{unit}{rest}")


def _levels(panel: Axes, shown: Map) -> None:
    for side, levels, put in (
        (panel.xaxis, shown.across, panel.set_xlabel),
        (panel.yaxis, shown.down, panel.set_ylabel),
    ):
        step = math.ceil(len(levels.levels) / 12)
        side.set_ticks(range(0, len(levels.levels), step), [text(v)[:14] for v in levels.levels[::step]])
        literal(put(""), levels.word)
