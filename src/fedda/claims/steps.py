"""The rules for claims about the number of local steps I, and about the bytes sent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from ..runs.curves import number
from ..runs.formats import size
from .compare import (
    INCONCLUSIVE,
    NOT_SUPPORTED,
    NOT_TESTED,
    SUPPORTED,
    Detail,
    Judged,
    Table,
    called,
    decide,
    detail,
    not_run,
    raw,
    worth,
)
from .kinds import finite, key, pairs, together
from .statements import Claim
from .values import MethodValues, Value

NEAR = 1e-3  # a few bytes of counters beside the vectors do not count


def between(claim: Claim, table: Table) -> Judged:
    """Each of `methods` is better than each of `against`, but by no more than `points`."""
    (metric,), details = claim.metrics, []
    for a, b in pairs(claim):
        ours, theirs = worth(table, a, metric), worth(table, b, metric)
        d = None if ours is None or theirs is None else ours - theirs
        verdict = ""
        if d is not None:
            bounds = {decide(d), decide((-d).plus(claim.points))}
            undecided = INCONCLUSIVE if INCONCLUSIVE in bounds else SUPPORTED
            verdict = NOT_SUPPORTED if NOT_SUPPORTED in bounds else undecided
        text = f"{called(table, a)} vs {called(table, b)}"
        details.append(detail(text, metric, d, raw(table, a, metric), raw(table, b, metric), verdict))
    return together(details)


def growing(
    claim: Claim, table: Table, names: tuple[str, ...], what: str
) -> tuple[list[tuple[int, int]], list[Detail]]:
    """Pairs of successive numbers of local steps that were run for all of `names`, and details for those not run."""
    there = [s for s in claim.steps if all(key(name, s) in table for name in names)]
    ways, (metric,) = list(pairwise(there)), claim.metrics
    absent = (
        [f"{s}" for s in claim.steps if s not in there] if ways else [f"{t} vs {s}" for s, t in pairwise(claim.steps)]
    )
    return ways, [not_run(f"{what}, I = {steps}", metric) for steps in absent]


def apart(table: Table, a: str, b: str, metric: str) -> Value | None:
    """How much better `a` is than `b`."""
    ours, theirs = worth(table, a, metric), worth(table, b, metric)
    return None if ours is None or theirs is None else ours - theirs


def less(a: Value | None, b: Value | None) -> Value | None:
    return None if a is None or b is None else a - b


def unbounded(d: Value | None) -> str:
    """A difference to a method that diverged has no size, so no growth can be judged."""
    return INCONCLUSIVE if d is not None and d.mean == math.inf else ""


def margin(claim: Claim, table: Table) -> Judged:
    """The lead of the method over the other grows from each number of local steps to the next."""
    (a,), (b,), (metric,) = claim.methods, claim.against, claim.metrics
    details, what = [], f"margin of {a} over {b}"
    ways, missing = growing(claim, table, (a, b), what)
    for few, many in ways:
        now = apart(table, key(a, many), key(b, many), metric)
        before = apart(table, key(a, few), key(b, few), metric)
        d = less(now, before)
        text = f"{what}, I = {many} vs {few}"
        details.append(detail(text, metric, d, finite(now), finite(before), unbounded(d)))
    return together([*details, *missing])


def improves(claim: Claim, table: Table) -> Judged:
    """Each method gets better from each number of local steps to the next."""
    (metric,), details = claim.metrics, []
    for name in claim.methods:
        ways, missing = growing(claim, table, (name,), name)
        for few, many in ways:
            now, before = key(name, many), key(name, few)
            text = f"{called(table, now)} vs {called(table, before)}"
            d = apart(table, now, before, metric)
            details.append(detail(text, metric, d, raw(table, now, metric), raw(table, before, metric), unbounded(d)))
        details += missing
    return together(details)


def gain(claim: Claim, table: Table) -> Judged:
    """From the fewest to the most local steps the method gains more than each of the others."""
    (a,), (metric,) = claim.methods, claim.metrics
    few, many = min(claim.steps), max(claim.steps)
    ours, details = apart(table, key(a, many), key(a, few), metric), []
    for b in claim.against:
        theirs = apart(table, key(b, many), key(b, few), metric)
        text = f"gain of {a} vs gain of {b}, I = {many} against {few}"
        details.append(detail(text, metric, less(ours, theirs), finite(ours), finite(theirs)))
    return together(details)


def traffic(claim: Claim, table: Table) -> Judged:
    """Both send the same bytes per round, up and down. Bytes are counted and do not depend on the local steps: one seed
    and one number of steps are enough."""
    details, summary = [], ""
    for a, b in pairs(claim):
        sent = {m: (a_round(table.get(a), m), a_round(table.get(b), m)) for m in claim.metrics}
        for metric, (ours, theirs) in sent.items():
            if ours is None or theirs is None:
                details.append(detail(f"{a} vs {b}", metric, None, ours, theirs))
                continue
            verdict = SUPPORTED if math.isclose(ours, theirs, rel_tol=NEAR) else NOT_SUPPORTED
            seeds = min(table[a].seeds, table[b].seeds)
            details.append(Detail(f"{a} vs {b}", metric, verdict, ours, theirs, ours - theirs, 0.0, None, seeds))
        summary = summary or "; ".join(_line(claim, sent))
    details = [d for d in details if d.verdict != NOT_TESTED] or details
    return Judged(together(details).verdict, details, summary=summary)


def _line(claim: Claim, sent: dict[str, tuple[float | None, float | None]]) -> Iterator[str]:
    (a,), (b,) = claim.methods, claim.against
    for metric, (ours, theirs) in sent.items():
        if ours is not None and theirs is not None:
            way = metric.removeprefix("bytes_")
            yield f"{way} a round: {a} {size(ours)}, {b} {size(theirs)} ({ours / (theirs or math.nan):.3g} times)"


def a_round(method: MethodValues | None, metric: str) -> float | None:
    """Bytes per round, between the first and the last row: the start is not counted."""
    rows = sorted((r for r in method.rows if metric in r), key=lambda r: r["round"]) if method else []
    if not rows or rows[0]["round"] == rows[-1]["round"]:
        return None
    sent = (number(rows[-1][metric]) - number(rows[0][metric])) / (rows[-1]["round"] - rows[0]["round"])
    return sent if math.isfinite(sent) else None
