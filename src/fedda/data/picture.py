"""A picture of a data set and its partition: samples of each class, and how many of them each client has."""

import io
import textwrap
from typing import Any

import numpy as np

from ..extras import needed_for

with needed_for("a picture"):
    from matplotlib import colormaps, rc_context
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap, LogNorm, Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

from .datasets import Dataset

Array = np.ndarray
WIDTH = 11.0  # inches
IN_BAND, MOST_SHOWN = 16, 64  # classes side by side, and in total
INK = "#0072b2"
RC: dict[Any, Any] = {"font.size": 9, "axes.titlesize": 10, "text.parse_math": False, "axes.titlelocation": "left"}


def draw(name: str, data: Dataset, owner: Array, description: str) -> bytes:
    """The picture as PNG; `owner` is the client of each training sample, `description` names the partition.

    >>> data = Dataset(np.zeros((4, 1, 2, 2)), np.array([0, 1, 0, 1]), np.zeros((1, 1, 2, 2)), np.array([0]), 2)
    >>> draw("tiny", data, np.array([0, 0, 1, 1]), "by hand")[1:4]
    b'PNG'
    """
    counts = count_samples(data, owner)
    bands = class_bands(data)
    heights = [min(1.3, WIDTH / len(band)) * samples_per_class(data) * 0.75 + 0.45 for band in bands]
    map_height = min(7.5, max(1.6, 0.28 * data.classes))
    with rc_context(RC):
        # No pyplot: a library must not touch the user's figures or backend.
        figure = Figure(figsize=(WIDTH, sum(heights) + map_height + 2.6), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        shape, samples = "x".join(map(str, data.x.shape[1:])), f"{len(data.y):,} samples"
        headline = f"{name}: {samples} ({shape}) for training, {len(data.y_test):,} for testing"
        figure.suptitle(headline, x=0.01, ha="left", fontsize=12)
        rows = [*heights, 1.1, map_height]
        grid = figure.add_gridspec(len(rows), 2, height_ratios=rows, width_ratios=[1, 0.015])
        for i, band in enumerate(bands):
            mosaic(figure.add_subplot(grid[i, :]), data, band, max(len(bands[0]), 8))
        sizes = figure.add_subplot(grid[len(bands), 0])
        shares = figure.add_subplot(grid[len(bands) + 1, 0], sharex=sizes)
        order = np.argsort(-counts.sum(axis=0), kind="stable") if many(counts) else np.arange(counts.shape[1])
        bars(sizes, counts[:, order], description, int((owner < 0).sum()))
        heat(figure, shares, figure.add_subplot(grid[len(bands) + 1, 1]), counts[:, order], data)
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def count_samples(data: Dataset, owner: Array) -> Array:
    """How many samples of each class each client has, [classes, clients]."""
    kept = owner >= 0
    clients = int(owner.max()) + 1
    flat = np.bincount(data.y[kept] * clients + owner[kept], minlength=data.classes * clients)
    return flat.reshape(data.classes, clients)


def many(counts: Array) -> bool:
    return bool(counts.shape[1] > 60)  # too many for labels: sorted by size


def label(data: Dataset, c: int) -> str:
    return data.names[c] if data.names else str(c)


def class_bands(data: Dataset) -> list[range]:
    """The classes in rows of equal length; empty if the samples are not images."""
    if data.x.ndim != 4 or data.x.shape[1] not in (1, 3):
        return []
    shown = min(data.classes, MOST_SHOWN)
    rows = -(-shown // IN_BAND)
    each = -(-shown // rows)
    return [range(begin, min(begin + each, shown)) for begin in range(0, shown, each)]


def samples_per_class(data: Dataset) -> int:
    return 4 if data.classes <= IN_BAND else 2


def mosaic(axes: Axes, data: Dataset, band: range, slots: int) -> None:
    """A column of training samples for each class; the picture is as wide as `slots` columns."""
    each = samples_per_class(data)
    channels, tall, wide = data.x.shape[1:]
    gap = max(1, wide // 12)
    canvas = np.ones((each * (tall + gap) - gap, slots * (wide + gap) - gap, 3))
    top = 255.0 if data.x.dtype == np.uint8 else max(float(np.abs(data.x[:1000]).max()), 1e-12)
    for column, c in enumerate(band):
        members = np.flatnonzero(data.y == c)
        for row, i in enumerate(members[:: max(1, len(members) // each)][:each]):
            image = np.clip(data.x[i] / top, 0, 1).transpose(1, 2, 0)
            y, x = row * (tall + gap), column * (wide + gap)
            canvas[y : y + tall, x : x + wide] = image if channels == 3 else np.repeat(image, 3, axis=2)
        if len(members) == 0:
            axes.text(column * (wide + gap) + wide / 2, tall / 2, "none", ha="center", va="center", color="#666666")
        lines = textwrap.wrap(label(data, c), max(6, round(150 / slots)), max_lines=3, placeholder="...")
        axes.text(column * (wide + gap) + wide / 2, -gap, "\n".join(lines), ha="center", va="bottom", fontsize=8)
    axes.imshow(canvas, interpolation="nearest", aspect="equal")
    axes.set_anchor("W")
    axes.axis("off")
    if band.start == 0 and data.classes > MOST_SHOWN:
        axes.set_title(f"the first {MOST_SHOWN} of {data.classes} classes", pad=22)


def bars(axes: Axes, counts: Array, description: str, unused: int) -> None:
    """The number of samples of each client."""
    sizes = counts.sum(axis=0)
    axes.bar(np.arange(len(sizes)), sizes, width=1.0 if many(counts) else 0.8, color=INK)
    alike = f"{sizes.min():,}" if sizes.min() == sizes.max() else f"{sizes.min():,} to {sizes.max():,}"
    left = f"; {unused:,} samples are unused" if unused else ""
    clients = f"{len(sizes)} clients with {alike} samples each"
    axes.set_title("\n".join(textwrap.wrap(f"{description}: {clients}{left}", 120)))
    axes.set_ylabel("samples")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    axes.tick_params(labelbottom=False, bottom=False)
    axes.spines[["top", "right"]].set_visible(False)


def heat(figure: Figure, axes: Axes, scale_axes: Axes, counts: Array, data: Dataset) -> None:
    """The number of samples by class (down) and client (across); white for none."""
    low, high = int(counts[counts > 0].min()), int(counts.max())
    wide = high > 20 * low  # on a linear scale, small counts would look like none
    norm = LogNorm(low, high) if wide else Normalize(0, max(high, 1))
    # One hue from pale to dark, for all kinds of colour vision; the palest differs from white.
    colours = ListedColormap(colormaps["Blues"](np.linspace(0.22, 1, 256))).with_extremes(bad="white")
    shown = axes.imshow(
        np.where(counts > 0, counts, np.nan), aspect="auto", interpolation="nearest", norm=norm, cmap=colours
    )
    classes, clients = counts.shape
    axes.set_yticks(range(classes), [textwrap.shorten(label(data, c), 26, placeholder="...") for c in range(classes)])
    axes.tick_params(axis="y", labelsize=9 if classes <= 26 else max(3.0, 400 / classes), length=0)
    if many(counts):
        order = "of one size" if len(np.unique(counts.sum(axis=0))) == 1 else "the largest first"
        axes.set_xlabel(f"{clients} clients, {order} (white: no sample of the class)")
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    else:
        axes.set_xlabel("client (white: no sample of the class)")
        axes.set_xticks(range(0, clients, 1 if clients <= 30 else 5))
    bar = figure.colorbar(shown, cax=scale_axes, label=f"samples of a class{', log scale' if wide else ''}")
    scale_axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    if wide:
        bar.set_ticks([d * 10**e for e in range(9) for d in (1, 2, 5) if low <= d * 10**e <= high], minor=False)
        bar.minorticks_off()
    else:
        scale_axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    if clients <= 20 and classes <= 20:
        for c, k in np.argwhere(counts > 0):
            value = float(norm(counts[c, k]))
            text = f"{counts[c, k]:,}"
            axes.text(k, c, text, ha="center", va="center", fontsize=7, color="white" if value > 0.55 else "black")
