"""The last line of every curve: what each algorithm reached, and what it cost."""

import math
import statistics
from pathlib import Path
from typing import Any

from fedda.runs.curves import Row, number
from fedda.runs.reading import RecordedRun, read


def summary(run: str | Path | RecordedRun) -> list[dict[str, Any]]:
    """Give one dict an algorithm with its final values, None where there is none; all have the same keys.

    Values are means over seeds at the last evaluated round, `<metric>_std` the sample standard deviation
    (None for one seed). A metric is None when a seed diverged; `diverged` counts such seeds.

    >>> row = {"algorithm": "a", "seed": 0, "round": 7, "train_loss": 0.5}
    >>> from fedda.runs.curves import aggregate
    >>> curves = aggregate([row], {}, ["train_loss"])
    >>> final = summary(RecordedRun(Path("a"), {}, {}, {}, [row], {}, ["a"], ["train_loss"], curves))
    >>> final[0]["rounds"], final[0]["train_loss"]
    (7, 0.5)
    """
    if not isinstance(run, RecordedRun):
        run = read(run)
    return [_final(run, label) for label in run.labels]


def _final(run: RecordedRun, label: str) -> dict[str, Any]:
    rows = [row for row in run.rows if row["algorithm"] == label]
    rounds = max((row["round"] for row in rows), default=None)
    last = [row for row in rows if row["round"] == rounds]
    final: dict[str, Any] = {"label": label, "rounds": rounds, "seeds": len(last)}
    final["diverged"] = sum(any(m in row and math.isnan(number(row[m])) for m in run.metrics) for row in last)
    for metric in run.metrics:
        curve = run.curves.get(label, {}).get(metric)
        final[metric] = None if curve is None else _known(curve.mean[-1])
        final[f"{metric}_std"] = None if curve is None else _known(curve.std[-1])
    if "test_accuracy" in run.metrics:
        best = _best(rows, "test_accuracy")
        final["best_test_accuracy"] = statistics.fmean(best) if best else None
        final["best_test_accuracy_std"] = statistics.stdev(best) if len(best) > 1 else None
    for key in ("gradients", "bytes_up", "bytes_down", "dropped"):
        final[key] = _known(statistics.fmean(number(row.get(key)) for row in last)) if last else None
    up, down = final["bytes_up"], final["bytes_down"]
    final["bytes"] = None if up is None or down is None else up + down
    clock = run.timings.get(label, {})
    final["seconds"] = _known(clock[max(clock)]) if clock else None
    final["failure"] = run.failures.get(label)
    final["privacy"] = next((row["privacy"] for row in last if isinstance(row.get("privacy"), str)), None)
    return final


def _best(rows: list[Row], metric: str) -> list[float]:
    # Each seed has its own best round: the highest point of the mean curve would be lower.
    best: dict[int, float] = {}
    for row in rows:
        value = number(row.get(metric))
        if not math.isnan(value):
            best[row["seed"]] = max(value, best.get(row["seed"], -math.inf))
    return list(best.values())


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
