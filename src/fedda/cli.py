"""The command line: `fedda run | list | report`. Exit 0 on success, 2 on a mistake of the user's, 1 on one of ours."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from . import __version__, checks, registry, report
from .experiments import Experiment, Stopped, builtin, config, find
from .experiments import run as run_experiment
from .progress import watcher

app = typer.Typer(
    help="Federated optimisation: FedDA and the methods it is compared with.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)

KINDS = {
    "algorithms": registry.algorithms,
    "data": registry.datasets,
    "partitions": registry.partitions,
    "models": registry.models,
    "prox": registry.proxes,
    "engines": registry.engines,
}


def main() -> None:
    warnings.showwarning = lambda message, *_: print(f"note: {message}", file=sys.stderr)
    app()


@contextmanager
def one_line() -> Iterator[None]:
    """A mistake of the user's, or a disk that cannot be written: one clear line, exit 2."""
    try:
        yield
    except ValueError as why:
        print(f"fedda: {why}", file=sys.stderr)
        raise typer.Exit(2) from None
    except OSError as why:
        place = f"{why.filename}: " if why.filename else ""
        print(f"fedda: cannot write: {place}{why.strerror or why}", file=sys.stderr)
        raise typer.Exit(2) from None


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        print(f"fedda {__version__}")
        raise typer.Exit()


@app.command(epilog="Example: fedda run digits --rounds 50 --algorithms fedda-mvr,fedavg --out runs/short")
def run(
    experiment: Annotated[str, typer.Argument(help="A built-in experiment (`fedda list experiments`) or a .toml file.")],
    rounds: Annotated[int | None, typer.Option(help="Rounds, instead of the experiment's.")] = None,
    algorithms: Annotated[str | None, typer.Option(help="Which to run, by comma: labels, or any algorithm.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, by comma; they run as replicas of one program.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder [runs/NAME].")] = None,
    engine: Annotated[str, typer.Option(help="auto, vectorised or sequential.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin the run in the folder again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Run in spite of an absurd first step size.")] = False,
    save_seconds: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 5.0,
    summary: Annotated[bool, typer.Option(help="Print the table of final values.")] = True,
) -> None:
    """Run an experiment: every algorithm, every seed, into one run folder with a report."""
    with one_line():
        if resume and overwrite:
            raise ValueError("--resume and --overwrite exclude each other")
        if engine != "auto":
            registry.engines.find(engine)
        wanted = choose(find(experiment), rounds, algorithms, seeds)
        place = out or Path("runs") / wanted.name
        check_device(device)
        if resume:
            wanted = resumed(wanted, place, rounds)
        watch = watcher(list(wanted.algorithms))
        try:
            with watch:
                run_experiment(wanted, place, watch, engine, device, resume, overwrite, force, save_seconds)
        except Stopped as why:
            again = f"fedda run {experiment} --out {place} --resume"
            again += f" --rounds {rounds}" if rounds else ""
            again += f" --algorithms {algorithms}" if algorithms else ""
            again += f" --seeds {seeds}" if seeds else ""
            print(f"fedda: {why}, saved; go on with: {again}", file=sys.stderr)
            raise typer.Exit(128 + why.signal) from None
        page = report.write(place)
        if summary:
            print_summaries([place])
        print(f"report: {page}")


@app.command("list", epilog="Example: fedda list algorithms")
def list_(
    what: Annotated[str, typer.Argument(help=f"experiments, {', '.join(KINDS)}; all if left out.")] = "all",
) -> None:
    """List what there is: experiments, algorithms with their words, data sets, partitions, models, prox, engines."""
    with one_line():
        checks.one_of("list", "what", what, ("all", "experiments", *KINDS))
        console = wide()
        if what in ("all", "experiments"):
            table = Table("experiment", "title", "algorithms", title="experiments", title_justify="left")
            for name in builtin():
                found = find(name)
                table.add_row(name, found.title, ", ".join(found.algorithms))
            console.print(table)
        for kind, entries in KINDS.items():
            if what in ("all", kind):
                table = Table("name", "what it is", "words and defaults", title=kind, title_justify="left")
                for entry in entries:
                    words = ", ".join(f"{k}={v}" if v is not _EMPTY else k for k, v in shown_words(entry).items())
                    summary = f"the same as {entry.alias_of}" if entry.alias_of else entry.summary
                    table.add_row(entry.name, summary, words)
                console.print(table)


