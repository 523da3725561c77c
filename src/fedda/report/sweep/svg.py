"""One word against the metric, as SVG that follows the page's colours."""

import math

from markupsafe import Markup, escape
from matplotlib.ticker import MaxNLocator

from fedda.report.style import COLOURS, metric
from fedda.report.sweep.grid import SweepScale, best, scale, text
from fedda.report.sweep.shades import shades, widened
from fedda.runs.formats import plain, spread
from fedda.runs.sweeps import Point, Swept

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 270, 56, 16, 14, 44


def words(point: Point) -> str:
    """Write the values of a point.

    >>> words(Point({"lr": 0.1, "mu0": "zero"}, 0.5, 0.1, 1, "", False, 0))
    'lr = 0.1, mu0 = zero'
    """
    return ", ".join(f"{word} = {text(value)}" for word, value in point.values.items())


def marks(axis: SweepScale) -> list[tuple[float, str]]:
    """Give ticks for the axis of a word, as (place, text): its levels where they are few.

    >>> marks(SweepScale("lr", [0.01, 0.1], "log"))
    [(-2.0, '0.01'), (-1.0, '0.1')]
    """
    if len(axis.levels) <= 8 or axis.kind == "ordinal":
        step = math.ceil(len(axis.levels) / 8)
        return [(axis.place(level), text(level)) for level in axis.levels[::step]]
    low, high = axis.place(axis.levels[0]), axis.place(axis.levels[-1])
    if axis.kind == "linear" or high - low < 2:
        found = [float(v) for v in MaxNLocator(5).tick_values(low, high) if low <= v <= high]
        return [(v, plain(10**v, 2) if axis.kind == "log" else plain(v)) for v in found]
    powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
    return [(float(p), plain(10.0**p)) for p in powers][:: max(1, len(powers) // 5)]


def chart(swept: Swept, word: str, name: str, line: bool) -> Markup:
    """Draw every point over a word; with `line` through the means, where there is no other word.

    >>> points = [Point({"lr": v}, v, 0.1, 2, "", False, math.nan) for v in (0.1, 0.2, math.nan)]
    >>> chart(Swept("a", ["lr"], points[:2], "higher"), "lr", "validation_accuracy", True).count("<circle")
    3
    """
    axis, top = scale(swept, word), best(swept)
    shown = sorted(swept.points, key=lambda p: axis.place(p.values[word]))
    reach = [p.value + s * (0 if math.isnan(p.std) else p.std) for p in shown for s in (-1, 1)]
    own = widened(shades([v for v in reach if v > 0 or swept.better == "higher"], name, swept.better))
    first, last = axis.place(axis.levels[0]), axis.place(axis.levels[-1])
    if axis.kind == "ordinal" or first == last:
        first, last = first - 0.5, last + 0.5
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(place: float) -> float:
        return LEFT + 14 + (place - first) / (last - first) * (right - LEFT - 28)

    def y(value: float) -> float:
        share = own.share(value) if value > 0 or not own.log else -1.0
        return min(bottom + 5.0, max(TOP - 5.0, bottom - share * (bottom - TOP)))

    out = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(word)} against the metric">'
    ]
    for value, label in own.ticks():
        out.append(f'<path class="grid" d="M{LEFT} {y(value):.1f}H{right}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{label}</text>')
    for place, label in marks(axis):
        out.append(f'<path class="grid" d="M{x(place):.1f} {TOP}V{bottom}"/>')
        out.append(f'<text x="{x(place):.1f}" y="{bottom + 16}" text-anchor="middle">{escape(label[:14])}</text>')
    out.append(f'<path class="frame" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    kind = " (log scale)" if axis.kind == "log" else ""
    out.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(word)}{kind}</text>')
    ok = [(x(axis.place(p.values[word])), p) for p in shown if p.ok]
    if line and axis.kind != "ordinal" and len(ok) > 1:
        path = "L".join(f"{at:.1f} {y(p.value):.1f}" for at, p in ok)
        out.append(f'<path class="curve" stroke="{COLOURS[0]}" d="M{path}"/>')
    for at, point in ok:
        if line and not math.isnan(point.std):  # with other words many points stand at one place
            out.append(
                f'<path class="error" stroke="{COLOURS[0]}" d="M{at:.1f} {y(point.value - point.std):.1f}'
                f'V{y(point.value + point.std):.1f}"/>'
            )
        out.append(
            f'<circle cx="{at:.1f}" cy="{y(point.value):.1f}" r="4" fill="{COLOURS[0]}">{_hint(point, name)}</circle>'
        )
        if point is top:
            out.append(f'<circle class="chosen" cx="{at:.1f}" cy="{y(point.value):.1f}" r="8"/>')
    worst = bottom - 8 if swept.better == "higher" else TOP + 8
    for point in shown:
        if not point.ok:
            at = x(axis.place(point.values[word]))
            out.append(
                f'<path class="lost" stroke="{COLOURS[1]}" d="M{at - 4:.1f} {worst - 4}l8 8m0 -8l-8 8">'
                f"{_hint(point, name)}</path>"
            )
    return Markup("".join(out) + "</svg>")


def _hint(point: Point, name: str) -> str:
    std = None if math.isnan(point.std) else point.std
    reached = spread(point.value, std, metric(name).percent) if point.ok else point.note or "no value"
    return f"<title>{escape(words(point))}: {escape(reached)}</title>"
