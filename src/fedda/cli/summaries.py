"""The results of runs and of sweeps as tables in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runs.reading import RecordedRun
    from ..runs.sweeps import SweepResults

METRICS = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "density", "nonzero")
LAST = ("epsilon_outside", "epsilon_site")


def print_choices(sweep: SweepResults) -> None:
    """One table of the chosen values of a sweep, and the number of points without a value."""
    from ..progress import print_table
    from ..report.sweep import chosen

    rows = []
    for swept in sweep.algorithms:
        lost = sum(not point.ok for point in swept.points)
        rows.append([swept.label, *chosen(swept, sweep.metric), str(len(swept.points)), str(lost) if lost else ""])
    heads = ["algorithm", "chosen", sweep.metric.replace("_", " "), "points", "without a value"]
    print_table(heads, rows, sweep.folder.resolve().name)


def print_summaries(runs: list[RecordedRun]) -> None:
    """One table of final values: mean and standard deviation over seeds."""
    from ..progress import print_table
    from ..runs import formats
    from ..runs.final_values import client_lines, summary
    from ..runs.metrics import PARTS, metric

    finals = [(run.folder.resolve().name, row) for run in runs for row in summary(run)]
    own = [m for run in runs for m in run.metrics if m not in METRICS and m.startswith(PARTS)]
    columns = dict.fromkeys([*METRICS, *own, *LAST])
    shown = [c for c in columns if any(row.get(c) is not None for _, row in finals)]
    rows = []
    for name, row in finals:
        cells = [row["label"] + (" (failed)" if row["failure"] else ""), *([name] if len(runs) > 1 else [])]
        cells.append(str(row["rounds"]))
        cells.append(f"{row['seeds']}" + (f" ({row['diverged']} diverged)" if row["diverged"] else ""))
        for c in shown:
            cells.append(formats.spread(row.get(c), row.get(f"{c}_std"), metric(c).percent))
        rows.append([*cells, formats.size(row["bytes"]), formats.duration(row["seconds"])])
    several = ["run"] if len(runs) > 1 else []
    print_table(["algorithm", *several, "rounds", "seeds", *(c.replace("_", " ") for c in shown), "sent", "time"], rows)
    lines = [
        [label, *([run.folder.resolve().name] * len(several)), name, *values]
        for run in runs
        for label, name, values in client_lines(run)
    ]
    if lines:
        print_table(["over clients", *several, "metric", "mean", "worst tenth", "spread"], lines)
    for _, row in finals:
        if row["failure"]:
            print(f"{row['label']}: failed: {row['failure']}")
        if row["privacy"]:
            print(f"{row['label']}: privacy: {row['privacy']}")
