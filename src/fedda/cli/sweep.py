"""`fedda sweep`: hyper-parameters by grid or random search, on a validation split."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import Plugins, Shard, Words, app, load_plugins
from .list_report import print_choices
from .ranks import enter, goes_on, own, speaks
from .run import refuse_how, reporting, writing


@app.command(epilog='Example: fedda sweep digits --grid "*.lr=x0.25,x0.5,x1,x2,x4" --rounds 60')
def sweep(
    experiment: str,
    grid: Annotated[list[str], typer.Option(help="LABEL.WORD=VALUES; LABEL may be *, a value x2 is twice the file's.")],
    budget: Annotated[int | None, typer.Option(help="Points for each algorithm; a larger grid is thinned.")] = None,
    metric: Annotated[str, typer.Option(help="validation_accuracy, validation_loss, ...")] = "validation_accuracy",
    draw: Annotated[int, typer.Option(help="The seed of what is drawn at random.")] = 0,
    rounds: Annotated[int | None, typer.Option(help="Rounds, instead of the experiment's.")] = None,
    algorithms: Annotated[str | None, typer.Option(help="Which, by comma: labels, or any algorithm.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, by comma.")] = None,
    data: Annotated[str | None, typer.Option(help="Other data: a name, a .npz file or a folder of images.")] = None,
    words: Words = None,
    out: Annotated[Path | None, typer.Option(help="The folder, runs/NAME-sweep if left out.")] = None,
    engine: Annotated[str, typer.Option(help="auto, vectorised, sequential or distributed.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    precision: Annotated[str, typer.Option(help="auto, float32, tf32 or bf16 (docs/performance.md).")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads on a CPU; one or all, as measured, if left out.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the sweep in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin the sweep in the folder again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Let a point with an absurd first step size win.")] = False,
    save_seconds: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 5.0,
    shard: Shard = "clients",
    plugin: Plugins = None,
) -> None:
    """Search hyper-parameters: the points of a grid are replicas of one program, equally many for every algorithm.

    The best is chosen on a fifth of the training samples that no client trains on, never on the test set. It is written
    to best.toml: `fedda run EXPERIMENT --preset FOLDER/best.toml` runs it.
    """
    from .. import report
    from ..experiments import find
    from ..experiments.overrides import choose
    from ..experiments.sweep import Sweep, search
    from ..progress import Silence, watcher

    ranks = enter(shard)  # first: what fails on one rank alone must be heard by the others
    load_plugins(plugin)
    refuse_how(engine, device, precision, threads, resume, overwrite, save_seconds)
    wanted = choose(find(experiment), rounds, algorithms, seeds, data, None, words or ())
    place = out or Path("runs") / f"{wanted.name}-sweep"
    resume = goes_on(ranks, resume)
    watch = watcher([]) if speaks() else Silence()
    asked = Sweep(wanted, grid, budget, metric, draw, force)
    with writing(place), watch:
        search(
            asked, place, watch, engine, own(device), resume, overwrite, save_seconds, threads, precision, ranks=ranks
        )
    if not speaks():
        return
    with reporting(place):
        page = report.write(place)
    print_choices(place)
    print(f"values: {place / 'best.toml'}")
    print(f"report: {page}")
