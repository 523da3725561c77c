"""The figure of one algorithm's sweep: charts, scatters and heat maps, drawn once, as PNG and as SVG for the page."""

import io
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from markupsafe import Markup, escape
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ...runs.formats import plain, spread
from ...runs.metrics import metric
from ...runs.sweeps import Better, Point, Swept
from ..plots import INK, THEMED, themed_svg
from ..style import COLOURS, pen_of
from .grid import Map, SweepScale, charted, key, maps, scale, text

COLUMNS = 3
LOST = COLOURS[1]
VIRIDIS = colormaps["viridis"]  # equal steps of brightness, so it is readable without colours


@dataclass(frozen=True)
class ValueScale:
    """The range of a metric's values; logarithmic if a loss spans more than two decades."""

    low: float
    high: float
    log: bool
    percent: bool
    better: Better

    @classmethod
    def of(cls, values: Iterable[float], name: str, better: Better) -> "ValueScale":
        """The range of finite values of the metric `name`."""
        finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
        low, high = min(finite), max(finite)
        return cls(low, high, better == "lower" and low > 0 and high > 100 * low, metric(name).percent, better)

    def widened(self) -> "ValueScale":
        """The same with room at both ends."""
        if self.log:
            margin = (self.high / self.low) ** 0.1
            return replace(self, low=self.low / margin, high=self.high * margin)
        margin = 0.1 * (self.high - self.low) or 0.1 * abs(self.high) or 1.0
        return replace(self, low=self.low - margin, high=self.high + margin)

    def colours(self, value: float) -> tuple[str, str]:
        """The colour of a value, brighter if better, and a dark or light one for the text on it.

        >>> ValueScale(0.0, 1.0, False, True, "higher").colours(1.0)
        ('#fde725', '#111111')
        """
        share = 0.5
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        elif self.high > self.low:
            share = (value - self.low) / (self.high - self.low)
        red, green, blue, _ = VIRIDIS(share if self.better == "higher" else 1 - share)
        return to_hex((red, green, blue)), "#111111" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.45 else "#ffffff"

    def text(self, value: float) -> str:
        """A value in few characters."""
        return f"{100 * value:.1f}" if self.percent else plain(value, 3)

    def ticks(self) -> list[tuple[float, str]]:
        """Ticks as (value, text) from low to high."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            values = [10.0**p for p in powers][:: max(1, len(powers) // 5)]
        else:
            values = [float(v) for v in MaxNLocator(4).tick_values(self.low, self.high)]
        inside = [v for v in values if self.low - 1e-9 * abs(self.low) <= v <= self.high + 1e-9 * abs(self.high)]
        return [(v, f"{plain(100 * v)} %" if self.percent else plain(v)) for v in inside]


def values_of(point: Point) -> str:
    """The hyper-parameters of a point."""
    return ", ".join(f"{name} = {text(value)}" for name, value in point.values.items())


def reached(point: Point, name: str) -> str:
    """The value of a point with its standard deviation."""
    if not point.ok:
        return point.note or "no value"
    return spread(point.value, None if math.isnan(point.std) else point.std, metric(name).percent)


class SweepFigure:
    """The figure of one algorithm's sweep by the metric `name`.

    >>> swept = Swept("a", ["lr"], [Point({"lr": v}, v, 0.1, 2) for v in (0.1, 0.2)], "higher")
    >>> figure = SweepFigure(swept, "validation_accuracy")
    >>> figure.png()[1:4], figure.svg().count('class="point"')
    (b'PNG', 2)
    """

    def __init__(self, swept: Swept, name: str):
        self.swept, self.name, self.colour = swept, name, pen_of(swept.label)[0]
        self.hints: list[str] = []  # texts that the page shows for a marked element
        params, heat = charted(swept), maps(swept)
        count = max(1, len(params) + len(heat))
        self.columns = min(COLUMNS, count)
        rows = math.ceil(count / self.columns)
        with rc_context(THEMED):
            self.figure = Figure(figsize=(4.4 * self.columns, 3.4 * rows + 0.3), dpi=300, layout="constrained")
            self.figure.suptitle(swept.label, fontsize=11, fontweight="bold")
            panels = self.figure.subplots(rows, self.columns, squeeze=False).ravel().tolist()
            for panel in panels[len(params) + len(heat) :]:
                panel.set_axis_off()
            if swept.points:
                for panel, param in zip(panels, params, strict=False):
                    self._chart(panel, scale(swept, param))
                for panel, one in zip(panels[len(params) :], heat, strict=False):
                    self._heat_map(panel, one)

    def png(self) -> bytes:
        file = io.BytesIO()
        with rc_context(THEMED):
            self.figure.savefig(file, format="png", metadata={"Software": None})
        return file.getvalue()

    def svg(self) -> Markup:
        """An SVG element for the page: its ink follows the theme, and a marked element shows its hint."""
        label = f"{self.swept.label}: {metric(self.name).name} by hyper-parameter"
        drawing = re.sub(
            r'<g id="mark-(\w+)-(\d+)">',
            lambda mark: f'<g class="{mark[1]}"><title>{escape(self.hints[int(mark[2])])}</title>',
            themed_svg(self.figure, label, 300 * self.columns),
        )
        return Markup(re.sub(r'<g id="[^"]*"', "<g", drawing))

    def _mark(self, kind: str, point: Point) -> str:
        self.hints.append(f"{values_of(point)}: {reached(point, self.name)}")
        return f"mark-{kind}-{len(self.hints) - 1}"

    def _chart(self, panel: Axes, axis: SweepScale) -> None:
        swept, top, alone = self.swept, self.swept.best, len(self.swept.params) == 1
        ok = sorted(((axis.position(p.values[axis.name]), p) for p in swept.points if p.ok), key=lambda pair: pair[0])
        reach = [p.value + s * (0 if math.isnan(p.std) else p.std) for _, p in ok for s in (-1, 1)]
        values = ValueScale.of([v for v in reach if v > 0 or swept.better == "higher"], self.name, swept.better)
        values = values.widened()
        if alone and ok:  # with other hyper-parameters several points stand at one position, and bars would hide them
            errors = [0 if math.isnan(p.std) else p.std for _, p in ok]
            line = "-" if axis.kind != "ordinal" else ""
            x, y = [at for at, _ in ok], [p.value for _, p in ok]
            panel.errorbar(x, y, errors, color=self.colour, linestyle=line, capsize=2, linewidth=1.4)
        for at, point in ok:
            panel.plot([at], [point.value], "o", color=self.colour, markersize=4, gid=self._mark("point", point))
            if point is top:
                panel.plot([at], [point.value], "o", color=INK, markersize=10, fillstyle="none")
        edge = 0.03 if swept.better == "higher" else 0.97
        for point in swept.points:
            if not point.ok:
                at, gid = axis.position(point.values[axis.name]), self._mark("lost", point)
                panel.plot(
                    [at],
                    [edge],
                    "x",
                    color=LOST,
                    markersize=8,
                    markeredgewidth=2,
                    transform=panel.get_xaxis_transform(),
                    gid=gid,
                )
        if axis.kind == "ordinal":
            panel.set_xlim(-0.5, len(axis.levels) - 0.5)
        panel.set(yscale="log" if values.log else "linear", ylim=(values.low, values.high))
        panel.minorticks_off()
        panel.set_xticks([at for at, _ in axis.ticks()], [label[:14] for _, label in axis.ticks()])
        panel.set_yticks([at for at, _ in values.ticks()], [label for _, label in values.ticks()])
        panel.set_xlabel(f"{axis.name} (log scale)" if axis.kind == "log" else axis.name)
        panel.set_ylabel(metric(self.name).name)

    def _heat_map(self, panel: Axes, shown: Map) -> None:
        values = ValueScale.of((p.value for p in self.swept.points), self.name, self.swept.better)
        across, down = shown.across.levels, shown.down.levels
        numbers_fit = len(across) <= 9 and len(down) <= 12
        for i, below in enumerate(down):
            for j, beside in enumerate(across):
                corner, pair = (j - 0.5, i - 0.5), (key(below), key(beside))
                point = shown.best.get(pair)
                if point is None:
                    hatch = "////" if pair in shown.best else None
                    empty = Rectangle(corner, 1, 1, facecolor="none", edgecolor="#999999", hatch=hatch, linewidth=0)
                    panel.add_patch(empty)
                    continue
                chosen = point is self.swept.best
                fill, ink = values.colours(point.value)
                gid = self._mark("chosen" if chosen else "cell", point)
                panel.add_patch(Rectangle(corner, 1, 1, facecolor=fill, edgecolor="white", linewidth=0.5, gid=gid))
                if numbers_fit:
                    number = ("★ " if chosen else "") + values.text(point.value)
                    panel.text(j, i, number, ha="center", va="center", color=ink, fontsize=8)
                if chosen:
                    frame = Rectangle((j - 0.46, i - 0.46), 0.92, 0.92, fill=False, edgecolor=LOST, linewidth=2)
                    panel.add_patch(frame)
        panel.set(xlim=(-0.5, len(across) - 0.5), ylim=(-0.5, len(down) - 0.5))
        panel.set(xlabel=shown.across.name, ylabel=shown.down.name)
        for side, levels in ((panel.xaxis, across), (panel.yaxis, down)):
            step = math.ceil(len(levels) / 12)
            side.set_ticks(range(0, len(levels), step), [text(v)[:14] for v in levels[::step]])
        panel.grid(False)
        worst, best = (values.low, values.high)[:: 1 if self.swept.better == "higher" else -1]
        rest = f", best over {', '.join(shown.rest)}" if shown.rest else ""
        unit = " in %" if values.percent else ""
        ends = f"{values.text(worst)} (dark) to {values.text(best)} (bright)"
        panel.set_title(f"{metric(self.name).name}{unit}{rest}\n{ends}", fontsize=9)
