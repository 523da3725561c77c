"""How the values of a metric are spread over the clients: a histogram with one line for each algorithm, and a table."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import colormaps, rc_context
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..runs import formats
from ..runs.curves import number
from ..runs.final_values import client_metrics, client_values, spread_over_clients, summary
from ..runs.reading import RecordedRun
from .picture import Picture
from .plots import THEMED, literal, themed_svg
from .tables import Cell

Counts = np.ndarray[Any, Any]
VIRIDIS = colormaps["viridis"]
PLAIN = "#5b8db8"  # of bars without classes
MANY = 60  # clients: then they are sorted by size
BINS = 20


def client_section(run: RecordedRun, shown: Picture) -> dict[str, Any] | None:
    """The split of the samples, the histogram and the lines of the table; None if the run has none of them."""
    counts, keys = class_counts(run), client_metrics(run)
    sizes = client_sizes(run)
    if counts is None and sizes:  # without classes, such as for regression
        counts = np.array(list(sizes.values()))[:, None]
    dropped = {final["label"]: final["dropped"] for final in summary(run)}
    lines = []
    for key in keys:
        metric = shown.metric(key)
        for series in shown.series:
            over = spread_over_clients(run, series.own, key)
            if over is not None:
                cells = [Cell(formats.spread(v, None, metric.percent), v) for v in over.values()]
                lost = dropped[series.own]
                lines.append((series, metric.name, [*cells, Cell(formats.count(lost), lost)]))
    if not lines and counts is None:
        return None
    return {
        "figure": histogram(run, shown, keys) if lines else "",
        "lines": lines,
        "tuned": len(keys) > 1,
        "worst": worst_clients(run, keys[0], shown) if lines else "",
        "partition": partition(counts, list(sizes), class_names(run)) if counts is not None else "",
        "split": describe_split(counts) if counts is not None else "",
    }


def class_counts(run: RecordedRun) -> Counts | None:
    """How many samples of each class each client has, [clients, classes], as the run recorded it."""
    table = run.environment.get("partition")
    if not isinstance(table, list) or not table:
        return None
    rows = [[int(word) for word in str(row).split() if word.isdecimal()] for row in table]
    return np.array(rows) if len({len(row) for row in rows}) == 1 and rows[0] else None


def client_sizes(run: RecordedRun) -> dict[str, int]:
    """The number of samples of each client by its name, in the order of the clients."""
    return {str(row["client"]): int(row["samples"]) for row in run.clients if "client" in row and "samples" in row}


def class_names(run: RecordedRun) -> list[str]:
    names = run.environment.get("classes")
    return [str(name) for name in names] if isinstance(names, list) else []


def describe_split(counts: Counts) -> str:
    """The split in one sentence.

    >>> describe_split(np.array([[3, 1], [0, 4]]))
    '2 clients with 4 samples each of 2 classes; the largest class of a client is 88 % of its samples on average.'
    """
    sizes = counts.sum(axis=1)
    each = f"{sizes.min():,}" if sizes.min() == sizes.max() else f"{sizes.min():,} to {sizes.max():,}"
    if counts.shape[1] == 1:
        return f"{len(counts):,} clients with {each} training samples each."
    share = (counts.max(axis=1) / np.maximum(sizes, 1)).mean()
    return (
        f"{len(counts):,} clients with {each} samples each of {counts.shape[1]} classes; the largest class of a client "
        f"is {100 * share:.0f} % of its samples on average."
    )


def partition(counts: Counts, names: Sequence[str] = (), class_names: Sequence[str] = ()) -> Markup:
    """The samples of each client, one bar each, in the shades of their classes."""
    clients, classes = counts.shape
    order = np.argsort(-counts.sum(axis=1), kind="stable") if clients > MANY else np.arange(clients)
    with rc_context(THEMED):
        figure = Figure(figsize=(9.2, 2.5), layout="constrained")
        panel = figure.subplots()
        bottom = np.zeros(clients)
        for c in range(classes):
            shade = VIRIDIS(c / (classes - 1)) if classes > 1 else PLAIN
            panel.bar(
                range(clients), counts[order, c], 1.0 if clients > MANY else 0.82, bottom, color=shade, linewidth=0
            )
            bottom += counts[order, c]
        panel.set_xlabel("clients, the largest first" if clients > MANY else "client")
        panel.set_ylabel("samples")
        panel.grid(axis="x", visible=False)
        panel.set_xlim(-0.6, clients - 0.4)
        if clients <= 30:
            labels = [shortened(name) for name in names] if len(names) == clients else list(map(str, range(clients)))
            tilted = sum(map(len, labels)) > 90  # about as many letters as fit side by side
            panel.set_xticks(range(clients), labels, rotation=40 if tilted else 0, ha="right" if tilted else "center")
        if classes > 1:
            colours = ScalarMappable(Normalize(-0.5, classes - 0.5), VIRIDIS.resampled(classes))
            scale = figure.colorbar(colours, ax=panel, pad=0.01)
            scale.set_label("class")
            ticks = range(0, classes, max(1, math.ceil(classes / 10)))
            named = len(class_names) == classes
            scale.set_ticks(list(ticks), labels=[shortened(class_names[c]) if named else str(c) for c in ticks])
        return themed_svg(figure, "Samples of each client by class", 520)


def shortened(name: str, most: int = 16) -> str:
    """A name that fits beside an axis.

    >>> shortened("Ulm"), shortened("Universitätsklinikum Köln")
    ('Ulm', 'Universitätskli…')
    """
    return name if len(name) <= most else f"{name[: most - 1]}…"


def worst_clients(run: RecordedRun, key: str, shown: Picture) -> str:
    """For each algorithm the three clients with the worst mean over seeds."""
    lower, texts = shown.metric(key).better == "lower", []
    for label in run.labels:
        values: dict[Any, list[float]] = {}
        for row in run.clients:
            if row["algorithm"] == label and number(row.get(key)) == number(row.get(key)):
                values.setdefault(row.get("client"), []).append(number(row[key]))
        means = {client: sum(own) / len(own) for client, own in values.items()}
        worst = sorted(means, key=lambda client: -means[client] if lower else means[client])[:3]
        shares = [f"{client} ({formats.spread(means[client], None, shown.metric(key).percent)})" for client in worst]
        if len(means) > 3:
            texts.append(f"{label}: {', '.join(shares)}")
    return "; ".join(texts)


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
    with rc_context(THEMED):
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
            literal(panel.set_xlabel(""), f"{what.name.lower()} of a client")
            panel.set_ylabel("clients, all seeds")
            panel.yaxis.set_major_locator(MaxNLocator(integer=True))
            if what.percent:
                panel.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.4g} %"))
        return themed_svg(figure, "Histogram over clients", 320 * len(keys))
