"""`--serve`: the page of a run folder in a browser, while the run goes on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any


def serve_page(folder: Path, serve: bool, port: int | None) -> AbstractContextManager[Any]:
    """The server of the page, started by `with`; its address is printed. Nothing happens without `serve`."""
    if not serve:
        if port is not None:
            raise ValueError("--port is for --serve: give both")
        return nullcontext()
    from ..report.live import PORT, LivePage

    page = LivePage(folder, PORT if port is None else port)
    print(f"page: {page.url} (for this machine alone; Ctrl-C ends it)", flush=True)
    return page
