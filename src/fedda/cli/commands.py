"""How commands are listed and made: groups in `fedda --help`, help for arguments, commands of installed plugins."""

from collections.abc import Callable
from typing import Any

import click
import typer
from typer.core import TyperCommand, TyperGroup
from typer.utils import get_params_from_function

from .. import plugins

# The groups of `fedda --help`, in this order.
OWN, FEDERATIONS, THIS_MACHINE, PAPER, PLUGINS = (
    "Your own work", "Federations", "This machine", "The paper", "Commands of plugins",
)  # fmt: skip
PANELS = (OWN, FEDERATIONS, THIS_MACHINE, PAPER, PLUGINS)
ORDER = ("run", "sweep", "report", "export", "predict", "list", "data")  # within the first group
# Commands of known packages, and how to install them.
ELSEWHERE = {
    "reproduce": "'fedda reproduce' is in the package fedda-paper, which is not installed: "
    "run 'pip install -e paper' in a checkout of fedda"
}


class Command(TyperCommand):
    """A command that shows the help of its arguments, which Click 8.3 and later take away from typer 0.20."""

    def __init__(self, *args: Any, callback: Callable[..., Any], params: list[click.Parameter], **more: Any):
        given = get_params_from_function(getattr(callback, "__wrapped__", callback))
        for param in params:
            if isinstance(param, click.Argument) and param.name in given:
                param.help = given[param.name].default.help
        paragraphs = (more.pop("help", None) or "").split("\n\n")  # a terminal has its own line breaks
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        super().__init__(*args, callback=callback, params=params, help=text, **more)


class Commands(typer.Typer):
    """A typer.Typer whose commands show the help of their arguments."""

    def command(self, name: str | None = None, **more: Any) -> Any:
        return super().command(name, cls=Command, **more)


class CommandGroup(TyperGroup):
    """The built-in commands, then those of plugins.

    `fedda --help` lists a plugin's command with the description of its package and does not import it.
    """

    def list_commands(self, context: click.Context) -> list[str]:
        builtin = super().list_commands(context)
        names = [*builtin, *(name for name in plugins.commands() if name not in builtin)]

        def place(name: str) -> tuple[int, int]:
            command = self.get_command(context, name)
            panel = getattr(command, "rich_help_panel", None)
            return PANELS.index(panel) if panel in PANELS else len(PANELS), (*ORDER, name).index(name)

        return sorted(names, key=place)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if (builtin := super().get_command(context, name)) is not None:
            return builtin
        if (point := plugins.commands().get(name)) is None:
            return None
        summary = point.dist.metadata["Summary"] if point.dist else None
        command = click.Command(name, help=summary or f"A command of the package {point.module}.")
        command.rich_help_panel = PAPER if name in ELSEWHERE else PLUGINS  # type: ignore[attr-defined]
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if super().get_command(context, name) is None:
            if (point := plugins.commands().get(name)) is not None:
                return name, load_command(point.value), args[1:]
            if name in ELSEWHERE:
                raise ValueError(ELSEWHERE[name])
        return super().resolve_command(context, args)


def load_command(value: str) -> click.Command:
    """Import the command that an entry point names as MODULE:APP."""
    module, _, attribute = value.partition(":")
    app = getattr(plugins.load(module), attribute, None)
    if not isinstance(app, typer.Typer):
        raise ValueError(f"plugin {value!r}: {attribute} must be a typer.Typer, got {type(app).__name__}")
    return typer.main.get_command(app)
