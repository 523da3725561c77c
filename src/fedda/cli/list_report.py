"""`fedda list` and `fedda report`: what there is, and what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import Plugins, app, load_plugins


@app.command("list", epilog="Example: fedda list algorithms")
def list_(what: Annotated[str, typer.Argument()] = "all", plugin: Plugins = None) -> None:
    """List what there is, all of it or one kind.

    WHAT is experiments, algorithms (with what they cost), params (the hyper-parameters of the algorithms), presets,
    data, partitions, models, prox, engines or aggregation.
    """
    from .. import checks, listing
    from ..progress import table

    load_plugins(plugin)
    kinds = listing.KINDS
    if what not in ("all", *kinds):
        raise ValueError(f"list: unknown kind {what!r}; {checks.nearest(what, ('all', *kinds))}")
    for kind in kinds if what == "all" else (what,):
        table(*listing.rows(kind), kind)


@app.command("report", epilog="Example: fedda report runs/digits runs/short --csv curves.csv")
def report_(
    folders: list[Path],
    csv: Annotated[Path | None, typer.Option(help="Write every point of every curve into this file.")] = None,
    latex: Annotated[Path | None, typer.Option(help="Write the final values as a LaTeX table into this file.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the comparison goes, the common parent of the folders if left out.")
    ] = None,
) -> None:
    """Write report.html and its pictures into each folder, and print one table of final values.

    FOLDERS are run folders, as `fedda run` writes them; several are also compared on one page, comparison.html. A
    folder that `fedda sweep` wrote gets a page of its sweep.
    """
    from .. import claims, report

    runs = [folder for folder in folders if not report.is_sweep(folder)]
    if (csv or latex) and not runs:
        raise ValueError("--csv and --latex need a run folder; a sweep's points are in its sweep.json")
    several = len({folder.resolve() for folder in runs}) > 1
    if out is not None and not several:
        raise ValueError("--out is where a comparison goes: give two run folders or more")
    for folder in runs:
        claims.write(folder)
    pages = [report.write(folder) for folder in folders]
    comparison = report.compare(runs, out) if several else None
    if comparison and comparison.is_relative_to(Path.cwd()):
        comparison = comparison.relative_to(Path.cwd())
    if csv:
        csv.write_text(report.csv(runs), encoding="utf-8")
    if latex:
        latex.write_text(report.latex(runs), encoding="utf-8")
    if runs:
        print_summaries(runs)
    for folder in folders:
        if folder not in runs:
            print_choices(folder)
    for page in pages:
        print(f"report: {page}")
    for word, path in (("comparison", comparison), ("csv", csv), ("latex", latex)):
        if path:
            print(f"{word}: {path}")


def print_choices(folder: Path) -> None:
    """One table of what a sweep chose, and how many points came to nothing."""
    from .. import report
    from ..progress import table

    sweep = report.read_sweep(folder)
    rows = []
    for own in sweep.algorithms:
        words, value = report.sweep.chosen(own, sweep.metric)
        lost = sum(not point.ok for point in own.points)
        rows.append([own.label, words, value, str(len(own.points)), str(lost) if lost else ""])
    heads = ["algorithm", "chosen", sweep.metric.replace("_", " "), "points", "without a value"]
    table(heads, rows, folder.resolve().name)


COLUMNS = (
    "train_loss",
    "train_accuracy",
    "test_loss",
    "test_accuracy",
    "density",
    "nonzero",
    "epsilon_outside",
    "epsilon_site",
)


def print_summaries(folders: list[Path]) -> None:
    """One table of final values: mean and standard deviation over seeds."""
    from .. import report
    from ..progress import table
    from ..runs import formats

    found = [(folder.resolve().name, row) for folder in folders for row in report.summary(folder)]
    shown = [c for c in COLUMNS if any(row.get(c) is not None for _, row in found)]
    rows = []
    for name, row in found:
        cells = [
            row["label"] + (" (failed)" if row["failure"] else ""),
            *([name] if len(folders) > 1 else []),
            str(row["rounds"]),
        ]
        cells.append(f"{row['seeds']}" + (f" ({row['diverged']} diverged)" if row["diverged"] else ""))
        for c in shown:
            percent = c.endswith(("accuracy", "density", "nonzero"))
            cells.append(formats.spread(row.get(c), row.get(f"{c}_std"), percent))
        rows.append([*cells, formats.size(row["bytes"]), formats.duration(row["seconds"])])
    several = ["run"] if len(folders) > 1 else []
    table(["algorithm", *several, "rounds", "seeds", *(c.replace("_", " ") for c in shown), "sent", "time"], rows)
    for _, row in found:
        if row["failure"]:
            print(f"{row['label']}: failed: {row['failure']}")
        if row["privacy"]:
            print(f"{row['label']}: privacy: {row['privacy']}")
