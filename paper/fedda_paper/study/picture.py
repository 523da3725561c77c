"""The pictures of docs/choosing.md: all methods on all tasks, then for each task the finals and how much the rate
matters."""

import hashlib
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedda.report.style import distinct_pens

from .rules import FAR
from .studied import TASKS, StudiedMethod, Tasks, advise, decided, equally_good

OVERVIEW = "images/methods.png"
PICTURE = "images/choosing.png"
DEPTH = 0.4  # of accuracy: what the right panels show below the best
DIGEST = "Source"  # the text of the PNG file that holds the digest of its numbers


def drawn(tasks: Tasks) -> Tasks:
    """The finished tasks on which a method is taken, but for those with a penalty or a constraint, which most methods
    cannot do."""
    return {name: own for name, own in decided(tasks).items() if not any(m.proximal for m in own)}


def numbers(tasks: Tasks) -> dict[str, Any]:
    """All that is drawn: for each task and method the finals, their interval, and the scores by rate."""
    return {
        name: {m.name: [m.finished, *m.interval(), sorted(m.by_rate().items())] for m in own if len(m.finals) > 1}
        for name, own in drawn(tasks).items()
    }


def digest(tasks: Tasks) -> str:
    """Of the numbers that are drawn: a test compares it with the one in the file."""
    return hashlib.sha256(json.dumps(numbers(tasks)).encode()).hexdigest()[:16]


def draw(tasks: Tasks, path: Path) -> None:
    """A row for each finished task. A method has one colour everywhere; methods that share it differ in dashes and
    markers."""
    import matplotlib.pyplot as plt

    shown = drawn(tasks)
    figure, rows = plt.subplots(
        len(shown), 2, figsize=(12, 3.3 * len(shown)), squeeze=False, layout="constrained",
        gridspec_kw={"width_ratios": [1, 1.3]},
    )  # fmt: skip
    for (task, methods), (left, right) in zip(shown.items(), rows, strict=True):
        draw_task(task, [m for m in methods if len(m.finals) > 1], advise(methods).take, left, right)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None, DIGEST: digest(tasks)})
    plt.close(figure)


@dataclass(frozen=True)
class OverviewCell:
    """A method on a task in the overview."""

    text: str
    shade: float | None = None  # 0 for the best, 1 for a method that is far behind; none without a result
    equal: bool = False  # as good as the best
    take: bool = False


def overview(tasks: Tasks) -> dict[str, list[OverviewCell]]:
    """For each method its cells, task by task: how far it is behind the best. The methods that are as good as the best
    on most tasks come first."""
    shown = list(drawn(tasks).values())
    names = dict.fromkeys(m.name for own in shown for m in own)
    rows = {name: [cell(name, own) for own in shown] for name in names}

    def place(name: str) -> tuple[int, float]:
        shades = [c.shade for c in rows[name] if c.shade is not None]
        return -sum(c.equal for c in rows[name]), statistics.fmean(shades) if shades else 1.0

    return {name: rows[name] for name in sorted(rows, key=place)}


def cell(name: str, methods: list[StudiedMethod]) -> OverviewCell:
    whole = {m.name: m for m in methods if m.finished}
    if name not in whole:
        diverged = any(m.name == name and m.summary["diverged finals"] for m in methods)
        return OverviewCell("diverged" if diverged else "not run")
    best = next(iter(whole.values()))
    gap, loss = best.test - whole[name].test, best.test < 0
    text = "best" if whole[name] is best else f"{gap:.2f}" if loss else f"{100 * gap:.1f}"
    equal = name in (m.name for m in equally_good(methods))
    return OverviewCell(
        text, min(gap / FAR["loss" if loss else "accuracy"], 1.0), equal, advise(methods).take.name == name
    )


def draw_overview(tasks: Tasks, path: Path) -> None:
    """A row for each method, a column for each task."""
    import matplotlib.pyplot as plt

    rows, heads = overview(tasks), [TASKS[task].short for task in drawn(tasks)]
    figure, axes = plt.subplots(figsize=(1.3 * len(heads) + 1.5, 0.42 * len(rows) + 1.2), layout="constrained")
    colours, labels = plt.get_cmap("YlGnBu_r"), []
    for y, (name, row) in enumerate(rows.items()):
        tried = sum(c.text != "not run" for c in row)
        labels.append(f"{name}   {sum(c.equal for c in row)} of {tried}")
        for x, one in enumerate(row):
            colour = "#f2f2f2" if one.shade is None else colours(0.25 if one.equal else 0.55 + 0.45 * one.shade)
            axes.add_patch(plt.Rectangle((x, y), 0.96, 0.92, color=colour, linewidth=0))
            axes.text(
                x + 0.48, y + 0.46, one.text, ha="center", va="center", fontsize=9,
                color="white" if one.equal else "#333333", fontweight="bold" if one.take else "normal",
            )  # fmt: skip
    axes.set(xlim=(0, len(heads)), ylim=(len(rows), 0))
    axes.set_xticks([x + 0.48 for x in range(len(heads))], heads, fontsize=9)
    axes.set_yticks([y + 0.46 for y in range(len(rows))], labels)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None, DIGEST: digest(tasks)})
    plt.close(figure)


def draw_task(task: str, methods: list[StudiedMethod], take: StudiedMethod, left: Any, right: Any) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    loss = methods[0].test < 0
    unit = -1 if loss else 100  # the scores in losses or in percent
    pens = distinct_pens([m.name for m in methods])
    for place, (method, (colour, dash)) in enumerate(zip(methods, pens, strict=True)):
        mean, half = method.interval()
        marker, fill = "s" if dash else "o", "full" if method.finished else "none"
        left.errorbar(
            unit * mean,
            -place,
            xerr=abs(unit) * half,
            fmt=marker,
            color=colour,
            capsize=3,
            fillstyle=fill,
            markersize=6,
        )
        points = method.by_rate()
        right.plot(
            list(points), [unit * score for score in points.values()], color=colour, dashes=dash or (None, None),
            marker=marker, markersize=3.5, label=method.name, linewidth=3.0 if method is take else 1.4,
        )  # fmt: skip
    left.set_yticks([-place for place in range(len(methods))], [m.name for m in methods])
    for label, method in zip(left.get_yticklabels(), methods, strict=True):
        label.set_fontweight("bold" if method is take else "normal")
    what = "loss" if loss else "accuracy"
    left.set(title=TASKS[task].kind, xlabel=f"test {what}, at the best checkpoint")
    right.set(title="How much the rate matters", xlabel="rate, relative to the best", ylabel=f"validation {what}")
    right.set(xscale="log", xlim=(0.025, 13))
    top = max(score for m in methods for score in m.by_rate().values())
    right.set_ylim(*sorted((unit * (top - DEPTH), unit * (top + 0.02))))
    for axes, axis in ((left, left.xaxis), (right, right.yaxis)):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if not loss:
            axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
            axis.set_major_formatter(StrMethodFormatter("{x:g} %"))
    legend = right.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9, handlelength=3.2)
    for text, method in zip(legend.get_texts(), methods, strict=True):
        text.set_fontweight("bold" if method is take else "normal")