@app.command("report", epilog="Example: fedda report runs/digits")
def report_(folders: Annotated[list[Path], typer.Argument(help="Run folders, as `fedda run` writes them.")]) -> None:
    """Write report.html and its pictures into each run folder, and print one table of final values."""
    with one_line():
        pages = [report.write(folder) for folder in folders]
        print_summaries(folders)
        for page in pages:
            print(f"report: {page}")


_EMPTY = registry.inspect.Parameter.empty


def shown_words(entry: registry.Entry) -> dict[str, Any]:
    """The words that a user gives; the samples' labels and shapes come from the data."""
    given = ("labels", "client", "shape", "classes", "clients", "seed")
    return {k: v for k, v in entry.defaults.items() if k not in given}


def choose(experiment: Experiment, rounds: int | None, algorithms: str | None, seeds: str | None) -> Experiment:
    """The experiment with what the command line says instead; checked like the file itself."""
    table = experiment.model_dump()
    if rounds is not None:
        table["rounds"] = rounds
    if algorithms is not None:
        chosen = {}
        for label in filter(None, map(str.strip, algorithms.split(","))):
            if label not in experiment.algorithms and label not in registry.algorithms.entries:
                known = {*experiment.algorithms, *registry.algorithms.entries}
                raise ValueError(f"--algorithms: unknown {label!r}; {checks.nearest(label, known)}")
            chosen[label] = experiment.algorithms.get(label, {})
        table["algorithms"] = chosen
    if seeds is not None:
        try:
            table["seeds"] = [int(seed) for seed in seeds.split(",")]
        except ValueError:
            raise ValueError(f"--seeds must be whole numbers by comma, such as 0,1,2, got {seeds!r}") from None
    return config.checked(table, "command line")


def resumed(wanted: Experiment, place: Path, rounds: int | None) -> Experiment:
    """The experiment of the folder, if it is the one that is asked for (it may be asked to run longer)."""
    try:
        saved = config.parse((place / "config.toml").read_text(encoding="utf-8"), str(place / "config.toml"))
    except OSError:
        raise ValueError(f"{place}: holds no run to go on with; leave out --resume to begin one") from None
    asked = wanted.completed().model_dump() | {"every": saved.every}
    if rounds is None:
        asked["rounds"] = saved.rounds
    for key, value in saved.completed().model_dump().items():
        if key not in ("rounds", "title") and asked[key] != value:
            raise ValueError(f"{place}: was run with another {key!r}: {value}; give the same, or another --out")
    if asked["rounds"] < saved.rounds:
        raise ValueError(f"{place}: was begun with {saved.rounds} rounds; --rounds may raise that, not lower it")
    return saved.model_copy(update={"rounds": asked["rounds"]})


def check_device(device: str | None) -> None:
    import torch

    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as why:
        reason = str(why).splitlines()[0]
        raise ValueError(f"--device {device!r} cannot be used here: {reason}") from None


def wide() -> Console:
    """As wide as the terminal; in a file wide enough for the tables."""
    return Console() if sys.stdout.isatty() else Console(width=160)


COLUMNS = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "density", "nonzero")


def print_summaries(folders: list[Path]) -> None:
    """One table of final values: mean and standard deviation over seeds."""
    rows = [(folder.name, row) for folder in folders for row in report.summary(folder)]
    shown = [c for c in COLUMNS if any(row.get(c) is not None for _, row in rows)]
    table = Table("experiment", "algorithm", "rounds", "seeds", *(c.replace("_", " ") for c in shown), "MB", "seconds")
    for name, row in rows:
        cells = [
            report.format.spread(row.get(c), row.get(f"{c}_std"), percent=c.endswith(("accuracy", "density", "nonzero")))
            for c in shown
        ]
        seconds = "" if row["seconds"] is None else f"{row['seconds']:.1f}"
        seeds = f"{row['seeds']}" + (f" ({row['diverged']} diverged)" if row["diverged"] else "")
        cells = [name, row["label"], str(row["rounds"]), seeds, *cells, report.format.size(row["bytes"]), seconds]
        table.add_row(*cells)
    wide().print(table)
    for _, row in rows:
        if row["failure"]:
            print(f"{row['label']}: {row['failure']}")
