"""`fedda list` and `fedda report`: what there is, and what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import checks, listing, report
from ..progress import table
from .app import Plugins, app, load_plugins


@app.command("list", epilog="Example: fedda list algorithms")
def list_(what: Annotated[str, typer.Argument()] = "all", plugin: Plugins = None) -> None:
    """List what there is, all of it or one kind.

    WHAT is experiments, algorithms (with what they cost), words (of the algorithms), presets, data, partitions, models,
    prox or engines.
    """
    load_plugins(plugin)
    kinds = listing.KINDS
    if what not in ("all", *kinds):
        raise ValueError(f"list: unknown kind {what!r}; {checks.nearest(what, ('all', *kinds))}")
    for kind in kinds if what == "all" else (what,):
        table(*listing.rows(kind), kind)


@app.command("report", epilog="Example: fedda report runs/digits")
def report_(folders: list[Path]) -> None:
    """Write report.html and its pictures into each run folder, and print one table of final values.

    FOLDERS are run folders, as `fedda run` writes them.
    """
    pages = [report.write(folder) for folder in folders]
    print_summaries(folders)
    for page in pages:
        print(f"report: {page}")


COLUMNS = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "density", "nonzero")


def print_summaries(folders: list[Path]) -> None:
    """One table of final values: mean and standard deviation over seeds."""
    found = [(folder.resolve().name, row) for folder in folders for row in report.summary(folder)]
    shown = [c for c in COLUMNS if any(row.get(c) is not None for _, row in found)]
    rows = []
    for name, row in found:
        cells = [row["label"], *([name] if len(folders) > 1 else []), str(row["rounds"])]
        cells.append(f"{row['seeds']}" + (f" ({row['diverged']} diverged)" if row["diverged"] else ""))
        for c in shown:
            percent = c.endswith(("accuracy", "density", "nonzero"))
            cells.append(report.format.spread(row.get(c), row.get(f"{c}_std"), percent))
        rows.append([*cells, report.format.size(row["bytes"]), report.format.duration(row["seconds"])])
    several = ["run"] if len(folders) > 1 else []
    table(["algorithm", *several, "rounds", "seeds", *(c.replace("_", " ") for c in shown), "sent", "time"], rows)
    for _, row in found:
        if row["failure"]:
            print(f"{row['label']}: failed: {row['failure']}")
