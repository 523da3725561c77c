"""docs/images/choosing.png: what the methods came to in the finals, and how much the rate matters."""

import hashlib
import json
from pathlib import Path
from typing import Any

from fedda.report.style import distinct_pens

from .studied import TASKS, StudiedMethod, Tasks, advise, finished

PICTURE = "images/choosing.png"
DEPTH = 0.4  # of accuracy: what the right panels show below the best
DIGEST = "Source"  # the text of the PNG file that holds the digest of its numbers


def drawn(tasks: Tasks) -> Tasks:
    """The finished tasks but for the sparse models, whose accuracy says little without their number of weights."""
    return {name: own for name, own in finished(tasks).items() if not any(m.sparse for m in own)}


def numbers(tasks: Tasks) -> dict[str, Any]:
    """All that is drawn: for each finished task and method the finals, their interval, and the scores by rate."""
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
