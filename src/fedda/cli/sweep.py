"""`fedda sweep`: hyper-parameters by grid or random search, on a validation split."""

from pathlib import Path
from typing import Annotated

import typer

from .app import Plugins, Settings, Shard, app, load_plugins
from .ranks import device_of_rank, is_first_rank, join_ranks, should_resume
from .run import check_run_options, explain_report_errors, explain_write_errors
from .summaries import print_choices


@app.command(epilog='Example: fedda sweep digits --grid "*.lr=x0.25,x0.5,x1,x2,x4" --rounds 60')
def sweep(
    experiment: str,
    grid: Annotated[list[str], typer.Option(help="LABEL.NAME=VALUES; LABEL may be *, a value x2 is twice the file's.")],
    budget: Annotated[int | None, typer.Option(help="Points per algorithm; a larger grid is thinned.")] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="validation_accuracy (without classes validation_loss), train_loss, a metric such as f1, ..."
        ),
    ] = None,
    draw: Annotated[int, typer.Option(help="The seed of the random draws.")] = 0,
    rounds: Annotated[int | None, typer.Option(help="Rounds, instead of the experiment's.")] = None,
    algorithms: Annotated[
        str | None, typer.Option(help="Which, separated by commas: labels, or any algorithm.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas.")] = None,
    data: Annotated[str | None, typer.Option(help="Other data: a name, a .npz file or a folder of images.")] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The folder; by default runs/NAME-sweep.")] = None,
    engine: Annotated[str, typer.Option(help="auto, vectorised, sequential or distributed.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    precision: Annotated[str, typer.Option(help="auto, float32, tf32 or bf16 (docs/performance.md).")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads on a CPU; by default one or all, as measured.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the sweep in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start the sweep in the folder again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Accept points with an absurd first step size.")] = False,
    save_seconds: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 5.0,
    shard: Shard = "clients",
    plugin: Plugins = None,
) -> None:
    """Search hyper-parameters: the points of a grid are replicas of one program, the same number for every algorithm.

    The best is chosen on a fifth of the training samples that no client trains on, never on the test set. It is written
    to best.toml: `fedda run EXPERIMENT --preset FOLDER/best.toml` runs it.
    """
    from .. import report
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
        page = report.write_sweep(results)
    print_choices(results)
    print(f"values: {folder / BEST}")
    print(f"report: {page}")
