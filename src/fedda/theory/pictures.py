"""The pictures of `fedda theory`, as PNG and SVG."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..extras import needed_for
from ..report.plots import RC
from ..report.style import COLOURS, DASHES
from .findings import Findings

with needed_for("a picture"):
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullFormatter, ScalarFormatter

GUIDE: dict[str, Any] = {"color": "#8a8a8a", "linestyle": (0, (4, 2)), "linewidth": 1.0}


def decay(results: Findings, axes: list[Axes]) -> str:
    (panel,) = axes
    for colour, k, own in zip(COLOURS, results.decay.K, results.decay.mean.mean(axis=1), strict=False):
        panel.plot(results.decay.t, own, color=colour, label=f"K = {k}")
    t, first = results.decay.t, results.decay.mean.mean(axis=1)
    late = t >= t[-1] / 30
    guide = 1.8 * first[0, -1] * (t[late] / t[-1]) ** (-2 / 3)
    panel.plot(t[late], guide, label="slope -2/3", **GUIDE)
    level = results.plain.mean.mean(axis=1)
    for i, own in enumerate((level[0], level[-1])):
        text = f"mini-batch gradients, same rates (K = 1 and {results.plain.K[-1]})" if i == 0 else None
        panel.plot(results.plain.t, own, color="#bbbbbb", linewidth=1.0, label=text)
    label(panel, "lower left", xscale="log", yscale="log", xlabel="steps T", ylabel="mean of G over T steps")
    return "The measure G against the number of steps"


def speedup(results: Findings, axes: list[Axes]) -> str:
    (panel,) = axes
    curves = ((results.decay, "one Hessian", "o-"), (results.different, "Hessians of their own", "s--"))
    for colour, (curve, name, mark) in zip(COLOURS, curves, strict=False):
        end = curve.mean[..., -1]
        spread = end.std(axis=1)
        K = np.array(curve.K)
        text = f"{name}, T = {curve.t[-1]:,}"
        panel.errorbar(K, end.mean(axis=1), spread, fmt=mark, color=colour, markersize=4, capsize=2, label=text)
        first = end.mean(axis=1)[0]
        panel.plot(K, first * K ** (-2 / 3), **GUIDE, label="K^(-2/3)" if colour == COLOURS[0] else None)
    label(panel, xscale="log", yscale="log", xlabel="clients K", ylabel="mean of G over T steps")
    whole(panel, results.decay.K)
    return "The measure G against the number of clients"


def consensus(results: Findings, axes: list[Axes]) -> str:
    own = results.consensus
    pairs = (
        ("gradient estimates", own.estimates[1:], own.estimates_bound, "A13", 1),
        ("dual states", own.duals[2:], own.duals_bound[2:], "A8.1", 2),
    )
    for panel, (name, seen, bound, lemma, first) in zip(axes, pairs, strict=True):
        i = np.arange(first, first + len(seen))
        panel.plot(i, seen, color=COLOURS[0], marker="o", markersize=3.5, label="measured")
        panel.plot(i, bound, color=COLOURS[1], linestyle=(0, DASHES[1]), label=f"right side of lemma {lemma}")
        label(panel, yscale="log", xlabel="local step i", title=f"{name}: mean squared distance from their mean")
        panel.xaxis.set_major_locator(FixedLocator(list(i[:: max(1, len(i) // 5)])))
    return "Clients within a round, and what the lemmas allow"


def smoothness(results: Findings, axes: list[Axes]) -> str:
    panel, dots = axes
    shown = next(iter(results.smoothness.values()))
    for colour, source, name in zip(COLOURS, ("z", "nu"), ("from z", "from the last gradient"), strict=False):
        path = shown.late(source)[:, 0, -1]
        panel.plot(np.arange(len(path)), path - path.mean(), color=colour, linewidth=1.0, label=name)
    axes_labels = {"xlabel": "round (second half of the run)", "ylabel": "log h less its mean"}
    label(panel, **axes_labels, title="one coordinate, quadratics")
    names = list(results.smoothness)
    y = np.arange(len(names))[::-1]
    for shift, colour, source in ((0.18, COLOURS[0], "z"), (-0.18, COLOURS[1], "nu")):
        values = [results.smoothness[name].deviation(source).numpy() for name in names]
        means, errors = [v.mean() for v in values], [v.std(ddof=1) for v in values]
        dots.errorbar(means, y + shift / 2, xerr=errors, fmt="o", color=colour, markersize=4, capsize=2)
    dots.set(xscale="log", xlabel="deviation of log h over rounds", yticks=y)
    dots.set_yticklabels([name.replace(", ", ",\n") for name in names], fontsize=7)
    return "H over rounds, from z and from the last gradient"


def moments(results: Findings, axes: list[Axes]) -> str:
    own = results.moments
    K = np.array(own.K)
    shown = {"variance": own.variance, "error (variance + bias²)": {name: own.error(name) for name in own.variance}}
    labels = {"FedDA": "(mean over clients)², FedDA", "FAFED": "mean of squares, FAFED"}
    for panel, (name, values) in zip(axes, shown.items(), strict=True):
        for colour, (method, text) in zip(COLOURS, labels.items(), strict=False):
            panel.plot(K, values[method].mean(axis=0), color=colour, marker="o", markersize=3.5, label=text)
        first = own.variance["FedDA"].mean(axis=0)[0]
        panel.plot(K, first / K, **GUIDE, label="1/K")
        label(panel, xscale="log", yscale="log", xlabel="clients K", title=f"{name} of the second moment")
        whole(panel, own.K)
    low, high = zip(*(panel.get_ylim() for panel in axes), strict=True)
    for panel in axes:
        panel.set_ylim(min(low), max(high))
    return "The second moment against the number of clients: its variance, and its error"


def averaging(results: Findings, axes: list[Axes]) -> str:
    first, second = axes
    for colour, (name, own) in zip(COLOURS, results.averaging.items(), strict=False):
        rounds = np.arange(1, len(own.difference) + 1)
        first.plot(rounds, np.maximum(own.difference.max(axis=1), 1e-17), color=colour, label=name)
    label(first, yscale="log", xlabel="round", title="largest |x dual - x primal|")
    own = results.averaging["L1 ball"]
    for colour, way, dash in zip(COLOURS, own.path, ("-", (0, DASHES[1])), strict=False):
        second.plot(rounds, own.distance(way).mean(axis=1), color=colour, linestyle=dash, label=way)
    label(second, yscale="log", xlabel="round", title="L1 ball: distance from the constrained minimum")
    return "Dual and primal averaging, without a constraint and with one"


PICTURES: dict[str, tuple[Callable[[Findings, list[Axes]], str], int]] = {
    "decay": (decay, 1), "speedup": (speedup, 1), "consensus": (consensus, 2), "smoothness": (smoothness, 2),
    "moments": (moments, 2), "averaging": (averaging, 2),
}  # fmt: skip


def draw(results: Findings, folder: Path) -> list[Path]:
    """Write every picture into the folder, as PNG and SVG."""
    written = []
    for name, (fill, columns) in PICTURES.items():
        with rc_context(RC):
            figure = Figure(figsize=(4.7 if columns == 1 else 8.6, 3.4), dpi=120, layout="constrained")
            title = fill(results, list(figure.subplots(1, columns, squeeze=False)[0]))
            figure.suptitle(title, fontsize=10, x=0.01, ha="left")
            # Without dates the same numbers give the same file.
            for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
                path = folder / f"{name}.{kind}"
                figure.savefig(path, format=kind, metadata=metadata)
                written.append(path)
    return written


def label(panel: Axes, loc: Any = "best", **settings: Any) -> None:
    panel.set(**settings)
    panel.legend(frameon=False, fontsize=8, loc=loc)


def whole(panel: Axes, values: tuple[int, ...]) -> None:
    """Ticks at the numbers of clients."""
    panel.xaxis.set_major_locator(FixedLocator(list(values)))
    panel.xaxis.set_major_formatter(ScalarFormatter())
    panel.xaxis.set_minor_formatter(NullFormatter())
