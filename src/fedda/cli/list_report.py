"""`fedda list` and `fedda report`."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .app import app, load_plugins
from .commands import OWN
from .serving import serve_page
from .summaries import print_choices, print_summaries


@app.command("list", rich_help_panel=OWN, epilog="Example: fedda list algorithms fedda-cv")
def list_(
    what: Annotated[
        str,
        typer.Argument(
            help=f"What to list: {', '.join(options.KINDS)}; or all.",
            autocompletion=lambda incomplete: options.beginning(("all", *options.KINDS), incomplete),
        ),
    ] = "all",
    name: Annotated[
        str | None,
        typer.Argument(help="One of them: show its parameters.", autocompletion=options.complete_listed),
    ] = None,
    plugin: options.Plugins = None,
) -> None:
    """List what there is; for one algorithm, partition, model or map, what its parameters mean.

    `algorithms` shows what they cost, `params` their hyper-parameters.
    """
    from .. import checks, listing
    from ..progress import print_table

    load_plugins(plugin)
    kinds = listing.KINDS
    if what not in ("all", *kinds):
        raise ValueError(f"list: unknown kind {what!r}; {checks.nearest(what, ('all', *kinds))}")
    if name is not None:
        entry = listing.entry_of(what, name)
        heads, lines = listing.parameters(entry)
        print(f"{listing.names(entry)}: {entry.summary}")
        if lines:
            print_table(heads, lines)
        return
    for kind in kinds if what == "all" else (what,):
        print_table(*listing.rows(kind), kind)


@app.command("report", rich_help_panel=OWN, epilog="Example: fedda report runs/digits runs/short --csv curves.csv")
def report_(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `fedda run` or `fedda sweep` wrote.")],
    csv: Annotated[Path | None, typer.Option(help="Write every point of every curve into this file.")] = None,
    latex: Annotated[Path | None, typer.Option(help="Write the final values as a LaTeX table into this file.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder of the comparison; by default the common parent of the folders.")
    ] = None,
    figures: Annotated[
        str | None, typer.Option(help="Also write the figures as svg, pdf, or svg,pdf.", metavar="KINDS")
    ] = None,
    serve: options.Serve = False,
    port: options.Port = None,
) -> None:
    """Write report.html and its pictures into each folder, and print one table of final values.

    Several runs are also compared on one page, comparison.html. The folder of a sweep gets a page of its sweep.
    """
    from .. import claims, report
    from ..runs.reading import read_run
    from ..runs.sweeps import is_sweep, read_sweep

    kinds = figures.split(",") if figures else []
    for kind in kinds:
        if kind not in ("png", "svg", "pdf"):
            raise ValueError(f"--figures: give png, svg or pdf, separated by commas, got {kind!r}")
    if serve:
        if len(folders) != 1 or is_sweep(folders[0]) or csv or latex or out or kinds:
            raise ValueError("--serve shows the page of one run folder; leave the other options and folders out")
        if not folders[0].is_dir():
            raise ValueError(f"{folders[0]}: no such folder; give the folder that `fedda run` writes")
        with serve_page(folders[0], True, port) as live, suppress(KeyboardInterrupt):
            live.wait()
        return
    if port is not None:
        raise ValueError("--port is for --serve: give both")
    sweeps = {folder: read_sweep(folder) for folder in folders if is_sweep(folder)}
    runs = [read_run(folder) for folder in {f.resolve(): f for f in folders if f not in sweeps}.values()]
    if (csv or latex) and not runs:
        raise ValueError("--csv and --latex need a run folder; a sweep's points are in its sweep.json")
    if out is not None and len(runs) < 2:
        raise ValueError("--out is the folder of a comparison: give two run folders or more")
    reports = [report.Report([run]) for run in runs]
    for run in runs:
        claims.write(run)
    pages = [one.write(kinds) for one in reports] + [report.write_sweep(sweep) for sweep in sweeps.values()]
    together = report.Report(runs) if len(runs) > 1 else reports[0] if runs else None
    comparison = together.write_comparison(out, kinds) if together and len(runs) > 1 else None
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
