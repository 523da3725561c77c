"""`fedda claims`: what runs say about the paper's claims."""

from pathlib import Path
from typing import Annotated

import typer

from .app import app


@app.command(epilog="Example: fedda claims runs --details --json claims.json")
def claims(
    folders: list[Path],
    details: Annotated[bool, typer.Option("--details", help="Print every comparison under the table.")] = False,
    json: Annotated[Path | None, typer.Option(help="Also write the verdicts into this file.")] = None,
) -> None:
    """Print a verdict on each of the paper's 31 claims, once per setting (the paper's values, tuned ones, ...).

    FOLDERS are run folders, or folders that hold some at any depth.
    """
    from .. import claims as judged
    from ..files import write_whole
    from .verdicts import console, show

    groups = judged.verdicts(folders)
    screen = console()
    for group in groups:
        show(group, details, screen)
    if json is not None:
        write_whole(json, judged.dumps(groups))
        print(f"verdicts: {json}")
