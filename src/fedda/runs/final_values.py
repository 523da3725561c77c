"""Final values: means over the last 5 % of the rounds (verdicts, sweeps), and the last row (the report)."""

import math
import statistics
from typing import Any

from . import formats
from .curves import Row, number
from .metrics import metric as metric_of
from .reading import RecordedRun

TAIL = 0.05


def tail(rows: list[Row], end: int, rounds: int | None = None) -> list[Row]:
    """The rows of one seed in the last 5 % of `rounds` before round `end`; at least the last row.

    >>> [row["round"] for row in tail([{"round": r} for r in range(0, 101, 2)], 100)]
    [96, 98, 100]
    """
    until = [row for row in rows if row["round"] <= end]
    # Compared as whole numbers: 0.95 * rounds is not an exact float.
    late = [row for row in until if (end - row["round"]) * round(1 / TAIL) < (rounds or end)]
    return late or until[-1:]


def mean(rows: list[Row], metric: str) -> float:
    """The mean of a metric; NaN if a row has no finite value of it."""
    return statistics.fmean(number(row.get(metric)) for row in rows) if rows else math.nan


def summary(run: RecordedRun) -> list[dict[str, Any]]:
    """One dict per algorithm with its final values, None for a missing one; all have the same keys.

    Values are means over seeds at the last evaluated round, `<metric>_std` the sample standard deviation
    (None for one seed). A metric is None when a seed diverged; `diverged` counts such seeds.

    >>> from .curves import aggregate
    >>> row = {"algorithm": "a", "seed": 0, "round": 7, "train_loss": 0.5}
    >>> curves = aggregate([row], {}, ["train_loss"])
    >>> [final] = summary(RecordedRun(rows=[row], labels=["a"], metrics=["train_loss"], curves=curves))
    >>> final["rounds"], final["train_loss"]
    (7, 0.5)
    """
    return [_final(run, label) for label in run.labels]


def _final(run: RecordedRun, label: str) -> dict[str, Any]:
    rows = run.rows_of(label)
    rounds = max((row["round"] for row in rows), default=None)
    last = [row for row in rows if row["round"] == rounds]
    final: dict[str, Any] = {"label": label, "rounds": rounds, "seeds": len(last)}
    final["diverged"] = sum(any(m in row and math.isnan(number(row[m])) for m in run.metrics) for row in last)
    for metric in run.metrics:
        curve = run.curves.get(label, {}).get(metric)
        final[metric] = None if curve is None else _finite(curve.mean[-1])
        final[f"{metric}_std"] = None if curve is None else _finite(curve.std[-1])
    if "test_accuracy" in run.metrics:
        best = list(best_by_seed(rows, "test_accuracy").values())
        final["best_test_accuracy"] = statistics.fmean(best) if best else None
        final["best_test_accuracy_std"] = statistics.stdev(best) if len(best) > 1 else None
    for key in ("gradients", "bytes_up", "bytes_down", "dropped"):
        final[key] = _finite(mean(last, key))
    up, down = final["bytes_up"], final["bytes_down"]
    final["bytes"] = None if up is None or down is None else up + down
    clock = run.timings.get(label, {})
    final["seconds"] = _finite(clock[max(clock)]) if clock else None
    final["failure"] = run.failures.get(label)
    final["privacy"] = next((row["privacy"] for row in last if isinstance(row.get("privacy"), str)), None)
    return final


def client_metrics(run: RecordedRun) -> list[str]:
    """The metrics by which clients are compared: the accuracy, or the loss if there are no classes, on held-out samples
    if each client has some; and the same after local steps, if the run has it."""
    known = {key for row in run.clients for key in row}
    names = [f"{part}_{name}" for name in ("accuracy", "loss") for part in ("validation", "test", "train")]
    first = [next((key for key in keys if key in known), None) for keys in (names, [f"tuned_{key}" for key in names])]
    return [key for key in first if key is not None]


def client_values(run: RecordedRun, label: str, key: str) -> dict[int, list[float]]:
    """The finite values of a metric over the clients, by seed."""
    values: dict[int, list[float]] = {}
    for row in run.clients:
        if row["algorithm"] == label and not math.isnan(number(row.get(key))):
            values.setdefault(row.get("seed", 0), []).append(number(row[key]))
    return values


def spread_over_clients(run: RecordedRun, label: str, key: str) -> dict[str, float] | None:
    """The mean over clients, the mean of the worst tenth of them, and the standard deviation; means over seeds.

    >>> rows = [{"algorithm": "a", "seed": 0, "client": k, "train_accuracy": k / 10} for k in range(11)]
    >>> spread = spread_over_clients(RecordedRun(clients=rows), "a", "train_accuracy")
    >>> {name: round(value, 3) for name, value in spread.items()}
    {'mean': 0.5, 'worst': 0.05, 'spread': 0.332}
    """
    by_seed = [sorted(values) for values in client_values(run, label, key).values()]
    if not by_seed:
        return None
    lower = metric_of(key, run.directions).better == "lower"
    worst = [values[::-1] if lower else values for values in by_seed]
    return {
        "mean": statistics.fmean(statistics.fmean(values) for values in by_seed),
        "worst": statistics.fmean(statistics.fmean(values[: math.ceil(len(values) / 10)]) for values in worst),
        "spread": statistics.fmean(statistics.stdev(values) if len(values) > 1 else 0.0 for values in by_seed),
    }


def client_lines(run: RecordedRun) -> list[tuple[str, str, list[str]]]:
    """Label, name of the metric, and mean, worst tenth and spread over clients as texts."""
    lines = []
    for key in client_metrics(run):
        shown = metric_of(key, run.directions)
        for label in run.labels:
            over = spread_over_clients(run, label, key)
            if over is not None:
                lines.append((label, shown.name, [formats.spread(v, None, shown.percent) for v in over.values()]))
    return lines


def best_by_seed(rows: list[Row], metric: str) -> dict[int, float]:
    """The highest value of each seed, which has its own best round: the highest point of the mean curve is lower."""
    best: dict[int, float] = {}
    for row in rows:
        value = number(row.get(metric))
        if not math.isnan(value):
            best[row["seed"]] = max(value, best.get(row["seed"], -math.inf))
    return best


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
