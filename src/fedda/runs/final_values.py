"""The end of a curve: what a run came to is the mean over the last 5 % of its rounds."""

from __future__ import annotations

import math
import statistics

from fedda.runs.curves import Row, number

TAIL = 0.05


def tail(rows: list[Row], end: int, rounds: int | None = None) -> list[Row]:
    """The rows of one seed, in order, in the last 5 % of `rounds` up to the round `end`, at least the last of them.

    >>> [row["round"] for row in tail([{"round": r} for r in range(0, 101, 2)], 100)]
    [96, 98, 100]
    """
    until = [row for row in rows if row["round"] <= end]
    # Compared in whole numbers of 1 / TAIL: 0.95 * rounds is no exact float.
    late = [row for row in until if (end - row["round"]) * round(1 / TAIL) < (rounds or end)]
    return late or until[-1:]


def mean(rows: list[Row], metric: str) -> float:
    """The mean of a metric; NaN where a row has no finite number for it."""
    return statistics.fmean(number(row.get(metric)) for row in rows) if rows else math.nan
