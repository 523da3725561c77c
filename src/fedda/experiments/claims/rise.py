"""The rule for a curve that turns: a test loss that rises late in training."""

from __future__ import annotations

import math
from statistics import fmean

from .compare import INCONCLUSIVE, NOT_SUPPORTED, SEEDS, Detail, Judged, Table, decide, detail
from .kinds import together
from .statements import Claim
from .values import Value, tail


def rise(claim: Claim, table: Table) -> Judged:
    """The smoothed curve (mean over 5 % of the rounds) has its minimum before 80 % of the rounds and ends above it."""
    (name,), (metric,) = claim.methods, claim.metrics
    method = table.get(name)
    if method is None or (metric not in method.values and not method.lost):
        return together([detail(f"{name}, end vs minimum", metric, None, None, None)])
    if method.lost:
        return Judged(INCONCLUSIVE, [Detail(f"{name} (diverged)", metric, INCONCLUSIVE, seeds=method.seeds)])
    seeds: dict[int, list[dict[str, float]]] = {}
    for row in sorted(method.rows, key=lambda row: row["round"]):
        seeds.setdefault(row["seed"], []).append(row)

    def smooth(end: int) -> Value:
        at = {s: fmean(row[metric] for row in tail(rows, end, method.rounds)) for s, rows in seeds.items()}
        return Value.over(at, at)

    try:
        curve = {r: smooth(r) for r in sorted({row["round"] for row in method.rows})}
    except TypeError:  # None: it was not finite on the way
        return Judged(INCONCLUSIVE, [Detail(f"{name} (not finite on the way)", metric, INCONCLUSIVE)])
    low, end = min(curve, key=lambda r: curve[r].mean), max(curve)
    d = Value((curve[end] - curve[low]).mean, (curve[end] - curve[low]).se, math.nan, method.seeds)
    late = 5 * low >= 4 * method.rounds
    verdict = NOT_SUPPORTED if late and d.seeds >= SEEDS else decide(d)
    line = detail(f"{name}, end vs minimum at round {low}", metric, d, curve[end].mean, curve[low].mean, verdict)
    return together([line], "the minimum is in the last fifth of the rounds" if late else "")
