"""`fedda sweep`: hyper-parameters by grid or random search, on a validation split."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ..extras import MissingPackage
from . import options
from .app import app, load_plugins
from .commands import OWN
from .ranks import device_of_rank, is_first_rank, join_ranks, should_resume
from .run import check_run_options, explain_report_errors, explain_write_errors, write_report
from .summaries import print_choices

SEARCH = "Search"


@app.command(rich_help_panel=OWN, epilog='Example: fedda sweep digits --grid "*.lr=x0.25,x0.5,x1,x2,x4" --rounds 60')
def sweep(
    experiment: options.Experiment,
    grid: Annotated[
        list[str],
        typer.Option(
            help="What is tried: LABEL may be * for all algorithms; 0.1,0.2 are values, x0.5,x2 multiples of the "
            "file's, 0.01..1 is a range to draw from. May be repeated.",
            rich_help_panel=SEARCH,
            metavar="LABEL.NAME=VALUES",
        ),
    ],
    budget: Annotated[
        int | None, typer.Option(help="Points per algorithm; a larger grid is thinned.", rich_help_panel=SEARCH)
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="What decides: train_loss, objective, or a metric such as f1; by default the validation accuracy, or "
            "without classes the validation loss.",
            rich_help_panel=SEARCH,
            metavar="NAME",
        ),
    ] = None,
    draw: Annotated[int, typer.Option(help="The seed of the random draws.", rich_help_panel=SEARCH)] = 0,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also try points whose first step would be refused as too long.", rich_help_panel=SEARCH
        ),
    ] = False,
    rounds: options.Rounds = None,
    algorithms: options.Algorithms = None,
    seeds: options.Seeds = None,
    data: options.Data = None,
    settings: options.Settings = None,
    plugin: options.Plugins = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder; by default runs/NAME-sweep.", rich_help_panel=options.OUTPUT)
    ] = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    save_seconds: options.SaveSeconds = 5.0,
    engine: options.Engine = "auto",
    device: options.Device = None,
    precision: options.Precision = "auto",
    threads: options.Threads = None,
    shard: options.Shard = "clients",
) -> None:
    """Search hyper-parameters: the points of a grid are replicas of one program, the same number for every algorithm.

    The best is chosen on a fifth of the training samples that no client trains on, never on the test set. It is written
    to best.toml: `fedda run EXPERIMENT --preset FOLDER/best.toml` runs it.
    """
    from ..experiments import find
    from ..experiments.overrides import override
    from ..experiments.sweep import Sweep, search
    from ..progress import Silence, watcher
    from ..runs.names import BEST
    from ..runs.sweeps import read_sweep

    ranks = join_ranks(shard)  # first, so that a failure on one rank reaches the others
    load_plugins(plugin)
    check_run_options(engine, device, precision, threads, resume, overwrite, save_seconds)
    wanted = override(find(experiment), rounds, algorithms, seeds, data, None, settings or (), plugin or ())
    folder = out or Path("runs") / f"{wanted.name}-sweep"
    watch = watcher([]) if is_first_rank() else Silence()
    with explain_write_errors(folder), watch:
        search(
            Sweep(wanted, grid, budget, metric, draw, force), folder, watch, engine=engine,
            device=device_of_rank(device), resume=should_resume(ranks, resume), overwrite=overwrite,
            save_seconds=save_seconds, threads=threads, precision=precision, ranks=ranks,
        )  # fmt: skip
    if not is_first_rank():
        return
    with explain_report_errors(folder):
        results = read_sweep(folder)
        line = write_report(folder, folder)
    with suppress(MissingPackage):  # the last line says which
        print_choices(results)
    print(f"values: {folder / BEST}")
    print(line)
