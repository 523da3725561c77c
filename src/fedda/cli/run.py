"""`fedda run`: an experiment into a run folder."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .app import Plugins, Settings, Shard, app, file_and_reason, load_plugins, resume_command
from .ranks import device_of_rank, is_first_rank, join_ranks, should_resume
from .summaries import print_summaries

if TYPE_CHECKING:
    from ..engines import SingleProcess
    from ..experiments import Experiment


def check_run_options(
    engine: str, device: str | None, precision: str, threads: int | None, resume: bool, overwrite: bool,
    save_seconds: float,
) -> None:  # fmt: skip
    """Check the options that `run` and `sweep` share: one that is wrong, or excludes another, is refused."""
    from .. import checks, registry
    from ..arguments import check_device
    from ..problems.gradients.choose import PRECISIONS

    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other")
    if not (math.isfinite(save_seconds) and save_seconds >= 0):
        raise ValueError(f"--save-seconds must be >= 0, got {save_seconds}")
    if engine != "auto":
        registry.engines.find(engine)
    if device is not None:
        check_device(device, "--device")
    checks.one_of("command line", "precision", precision, ("auto", *PRECISIONS))
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


def share_saved_experiment(world: SingleProcess, wanted: Experiment, folder: Path, rounds: int | None) -> Experiment:
    """The experiment in the folder; the first rank reads it and sends it to the others."""
    from ..experiments.config import parse
    from ..experiments.overrides import saved_experiment

    if world.rank:
        return parse(world.share(b"").decode(), str(folder))
    experiment = saved_experiment(wanted, folder, rounds)
    world.share(experiment.toml().encode())
    return experiment


@app.command(epilog="Example: fedda run digits --rounds 50 --algorithms fedda-mvr,fedavg --out runs/short")
def run(
    experiment: str,  # explained in the docstring: typer 0.20 on click 8.5 drops the help of arguments
    rounds: Annotated[int | None, typer.Option(help="Rounds, instead of the experiment's.")] = None,
    algorithms: Annotated[
        str | None, typer.Option(help="Which to run, separated by commas: labels, or any algorithm.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, separated by commas; they run as replicas of one program.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Other data: a name, a .npz file or a folder of images.")] = None,
    preset: Annotated[Path | None, typer.Option(help="A file of tuned values, as `fedda sweep` writes it.")] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; by default runs/NAME.")] = None,
    engine: Annotated[str, typer.Option(help="auto, vectorised, sequential or distributed.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    precision: Annotated[str, typer.Option(help="auto, float32, tf32 or bf16 (docs/performance.md).")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads on a CPU; by default one or all, as measured.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start the run in the folder again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Accept an absurd first step size.")] = False,
    save_seconds: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 5.0,
    shard: Shard = "clients",
    summary: Annotated[bool, typer.Option(help="Print the table of final values.")] = True,
    patience: Annotated[
        int | None, typer.Option(help="Stop after so many evaluations without an improvement on validation samples.")
    ] = None,
    personalise: Annotated[
        str | None, typer.Option(help='"fine-tune 5": also evaluate clients after 5 local steps.')
    ] = None,
    evaluate: Annotated[
        str | None, typer.Option(help="Training samples of an evaluation: all, or a number (docs/experiments.md).")
    ] = None,
    track: Annotated[
        list[str] | None, typer.Option(help="Also write metrics for tensorboard, mlflow or wandb; may be repeated.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", hidden=True)] = False,
    plugin: Plugins = None,
) -> None:
    """Run an experiment: every algorithm, every seed, into one run folder with a report.

    EXPERIMENT is a built-in one (`fedda list experiments`) or a .toml file.
    """
    from .. import claims, report
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
    with explain_write_errors(folder), display, tracked as watch:
        run_experiment(
            wanted, folder, watch, engine=engine, device=device_of_rank(device), resume=resume, overwrite=overwrite,
            force=force, save_seconds=save_seconds, threads=threads, precision=precision, ranks=ranks, note=note,
        )  # fmt: skip
    if not is_first_rank():
        return
    with explain_report_errors(folder):
        recorded = read_run(folder)
        verdicts = claims.write(recorded)
        page = report.write(recorded)
    if summary:
        print_summaries([recorded])
        if verdicts:
            print_verdicts(verdicts, folder)
    print(f"report: {page}")
    if len(recorded.failures) == len(wanted.algorithms):
        raise typer.Exit(1)
