"""The rule for a curve that turns: a test loss that rises late in training."""

from __future__ import annotations

import math

from ..runs.final_values import mean, tail
from .compare import INCONCLUSIVE, NOT_SUPPORTED, SEEDS, Detail, Judged, Table, decide, detail, not_run
from .kinds import together
from .statements import Claim
from .values import Value


def rise(claim: Claim, table: Table) -> Judged:
    """The smoothed curve (mean over 5 % of the rounds) has its minimum before 80 % of the rounds and ends above it."""
    (name,), (metric,) = claim.methods, claim.metrics
    method = table.get(name)
    if method is None or (metric not in method.values and not method.lost):
        return together([not_run(f"{name}, end vs minimum", metric)])
    label = method.label  # FedDA-1-1 is FedDA-MVR in the main figures
    if method.lost:
        return Judged(INCONCLUSIVE, [Detail(f"{label} (diverged)", metric, INCONCLUSIVE, seeds=method.seeds)])
    seeds: dict[int, list[dict[str, float]]] = {}
    for row in sorted(method.rows, key=lambda row: row["round"]):
        seeds.setdefault(row["seed"], []).append(row)

    smooth = {
        end: {seed: mean(tail(rows, end, method.rounds), metric) for seed, rows in seeds.items()}
        for end in sorted({row["round"] for row in method.rows})
    }
    if not all(math.isfinite(value) for at in smooth.values() for value in at.values()):
        return Judged(INCONCLUSIVE, [Detail(f"{label} (not finite on the way)", metric, INCONCLUSIVE)])
    curve = {end: Value.over(at, at) for end, at in smooth.items()}
    low, end = min(curve, key=lambda r: curve[r].mean), max(curve)
    d = Value((curve[end] - curve[low]).mean, (curve[end] - curve[low]).se, math.nan, method.seeds)
    late = 5 * low >= 4 * method.rounds
    verdict = NOT_SUPPORTED if late and d.seeds >= SEEDS else decide(d)
    line = detail(f"{label}, end vs minimum at round {low}", metric, d, curve[end].mean, curve[low].mean, verdict)
    return together([line], "the minimum is in the last fifth of the rounds" if late else "")
