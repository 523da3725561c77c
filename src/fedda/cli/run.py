"""`fedda run`: an experiment into a run folder."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer

from ..extras import MissingPackage
from . import options
from .app import app, file_and_reason, load_plugins, resume_command
from .commands import OWN
from .ranks import device_of_rank, is_first_rank, join_ranks, should_resume
from .serving import serve_page
from .summaries import print_summaries

if TYPE_CHECKING:
    from ..engines.world import SingleProcess
    from ..experiments import Experiment
    from ..runs.reading import RecordedRun


def check_run_options(
    engine: str, device: str | None, precision: str, threads: int | None, resume: bool, overwrite: bool,
    save_seconds: float,
) -> None:  # fmt: skip
    """Check the options that `run` and `sweep` share: one that is wrong, or excludes another, is refused."""
    from .. import checks
    from ..arguments import check_device

    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other")
    if not (math.isfinite(save_seconds) and save_seconds >= 0):
        raise ValueError(f"--save-seconds must be >= 0, got {save_seconds}")
    if device is not None:
        check_device(device, "--device")
    if precision != "auto" and (engine == "sequential" or resume):
        raise ValueError("--precision is for the vectorised engine, and for a new run")
    if threads is not None:
        checks.count("command line", "threads", threads, at_most=1024)


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """If the disk fills up during a run, say how to resume it."""
    from ..runs.folder import Folder

    try:
        yield
    except OSError as why:
        if not Folder(folder).holds_run:
            raise
        message = f"cannot write: {file_and_reason(why)}; the last checkpoint is complete"
        raise ValueError(f"{message}, resume with: {resume_command()}") from None


@contextmanager
def explain_report_errors(folder: Path) -> Iterator[None]:
    """If the report cannot be written, say how to write it later."""
    try:
        yield
    except OSError as why:
        message = f"the run is complete but its report cannot be written: {file_and_reason(why)}"
        raise ValueError(f"{message}; make room, then: {shlex.join(['fedda', 'report', str(folder)])}") from None


def write_report(results: Path | RecordedRun, folder: Path) -> str:
    """Write the report; return the line that says where it is, or what must be installed for one."""
    try:
        from .. import report
    except MissingPackage as why:
        return f"no report: {why}; then: {shlex.join(['fedda', 'report', str(folder)])}"
    return f"report: {report.write(results)}"


def share_saved_experiment(world: SingleProcess, wanted: Experiment, folder: Path, rounds: int | None) -> Experiment:
    """The experiment in the folder; the first rank reads it and sends it to the others."""
    from ..experiments.config import parse
    from ..experiments.overrides import saved_experiment

    if world.rank:
        return parse(world.share(b"").decode(), str(folder))
    experiment = saved_experiment(wanted, folder, rounds)
    world.share(experiment.toml().encode())
    return experiment


@app.command(
    rich_help_panel=OWN,
    epilog="Example: fedda run digits --rounds 50 --algorithms fedda-mvr,fedavg --out runs/short",
)
def run(
    experiment: options.Experiment,
    rounds: options.Rounds = None,
    algorithms: options.Algorithms = None,
    seeds: options.Seeds = None,
    data: options.Data = None,
    preset: Annotated[
        Path | None,
        typer.Option(help="A file of tuned values, as `fedda sweep` writes it.", rich_help_panel=options.EXPERIMENT),
    ] = None,
    settings: options.Settings = None,
    patience: Annotated[
        int | None,
        typer.Option(
            help="Stop after so many evaluations without an improvement on validation samples.",
            rich_help_panel=options.EXPERIMENT,
        ),
    ] = None,
    personalise: Annotated[
        str | None,
        typer.Option(
            help='"fine-tune 5": also evaluate clients after 5 local steps.',
            rich_help_panel=options.EXPERIMENT,
            metavar="TEXT",
        ),
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(
            help="Training samples of an evaluation: all, or a number (docs/experiments.md).",
            rich_help_panel=options.EXPERIMENT,
            metavar="SAMPLES",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Run even if the first step is refused as too long.", rich_help_panel=options.EXPERIMENT
        ),
    ] = False,
    plugin: options.Plugins = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run folder; by default runs/NAME.", rich_help_panel=options.OUTPUT),
    ] = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    save_seconds: options.SaveSeconds = 5.0,
    summary: options.Summary = True,
    serve: options.Serve = False,
    port: options.Port = None,
    track: Annotated[
        list[str] | None,
        typer.Option(
            help="Also write metrics for this program. May be repeated.",
            rich_help_panel=options.OUTPUT,
            click_type=click.Choice(["tensorboard", "mlflow", "wandb"]),
        ),
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", hidden=True)] = False,
    engine: options.Engine = "auto",
    device: options.Device = None,
    precision: options.Precision = "auto",
    threads: options.Threads = None,
    shard: options.Shard = "clients",
) -> None:
    """Run an experiment: every algorithm, every seed, into one run folder with a report.

    An algorithm that diverges does not stop the others. The exit status is 0 if at least one algorithm has finished, 1
    if none has, and 2 after a mistake in the command or the file.
    """
    from .. import claims
    from ..experiments import find
    from ..experiments import run as run_experiment
    from ..experiments.overrides import other_data_note, override
    from ..experiments.tracking import Tracked
    from ..progress import Silence, watcher
    from ..runs.reading import read_run
    from ..runs.toml import literal
    from .verdicts import print_verdicts

    ranks = join_ranks(shard)  # first, so that a failure on one rank reaches the others
    load_plugins(plugin)
    check_run_options(engine, device, precision, threads, resume, overwrite, save_seconds)
    more = {"patience": patience, "personalise": personalise, "evaluate": evaluate and literal(evaluate)}
    given = find(experiment)
    wanted = override(given, rounds, algorithms, seeds, data, preset, settings or (), plugin or (), more)
    note = other_data_note(given, wanted)
    folder = out or Path("runs") / wanted.name
    resume = should_resume(ranks, resume)
    if resume:
        wanted = share_saved_experiment(ranks.world, wanted, folder, rounds)
    display = watcher(list(wanted.algorithms)) if is_first_rank() else Silence()
    names = dict.fromkeys([*(track or []), *(["tensorboard"] if tensorboard else [])])
    tracked = Tracked(display, list(names), folder, wanted) if names and is_first_rank() else nullcontext(display)
    page_of_run = serve_page(folder, serve, port) if is_first_rank() else nullcontext()
    with page_of_run, explain_write_errors(folder), display, tracked as watch:
        run_experiment(
            wanted, folder, watch, engine=engine, device=device_of_rank(device), resume=resume, overwrite=overwrite,
            force=force, save_seconds=save_seconds, threads=threads, precision=precision, ranks=ranks, note=note,
        )  # fmt: skip
    if not is_first_rank():
        return
    with explain_report_errors(folder):
        recorded = read_run(folder)
        verdicts = claims.write(recorded)
        line = write_report(recorded, folder)
    if summary:
        print_summaries([recorded])
        if verdicts:
            print_verdicts(verdicts, folder)
    failed, all_of_them = list(recorded.failures), len(wanted.algorithms)
    if failed and len(failed) < all_of_them:
        print(f"{len(failed)} of {all_of_them} algorithms failed: {', '.join(failed)}; the others have finished")
    print(line)
    if len(failed) == all_of_them:
        raise typer.Exit(1)
