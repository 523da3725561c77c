"""`report.html` of a sweep folder, with a figure per algorithm beside it."""

import math
from pathlib import Path
from typing import Any

from ...files import write_whole
from ...runs import formats
from ...runs.metrics import metric
from ...runs.names import BEST, CONFIG, REPORT, slugs
from ...runs.sweeps import SweepResults, Swept, read_sweep
from ...runs.toml import read_toml
from ..pages import embed, fill
from .charts import SweepFigure, reached, values_of
from .grid import edges, text
from .overview import overview

TOP = 10  # points in the table of an algorithm


def write_sweep(sweep: str | Path | SweepResults) -> Path:
    """Write `report.html` and a `sweep-LABEL.png` per algorithm into a sweep folder; return the path of the page.

    Args:
        sweep: the folder that `fedda sweep` wrote, or results that were read already.
    """
    sweep = sweep if isinstance(sweep, SweepResults) else read_sweep(sweep)
    folder = sweep.folder
    config = read_toml(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    files = [f"sweep-{name}.png" for name in slugs([swept.label for swept in sweep.algorithms])]
    figures = [SweepFigure(swept, sweep.metric) for swept in sweep.algorithms]
    together = overview(sweep)
    page = fill(
        "sweep.html.j2",
        live=None,
        axes=[],
        logs=bool(together and together["panels"][0]["log"]),
        data=embed(together) if together else "",
        title=str(config.get("title") or config.get("name") or folder.resolve().name),
        facts=describe(sweep),
        metric=metric(sweep.metric).name,
        algorithms=[_section(*one) for one in zip(sweep.algorithms, figures, files, strict=True)],
        chosen=(folder / BEST).read_text(encoding="utf-8", errors="replace") if (folder / BEST).is_file() else "",
    )
    for figure, file in zip(figures, files, strict=True):
        write_whole(folder / file, figure.png())
    return write_whole(folder / REPORT, page)


def describe(sweep: SweepResults) -> str:
    """One line: the metric, the split it was measured on, the budget.

    >>> print(describe(SweepResults(Path("a"), "validation_loss", "lower", 60, [0], 24, [])).replace(" · ", "\\n"))
    Validation loss (lower is better) on the validation split, not the test set
    budget 24 points per algorithm
    60 rounds
    seed 0
    """
    split = {
        "validation": "on the validation split, not the test set",
        "train": "on the training set, not the test set",
        "test": "on the TEST set: do not use it to judge the chosen values",
    }.get(sweep.metric.split("_")[0], "")
    line = [f"{metric(sweep.metric).name} ({sweep.better} is better) {split}".strip()]
    if sweep.budget is not None:
        line.append(f"budget {sweep.budget} points per algorithm")
    if sweep.rounds is not None:
        line.append(f"{sweep.rounds} rounds")
    if sweep.seeds:
        line.append(f"seed{'s' * (len(sweep.seeds) > 1)} {', '.join(map(str, sweep.seeds))}")
    return " · ".join(line)


def chosen(swept: Swept, name: str) -> tuple[str, str]:
    """Two texts: the chosen hyper-parameters, and the value they reached."""
    return (values_of(swept.best), reached(swept.best, name)) if swept.best else ("–", "no point has a value")


def _section(swept: Swept, figure: SweepFigure, file: str) -> dict[str, Any]:
    values, value = chosen(swept, figure.name)
    rows = [
        {
            "values": [text(point.values[name]) for name in swept.params],
            "value": reached(point, figure.name) if point.ok else "–",
            "seeds": point.seeds or "–",
            "gradients": formats.count(None if math.isnan(point.gradients) else point.gradients),
            "note": point.note or ("" if point.ok else "no value"),
            "chosen": point is swept.best,
        }
        for point in swept.ranked[:TOP]
    ]
    return {
        "label": swept.label,
        "file": file,
        "params": swept.params,
        "best": values,
        "value": value,
        "number": swept.best.value if swept.best else "",
        "points": len(swept.points),
        "diverged": sum(not point.ok for point in swept.points),
        "edges": edges(swept),
        "figure": figure.svg() if swept.points else "",
        "top": rows,
    }
