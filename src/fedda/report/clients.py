"""How the values of a metric are spread over the clients: a histogram with one line for each algorithm, and a table."""

import io
import math
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ..runs.final_values import client_lines, client_metrics, client_values
from ..runs.reading import RecordedRun
from .picture import Picture
from .plots import RC, literal

BINS = 20


def client_section(run: RecordedRun, shown: Picture) -> dict[str, Any] | None:
    """The histogram and the lines of the table for the page; None if the run has no rows of clients."""
    lines = client_lines(run)
    if not lines:
        return None
    keys = client_metrics(run)
    return {"figure": histogram(run, shown, keys), "lines": lines, "tuned": len(keys) > 1}


def span(shares: np.ndarray[Any, Any]) -> tuple[float, float]:
    """The whole percents around the shares, ten of them at least: if all clients are at 95 %, the rest stays out.

    >>> span(np.array([0.952, 0.981])), span(np.array([0.2, 0.9])), span(np.array([]))
    ((0.89, 0.99), (0.2, 0.9), (0.0, 1.0))
    """
    finite = shares[np.isfinite(shares)]
    if not len(finite):
        return 0.0, 1.0
    low, high = math.floor(100 * finite.min()), math.ceil(100 * finite.max())
    low = max(0, min(low, high - 10))
    return low / 100, max(high, low + 10) / 100


def histogram(run: RecordedRun, shown: Picture, keys: list[str]) -> Markup:
    """One panel for each metric, as SVG; clients of all seeds are counted together."""
    with rc_context(RC):
        figure = Figure(figsize=(4.6 * len(keys), 2.9), layout="constrained")
        for panel, key in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
            what = shown.metric(key)
            columns = [
                (series, [v for values in client_values(run, series.own, key).values() for v in values])
                for series in shown.series
            ]
            everything = np.array([v for _, values in columns for v in values])
            edges = np.histogram_bin_edges(everything, BINS, span(everything) if what.percent else None)
            for series, values in columns:
                if values:
                    counts = np.histogram(values, edges)[0]
                    dash = (0, series.dash) if series.dash else "-"
                    panel.stairs(counts, edges, color=series.colour, linestyle=dash, linewidth=1.5)
            literal(panel.set_title(""), what.name)
            panel.set_xlabel(what.name.lower())
            panel.set_ylabel("clients of all seeds")
            if what.percent:
                panel.xaxis.set_major_formatter(PercentFormatter(1.0))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    drawing = file.getvalue()
    width = 320 * len(keys)
    head = f'<svg class="sweep" role="img" aria-label="Histogram over clients" style="min-width:{width}px" '
    return Markup(head + drawing[drawing.index("<svg ") + 5 :])
