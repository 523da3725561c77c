"""The report of a run folder: files in, `report.html` and figures out; nothing here imports torch."""

from pathlib import Path

from fedda.report.compare import compare, csv, latex
from fedda.report.html import write_run
from fedda.report.summary import summary
from fedda.report.sweep import is_sweep, read_sweep, write_sweep
from fedda.runs.reading import RecordedRun, read

__all__ = [
    "RecordedRun",
    "compare",
    "csv",
    "is_sweep",
    "latex",
    "read",
    "read_sweep",
    "summary",
    "write",
    "write_sweep",
]


def write(folder: str | Path) -> Path:
    r"""Write the report of a run folder, or of a sweep folder (it holds `sweep.json`), and give the page's path.

    >>> import json, tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.toml").write_text("[algorithms.fedavg]\nlr = 0.1\n")
    >>> row = {"algorithm": "fedavg", "seed": 0, "round": 0, "train_loss": 2.5}
    >>> _ = (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    >>> write(folder).name
    'report.html'
    """
    return write_sweep(folder) if is_sweep(folder) else write_run(folder)
