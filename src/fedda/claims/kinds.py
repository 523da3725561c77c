"""The rules for claims about methods: small functions from a claim and a table of values to a verdict with its numbers.

A table maps the method's name ("fedavg", or "fedavg (5)" where the claim is about local steps) to its `MethodValues`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from .compare import (
    INCONCLUSIVE,
    NOT_SUPPORTED,
    NOT_TESTED,
    SUPPORTED,
    Detail,
    Judged,
    Table,
    combine,
    compare,
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
    found = [compare(table, a, best, metric, claim.points, f"{a} vs {best} less {allowed}") for a in claim.methods]
    # A baseline that was not run may be the best.
    missing = [not_run(f"the best of the others, {b}", metric) for b in claim.against if known and b not in known]
    return together([*found, *missing])


def most(claim: Claim, table: Table) -> Judged:
    """The method is the best of all in at least three of four metrics; each metric's line shows the closest rival."""
    (a,) = claim.methods
    needed, shown = 3, []
    for metric in claim.metrics:
        found = [compare(table, a, b, metric) for b in claim.against]
        verdicts = {d.verdict for d in found}
        # One rival that is surely better is enough against "best"; all must be beaten for it.
        for verdict in (NOT_SUPPORTED, NOT_TESTED, INCONCLUSIVE, SUPPORTED):
            if verdict in verdicts:
                rivals = [d for d in found if d.verdict == verdict]
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
    """The method has the largest value of all in each metric; one that diverged has none, and is left out."""
    known = {name: method for name, method in table.items() if not method.lost}
    gone = [name for name in (*claim.methods, *claim.against) if name in table and name not in known]
    found = [compare(known, a, b, m) for a, b in pairs(claim) for m in claim.metrics if b not in gone]
    return together(found, f"left out: {', '.join(gone)}" if gone else "")


def drop(claim: Claim, table: Table) -> Judged:
    """The method loses most from the first figure to the second, whose methods are "heterogeneous NAME" in the table.

    Who diverges on the second figure alone has lost everything; who diverges on the first has nothing to lose.
    """
    (a,), (metric,) = claim.methods, claim.metrics

    def lost(name: str) -> Value | None:
        before, after = worth(table, name, metric), worth(table, f"heterogeneous {name}", metric)
        return None if before is None or after is None else (before - after)

    found = []
    for b in claim.against:
        ours, theirs = lost(a), lost(b)
        d = None if ours is None or theirs is None else ours - theirs
        undone = any(name in table and table[name].lost for name in (a, b))
        verdict = INCONCLUSIVE if undone and d is not None else ""
        words = f"drop of {a} vs drop of {b}"
        for name in (a, b):
            if f"heterogeneous {name}" in table and table[f"heterogeneous {name}"].lost:
                words += f" ({name} diverged)"
        found.append(detail(words, metric, d, finite(ours), finite(theirs), verdict))
    return together(found)


def finite(value: Value | None) -> float | None:
    return None if value is None or not math.isfinite(value.mean) else value.mean


def density(claim: Claim, table: Table) -> Judged:
    """Nothing to judge: the densities, where there are any."""
    known = {name: raw(table, name, "density") for name in claim.methods}
    found = [f"{name} {value:.3g}" for name, value in known.items() if value is not None]
    return Judged(NOT_TESTED, summary=f"densities: {', '.join(found)}" if found else "")
