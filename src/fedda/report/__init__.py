"""The report of run folders: files in, `report.html` and figures out; nothing here imports torch.

Every function takes the path of a folder, or a run that was read already. `Report` holds the picture and the tables of
some runs, made once, for a page, a comparison, CSV and LaTeX.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runs import final_values
from ..runs.reading import RecordedRun
from ..runs.sweeps import is_sweep
from .pages import Place, Report, as_run
from .sweep import write_sweep

__all__ = ["RecordedRun", "Report", "compare", "csv", "is_sweep", "latex", "summary", "write", "write_sweep"]


def write(run: Place) -> Path:
    """Write `report.html` and its figures into the folder of a run or of a sweep, and return the path of the page."""
    if not isinstance(run, RecordedRun) and is_sweep(run):
        return write_sweep(run)
    return Report.of([run]).write()


def compare(runs: Sequence[Place], out: str | Path | None = None) -> Path:
    """Write `comparison.html` and `comparison.png` into `out`, by default the common parent of the folders."""
    return Report.of(runs).write_comparison(out)


def csv(runs: Sequence[Place]) -> str:
    """Every point of every curve of these runs as CSV, labelled as on the page."""
    return Report.of(runs).csv


def latex(runs: Sequence[Place]) -> str:
    """The final values of these runs as a LaTeX table, labelled as on the page."""
    return Report.of(runs).latex


def summary(run: Place) -> list[dict[str, Any]]:
    """One dict per algorithm with its final values, as `runs.final_values.summary` makes it."""
    return final_values.summary(as_run(run))
