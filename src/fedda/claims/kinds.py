"""The rules for claims about methods: from a claim and a table of values to a verdict with its numbers.

A table maps a method's name ("fedavg", or "fedavg (5)" if the claim is about local steps) to its `MethodValues`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..runs.final_values import mean, tail
from .compare import (
    INCONCLUSIVE,
    NOT_SUPPORTED,
    NOT_TESTED,
    SEEDS,
    SUPPORTED,
    Detail,
    Judged,
    Table,
    combine,
    compare,
    decide,
    detail,
    not_run,
    raw,
    worth,
)
from .statements import Claim
from .values import Value


def key(method: str, steps: int | None = None) -> str:
    """A method's name in a table.

    >>> key("fedcm"), key("fedcm", 5)
    ('fedcm', 'fedcm (5)')
    """
    return method if steps is None else f"{method} ({steps})"


def pairs(claim: Claim) -> Iterator[tuple[str, str]]:
    """Every method against every other, for every number of local steps."""
    for steps in claim.steps or (None,):
        for a in claim.methods:
            for b in claim.against:
                yield key(a, steps), key(b, steps)


def together(details: list[Detail], *remarks: str) -> Judged:
    return Judged(combine(d.verdict for d in details), details, [r for r in remarks if r])


def beats(claim: Claim, table: Table) -> Judged:
    """Each of `methods` is better than each of `against` in each metric."""
    return together([compare(table, a, b, m) for a, b in pairs(claim) for m in claim.metrics])


def at_least(claim: Claim, table: Table) -> Judged:
    """Each of `methods` is as good as the best of `against`, less `points`."""
    (metric,) = claim.metrics
    known = {b: value.mean for b in claim.against if (value := worth(table, b, metric)) is not None}
    best = max(known, key=lambda b: known[b], default=claim.against[0])
    allowed = f"{100 * claim.points:g} point" + "s" * (claim.points != 0.01)
    details = [compare(table, a, best, metric, claim.points, f"{a} vs {best} less {allowed}") for a in claim.methods]
    # A baseline that was not run may be the best.
    missing = [not_run(f"the best of the others, {b}", metric) for b in claim.against if known and b not in known]
    return together([*details, *missing])


def most(claim: Claim, table: Table) -> Judged:
    """The method is the best in at least three of four metrics; each metric shows the closest rival."""
    (a,) = claim.methods
    needed, shown = 3, []
    for metric in claim.metrics:
        details = [compare(table, a, b, metric) for b in claim.against]
        verdicts = {d.verdict for d in details}
        # One better rival refutes "best"; all must be beaten to support it.
        for verdict in (NOT_SUPPORTED, NOT_TESTED, INCONCLUSIVE, SUPPORTED):
            if verdict in verdicts:
                rivals = [d for d in details if d.verdict == verdict]
                closest = min(rivals, key=lambda d: math.inf if d.difference is None else d.difference)
                shown.append(closest)
                break
    counts = [d.verdict for d in shown]
    if counts.count(SUPPORTED) >= needed:
        verdict = SUPPORTED
    elif NOT_SUPPORTED in counts and len(counts) - counts.count(NOT_SUPPORTED) < needed:
        verdict = NOT_SUPPORTED
    else:
        verdict = NOT_TESTED if set(counts) == {NOT_TESTED} else INCONCLUSIVE
    remark = f"best in {counts.count(SUPPORTED)} of {len(counts)} metrics, {needed} are needed"
    return Judged(verdict, shown, [remark] if verdict != NOT_TESTED else [])


def largest(claim: Claim, table: Table) -> Judged:
    """The method has the largest value in each metric; methods that diverged have no value and are left out."""
    known = {name: method for name, method in table.items() if not method.lost}
    diverged = [name for name in (*claim.methods, *claim.against) if name in table and name not in known]
    details = [compare(known, a, b, m) for a, b in pairs(claim) for m in claim.metrics if b not in diverged]
    return together(details, f"left out: {', '.join(diverged)}" if diverged else "")


def drop(claim: Claim, table: Table) -> Judged:
    """The method loses most from the first figure to the second, whose methods are "heterogeneous NAME" in the table.

    Divergence only on the second figure loses everything; divergence on the first decides nothing.
    """
    (a,), (metric,) = claim.methods, claim.metrics

    def lost(name: str) -> Value | None:
        before, after = worth(table, name, metric), worth(table, f"heterogeneous {name}", metric)
        return None if before is None or after is None else (before - after)

    details = []
    for b in claim.against:
        ours, theirs = lost(a), lost(b)
        d = None if ours is None or theirs is None else ours - theirs
        diverged_first = any(name in table and table[name].lost for name in (a, b))
        verdict = INCONCLUSIVE if diverged_first and d is not None else ""
        text = f"drop of {a} vs drop of {b}"
        for name in (a, b):
            if f"heterogeneous {name}" in table and table[f"heterogeneous {name}"].lost:
                text += f" ({name} diverged)"
        details.append(detail(text, metric, d, finite(ours), finite(theirs), verdict))
    return together(details)


def finite(value: Value | None) -> float | None:
    return None if value is None or not math.isfinite(value.mean) else value.mean


def density(claim: Claim, table: Table) -> Judged:
    """No judgement: only the densities, if there are any."""
    known = {name: raw(table, name, "density") for name in claim.methods}
    listed = [f"{name} {value:.3g}" for name, value in known.items() if value is not None]
    return Judged(NOT_TESTED, summary=f"densities: {', '.join(listed)}" if listed else "")


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
