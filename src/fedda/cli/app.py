"""The command line's frame: how it begins, and how every mistake ends.

Exit 0 on success, 2 on a mistake of the user's, 1 on a failure of ours, 128 + n when stopped by signal n.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import click
import typer

from .. import __version__, plugins
from ..processes import Lost, Stopped, started_by_torchrun
from . import ranks
from .plugin_commands import CommandGroup

app = typer.Typer(
    cls=CommandGroup,
    help="Federated optimisation: FedDA and the methods it is compared with.",
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
)

Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="A .py file or module with algorithms of your own; may be given several times."),
]
Words = Annotated[
    list[str] | None,
    typer.Option("--set", help="One word of the file: problem.batch=32, fedavg.lr=0.1; nothing after = takes it out."),
]

Shard = Annotated[
    str, typer.Option(help="What torchrun's processes share: clients, or replicas (seeds, points of a grid).")
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
        code = 128 + 13  # SIGPIPE, which Windows does not name
    except OSError as why:
        code = mistake(f"cannot write: {place_and_reason(why)}")
    except Stopped as why:
        if ranks.speaks():
            say(f"fedda: {why}; go on with: {again()}")
        sys.exit(128 + why.signal)
    except Lost as why:
        mistake(f"{why}; go on with: {again()}", ranks.lost)
        code = 1
    except click.Abort:
        code = 128 + signal.SIGINT
    except Exception as why:
        ranks.blame(f"{type(why).__name__}: {why}")
        raise
    if (
        code == 128 + signal.SIGINT and ranks.speaks()
    ):  # typer makes this of a Ctrl-C outside the rounds, without a word
        say("fedda: stopped by SIGINT")
    ranks.end(code)


def mistake(words: str, said: Callable[[str], str | None] = ranks.blame) -> int:
    """One line, from one of the processes that may run."""
    line = said(words)
    if line is not None:
        say(f"fedda: {line}")
    return 2


def say(words: str) -> None:
    with suppress(OSError):  # nobody may be there to read it
        print(" ".join(words.split("\n")), file=sys.stderr, flush=True)


def note(message: Warning | str, *where: Any, **more: Any) -> None:
    """A warning, once: an algorithm is built more than once in a run."""
    if str(message) not in NOTED and ranks.speaks():
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


def load_plugins(given: list[str] | None) -> None:
    plugins.discover()
    for plugin in given or []:
        plugins.load(plugin)


def again() -> str:
    """The command that was given, to go on with."""
    given = [word for word in sys.argv[1:] if word not in ("--overwrite", "--resume")]
    many = ["torchrun", f"--nproc-per-node={os.environ.get('LOCAL_WORLD_SIZE', '1')}", "-m"]
    return shlex.join([*(many if started_by_torchrun() else []), "fedda", *given, "--resume"])
