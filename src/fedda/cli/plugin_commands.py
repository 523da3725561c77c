"""Commands of installed plugins, beside the built-in ones."""

import click
import typer
from typer.core import TyperGroup

from .. import plugins

# Commands of known packages, and how to install them.
ELSEWHERE = {
    "reproduce": "'fedda reproduce' is in the package fedda-paper, which is not installed: "
    "run 'pip install -e paper' in a checkout of fedda"
}


class CommandGroup(TyperGroup):
    """The built-in commands, then those of plugins.

    `fedda --help` lists a plugin's command with the description of its package and does not import it.
    """

    def list_commands(self, context: click.Context) -> list[str]:
        builtin = super().list_commands(context)
        return [*builtin, *(name for name in plugins.commands() if name not in builtin)]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if (builtin := super().get_command(context, name)) is not None:
            return builtin
        if (point := plugins.commands().get(name)) is None:
            return None
        summary = point.dist.metadata["Summary"] if point.dist else None
        return click.Command(name, help=summary or f"A command of the package {point.module}.")

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
