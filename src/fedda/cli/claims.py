"""`fedda claims`: what runs say about the paper's claims."""

from pathlib import Path
from typing import Annotated

import typer

from .app import app
from .commands import PAPER


@app.command(rich_help_panel=PAPER, epilog="Example: fedda claims runs --details --json claims.json")
def claims(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some at any depth.")],
    details: Annotated[bool, typer.Option("--details", help="Print every comparison under the table.")] = False,
    json: Annotated[Path | None, typer.Option(help="Also write the verdicts into this file.")] = None,
) -> None:
    """Print a verdict on each of the paper's 31 claims, once per setting (the paper's values, tuned ones, ...).

    The claims are about the paper's own data sets and methods: other runs say nothing about them.
    """
    from .. import claims as judged
    from ..claims.compare import NOT_TESTED
    from ..files import write_whole
    from .verdicts import console, show

    groups = judged.verdicts(folders)
    screen = console()
    about_paper = [group for group in groups if group.runs or any(v.verdict != NOT_TESTED for v in group.verdicts)]
    for group in about_paper:
        show(group, details, screen)
    if not about_paper:
        print(f"{', '.join(map(str, folders))}: no run of a figure of the paper, so none of its claims is tested")
    if json is not None:
        write_whole(json, judged.dumps(groups))
        print(f"verdicts: {json}")
