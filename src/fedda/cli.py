"""The command line: `fedda run | list | report`.

Exit 0 on success, 2 on a mistake of the user's, 1 on a failure of ours, 128 + n when stopped by signal n.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from . import __version__, checks, listing, plugins, registry, report
from .arguments import usable_device
from .experiments import Stopped, find
from .experiments import run as run_experiment
from .experiments.choose import choose, resumed
from .experiments.folder import Folder
from .progress import table, watcher

app = typer.Typer(
    help="Federated optimisation: FedDA and the methods it is compared with.",
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
)

Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="A .py file or module with algorithms of your own; may be given several times."),
]


def main() -> None:
    """Whatever a user can meet ends in one line on stderr; a traceback (exit 1) is a failure of ours."""
    warnings.showwarning = note
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # an ASCII terminal gets a substitute for what it cannot show
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
    try:
        code = app(prog_name="fedda", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as why:
        code = mistake(why.format_message())
    except ValueError as why:
        code = mistake(str(why))
    except BrokenPipeError:  # `fedda list | head -1`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except OSError as why:
        code = mistake(f"cannot write: {place_and_reason(why)}")
    except Stopped as why:
        say(f"fedda: {why}; go on with: {again()}")
        sys.exit(128 + why.signal)
    except click.Abort:
        code = 128 + signal.SIGINT
    if code == 128 + signal.SIGINT:  # typer makes this of a Ctrl-C outside the rounds, without a word
        say("fedda: stopped by SIGINT")
    sys.exit(code)


def mistake(words: str) -> int:
    say(f"fedda: {words}")
    return 2


def say(words: str) -> None:
    with suppress(OSError):  # nobody may be there to read it
        print(" ".join(words.split("\n")), file=sys.stderr, flush=True)


def note(message: Warning | str, *where: Any, **more: Any) -> None:
    """A warning, once: an algorithm is built more than once in a run."""
    if str(message) not in NOTED:
        NOTED.add(str(message))
        say(f"note: {message}")


NOTED: set[str] = set()


def place_and_reason(why: OSError) -> str:
    return f"{why.filename}: {why.strerror}" if why.filename else f"{why.strerror or why}"


@app.callback(invoke_without_command=True, epilog="Example: fedda run digits --rounds 50")
def fedda(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"fedda {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(epilog="Example: fedda run digits --rounds 50 --algorithms fedda-mvr,fedavg --out runs/short")
def run(
    experiment: str,  # the docstrings tell of arguments: typer 0.20 on click 8.5 drops their help
    rounds: Annotated[int | None, typer.Option(help="Rounds, instead of the experiment's.")] = None,
    algorithms: Annotated[str | None, typer.Option(help="Which to run, by comma: labels, or any algorithm.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, by comma; they run as replicas of one program.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder, runs/NAME if left out.")] = None,
    engine: Annotated[str, typer.Option(help="auto, vectorised or sequential.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin the run in the folder again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Run in spite of an absurd first step size.")] = False,
    save_seconds: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 5.0,
    summary: Annotated[bool, typer.Option(help="Print the table of final values.")] = True,
    plugin: Plugins = None,
) -> None:
    """Run an experiment: every algorithm, every seed, into one run folder with a report.

    EXPERIMENT is a built-in one (`fedda list experiments`) or a .toml file.
    """
    load_plugins(plugin)
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other")
    if not (math.isfinite(save_seconds) and save_seconds >= 0):
        raise ValueError(f"--save-seconds must be >= 0, got {save_seconds}")
    if engine != "auto":
        registry.engines.find(engine)
    wanted = choose(find(experiment), rounds, algorithms, seeds)
    place = out or Path("runs") / wanted.name
    if device is not None:
        usable_device(device, "--device")
    if resume:
        wanted = resumed(wanted, place, rounds)
    watch = watcher(list(wanted.algorithms))
    try:
        with watch:
            run_experiment(wanted, place, watch, engine, device, resume, overwrite, force, save_seconds)
    except OSError as why:
        if not Folder(place).holds_run:
            raise
        words = f"cannot write: {place_and_reason(why)}; the last checkpoint is whole"
        raise ValueError(f"{words}, go on with: {again()}") from None
    try:
        page = report.write(place)
    except OSError as why:
        words = f"the run is whole but its report cannot be written: {place_and_reason(why)}"
        raise ValueError(f"{words}; make room, then: {shlex.join(['fedda', 'report', str(place)])}") from None
    if summary:
        print_summaries([place])
    print(f"report: {page}")


def load_plugins(given: list[str] | None) -> None:
    plugins.discover()
    for plugin in given or []:
        plugins.load(plugin)


def again() -> str:
    """The command that was given, to go on with."""
    given = [word for word in sys.argv[1:] if word not in ("--overwrite", "--resume")]
    return shlex.join(["fedda", *given, "--resume"])


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
