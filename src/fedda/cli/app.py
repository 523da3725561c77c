"""The command line: its start, and one line for every error.

Exit status 0 is success, 2 a mistake of the user, 1 a failure of fedda, 128 + n the end by signal n.
"""

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
from .commands import CommandGroup, Commands

app = Commands(
    cls=CommandGroup,
    suggest_commands=False,  # click suggests already
    help="Federated optimisation: FedDA and the methods it is compared with.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def main() -> None:
    """Every error of a user ends in one line on stderr; a traceback (exit 1) is a bug."""
    warnings.showwarning = print_warning
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # an ASCII terminal gets substitutes
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
    try:
        code = app(prog_name="fedda", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as why:
        code = print_mistake(why.format_message())
    except ValueError as why:
        code = print_mistake(str(why))
    except BrokenPipeError:  # `fedda list | head -1`: the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + 13  # SIGPIPE, which Windows does not name
    except OSError as why:
        code = print_mistake(f"cannot write: {file_and_reason(why)}")
    except Stopped as why:
        if ranks.is_first_rank():
            say(f"fedda: {why}; resume with: {resume_command()}")
        sys.exit(128 + why.signal)
    except Lost as why:
        print_mistake(f"{why}; resume with: {resume_command()}", ranks.lost)
        code = 1
    except click.Abort:
        code = 128 + signal.SIGINT
    except Exception as why:
        ranks.blame(f"{type(why).__name__}: {why}")
        raise
    if code == 128 + signal.SIGINT and ranks.is_first_rank():  # typer is silent after a Ctrl-C outside the rounds
        say("fedda: stopped by SIGINT")
    ranks.end(code)


def print_mistake(message: str, by_rank: Callable[[str], str | None] = ranks.blame) -> int:
    """Print one line, on one of the ranks only, and return the exit status."""
    line = by_rank(message)
    if line is not None:
        say(f"fedda: {line}")
    return 2


def say(message: str) -> None:
    with suppress(OSError):  # the terminal may be closed
        print(" ".join(message.split("\n")), file=sys.stderr, flush=True)


def print_warning(message: Warning | str, *_: Any, **more: Any) -> None:
    """Print a warning once, although an algorithm is built several times in a run."""
    if str(message) not in PRINTED and ranks.is_first_rank():
        PRINTED.add(str(message))
        say(f"note: {message}")


PRINTED: set[str] = set()


def file_and_reason(why: OSError) -> str:
    return f"{why.filename}: {why.strerror}" if why.filename else f"{why.strerror or why}"


@app.callback(
    invoke_without_command=True,
    epilog="Example: fedda run digits --rounds 50",
)
def fedda(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"fedda {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())


def load_plugins(names: list[str] | None) -> None:
    plugins.discover()
    for plugin in names or []:
        plugins.load(plugin)


def resume_command() -> str:
    """The command of this process, with --resume."""
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--overwrite", "--resume")]
    launcher = ["torchrun", f"--nproc-per-node={os.environ.get('LOCAL_WORLD_SIZE', '1')}", "-m"]
    return shlex.join([*(launcher if started_by_torchrun() else []), "fedda", *arguments, "--resume"])
