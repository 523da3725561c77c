"""`fedda run`: an experiment into a run folder."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .app import Plugins, Shard, Words, again, app, load_plugins, place_and_reason
from .list_report import print_summaries
from .ranks import enter, goes_on, own, speaks

if TYPE_CHECKING:
    from ..engines import SingleProcess
    from ..experiments import Experiment


def refuse_how(
    engine: str, device: str | None, precision: str, threads: int | None, resume: bool, overwrite: bool,
    save_seconds: float,
) -> None:  # fmt: skip
    """Refuse what `run` and `sweep` cannot be told together, or at all."""
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
        raise ValueError("--precision is for the vectorised engine, and for a run that begins")
    if threads is not None:
        checks.count("command line", "threads", threads, at_most=1024)


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """A disk that fills up in the middle of a run: what is there can be gone on with."""
    from ..runs.folder import Folder

    try:
        yield
    except OSError as why:
        if not Folder(place).holds_run:
            raise
        words = f"cannot write: {place_and_reason(why)}; the last checkpoint is whole"
        raise ValueError(f"{words}, go on with: {again()}") from None


@contextmanager
def reporting(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as why:
        words = f"the run is whole but its report cannot be written: {place_and_reason(why)}"
        raise ValueError(f"{words}; make room, then: {shlex.join(['fedda', 'report', str(place)])}") from None


def gone_on(world: SingleProcess, wanted: Experiment, place: Path, rounds: int | None) -> Experiment:
    """The experiment of the folder, which the first rank can see."""
    from ..experiments.config import parse
    from ..experiments.overrides import resumed

    if world.rank:
        return parse(world.share(b"").decode(), str(place))
    found = resumed(wanted, place, rounds)
    world.share(found.toml().encode())
    return found


@app.command(epilog="Example: fedda run digits --rounds 50 --algorithms fedda-mvr,fedavg --out runs/short")
def run(
    experiment: str,  # the docstrings tell of arguments: typer 0.20 on click 8.5 drops their help
    rounds: Annotated[int | None, typer.Option(help="Rounds, instead of the experiment's.")] = None,
    algorithms: Annotated[str | None, typer.Option(help="Which to run, by comma: labels, or any algorithm.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, by comma; they run as replicas of one program.")] = None,
    data: Annotated[str | None, typer.Option(help="Other data: a name, a .npz file or a folder of images.")] = None,
    preset: Annotated[Path | None, typer.Option(help="A file of tuned values, as `fedda sweep` writes it.")] = None,
    words: Words = None,
    out: Annotated[Path | None, typer.Option(help="The run folder, runs/NAME if left out.")] = None,
    engine: Annotated[str, typer.Option(help="auto, vectorised, sequential or distributed.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    precision: Annotated[str, typer.Option(help="auto, float32, tf32 or bf16 (docs/performance.md).")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads on a CPU; one or all, as measured, if left out.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin the run in the folder again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Run in spite of an absurd first step size.")] = False,
    save_seconds: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 5.0,
    shard: Shard = "clients",
    summary: Annotated[bool, typer.Option(help="Print the table of final values.")] = True,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write metrics for TensorBoard, too.")] = False,
    plugin: Plugins = None,
) -> None:
    """Run an experiment: every algorithm, every seed, into one run folder with a report.

    EXPERIMENT is a built-in one (`fedda list experiments`) or a .toml file.
    """
    from .. import claims, report
    from ..experiments import find
    from ..experiments import run as run_experiment
    from ..experiments.overrides import choose
    from ..experiments.tensorboard import TensorBoard
    from ..progress import Silence, watcher
    from .verdicts import print_verdicts

    ranks = enter(shard)  # first: what fails on one rank alone must be heard by the others
    load_plugins(plugin)
    refuse_how(engine, device, precision, threads, resume, overwrite, save_seconds)
    wanted = choose(find(experiment), rounds, algorithms, seeds, data, preset, words or ())
    place = out or Path("runs") / wanted.name
    resume = goes_on(ranks, resume)
    if resume:
        wanted = gone_on(ranks.world, wanted, place, rounds)
    watch = watcher(list(wanted.algorithms)) if speaks() else Silence()
    logged = TensorBoard(watch, place / "tensorboard") if tensorboard and speaks() else nullcontext(watch)
    with writing(place), watch, logged as seen:
        folder = run_experiment(
            wanted, place, seen, engine, own(device), resume, overwrite, force, save_seconds, threads, precision,
            ranks=ranks,
        )  # fmt: skip
    if not speaks():
        return
    with reporting(place):
        claimed = claims.write(place)
        page = report.write(place)
    if summary:
        print_summaries([place])
        if claimed:
            print_verdicts(place)
    print(f"report: {page}")
    if len(folder.failures) == len(wanted.algorithms):
        raise typer.Exit(1)
