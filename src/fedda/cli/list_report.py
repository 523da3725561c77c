"""`fedda list` and `fedda report`."""

from pathlib import Path
from typing import Annotated

import typer

from .app import Plugins, app, load_plugins
from .summaries import print_choices, print_summaries


@app.command("list", epilog="Example: fedda list algorithms")
def list_(what: Annotated[str, typer.Argument()] = "all", plugin: Plugins = None) -> None:
    """List everything, or one kind.

    WHAT is experiments, algorithms (with what they cost), params (the hyper-parameters of the algorithms), presets,
    data, partitions, models, augmentations, prox, engines or aggregation.
    """
    from .. import checks, listing
    from ..progress import print_table

    load_plugins(plugin)
    kinds = listing.KINDS
    if what not in ("all", *kinds):
        raise ValueError(f"list: unknown kind {what!r}; {checks.nearest(what, ('all', *kinds))}")
    for kind in kinds if what == "all" else (what,):
        print_table(*listing.rows(kind), kind)


@app.command("report", epilog="Example: fedda report runs/digits runs/short --csv curves.csv")
def report_(
    folders: list[Path],
    csv: Annotated[Path | None, typer.Option(help="Write every point of every curve into this file.")] = None,
    latex: Annotated[Path | None, typer.Option(help="Write the final values as a LaTeX table into this file.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder of the comparison; by default the common parent of the folders.")
    ] = None,
) -> None:
    """Write report.html and its pictures into each folder, and print one table of final values.

    FOLDERS are run folders, as `fedda run` writes them; several are also compared on one page, comparison.html. A
    folder that `fedda sweep` wrote gets a page of its sweep.
    """
    from .. import claims, report
    from ..runs.reading import read_run
    from ..runs.sweeps import is_sweep, read_sweep

    sweeps = {folder: read_sweep(folder) for folder in folders if is_sweep(folder)}
    runs = [read_run(folder) for folder in {f.resolve(): f for f in folders if f not in sweeps}.values()]
    if (csv or latex) and not runs:
        raise ValueError("--csv and --latex need a run folder; a sweep's points are in its sweep.json")
    if out is not None and len(runs) < 2:
        raise ValueError("--out is the folder of a comparison: give two run folders or more")
    reports = [report.Report([run]) for run in runs]
    for run in runs:
        claims.write(run)
    pages = [one.write() for one in reports] + [report.write_sweep(sweep) for sweep in sweeps.values()]
    together = report.Report(runs) if len(runs) > 1 else reports[0] if runs else None
    comparison = together.write_comparison(out) if together and len(runs) > 1 else None
    if comparison and comparison.is_relative_to(Path.cwd()):
        comparison = comparison.relative_to(Path.cwd())
    if csv and together:
        csv.write_text(together.csv, encoding="utf-8")
    if latex and together:
        latex.write_text(together.latex, encoding="utf-8")
    if runs:
        print_summaries(runs)
    for sweep in sweeps.values():
        print_choices(sweep)
    for page in pages:
        print(f"report: {page}")
    for name, path in (("comparison", comparison), ("csv", csv), ("latex", latex)):
        if path:
            print(f"{name}: {path}")
