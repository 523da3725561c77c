"""The rules: from a claim and a table of values to comparisons, and from these to a verdict.

A table maps a method's name ("fedavg", or "fedavg (5)" if the claim is about local steps) to its `MethodValues`. A rule
compares; when Holm's correction has been made over the whole claim, its verdict looks at the comparisons of one figure.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from ..runs.curves import number
from ..runs.final_values import mean, tail
from ..runs.formats import size
from .compare import (
    INCONCLUSIVE,
    LOWER,
    NOT_SUPPORTED,
    NOT_TESTED,
    SEEDS,
    SUPPORTED,
    Detail,
    Table,
    combine,
    compare,
    contrast,
    detail,
    every,
    holm,
    lead,
    not_run,
    raw,
    untrained,
)
from .statements import Claim, key
from .values import COSTS, METRICS, MethodValues, Value, by_seed

NEAR = 1e-3  # a few bytes of counters beside the vectors do not count
NEEDED = 3  # metrics of four are "most"

Verdict = tuple[str, str]  # and a remark


def verdict_on_every(claim: Claim, table: Table, details: Sequence[Detail]) -> Verdict:
    return every(d.verdict for d in details), ""


@dataclass(frozen=True)
class Rule:
    """How a kind of claim is compared and judged."""

    compare: Callable[[Claim, Table], list[Detail]]
    verdict: Callable[[Claim, Table, Sequence[Detail]], Verdict] = verdict_on_every
    checkpoint: bool = True  # it can be asked of the best checkpoint
    costs: bool = True  # it can be asked of the rounds and bytes to the target


def pairs(claim: Claim) -> Iterator[tuple[str, str]]:
    """Every method against every other, for every number of local steps."""
    for steps in claim.steps or (None,):
        for a in claim.methods:
            for b in claim.against:
                yield key(a, steps), key(b, steps)


def beats(claim: Claim, table: Table) -> list[Detail]:
    """Each of `methods` is better than each of `against` in each metric; if asked for, with the same penalty."""
    details = []
    for a, b in pairs(claim):
        if claim.equal_gamma and a in table and b in table and _gamma(table[a]) != _gamma(table[b]):
            details += [not_run(f"{a} vs {b} at equal gamma", m) for m in claim.metrics if not untrained(table, a, b)]
        else:
            details += [line for m in claim.metrics for line in compare(table, a, b, m)]
    return details


def _gamma(method: MethodValues) -> object:
    prox = method.params.get("prox")
    return prox.get("gamma") if isinstance(prox, dict) else None


def at_least(claim: Claim, table: Table) -> list[Detail]:
    """Each of `methods` is as good as the best of `against`, less `points`; of costs, better than the best."""
    (metric,) = claim.metrics
    known = [b for b in claim.against if b in table and metric in table[b].values and not table[b].untrained]
    best = known[0] if known else claim.against[0]
    for b in known[1:]:
        ahead = lead(table, b, best, metric)
        best = b if ahead is not None and ahead.mean > 0 else best
    points = 0.0 if metric in COSTS else claim.points
    less = f" less {100 * points:g} point{'s' * (points != 0.01)}" if points else ""
    details = [line for a in claim.methods for line in compare(table, a, best, metric, points, f"{a} vs {best}{less}")]
    # A baseline that was not run may be the best.
    absent = [b for b in claim.against if known and b not in table]
    return [*details, *(not_run(f"the best of the others, {b}", metric) for b in absent)]


def verdict_on_most(claim: Claim, table: Table, details: Sequence[Detail]) -> Verdict:
    """The method is the best in at least three of four metrics. One better rival refutes "best"."""
    best = [every(d.verdict for d in details if d.metric == m) for m in dict.fromkeys(d.metric for d in details)]
    needed = min(NEEDED, len(best))
    remark = f"best in {best.count(SUPPORTED)} of {len(best)} metrics, {needed} are needed"
    if best.count(SUPPORTED) >= needed:
        return SUPPORTED, remark
    if len(best) - best.count(NOT_SUPPORTED) < needed:
        return NOT_SUPPORTED, remark
    return (NOT_TESTED, "") if set(best) <= {NOT_TESTED} else (INCONCLUSIVE, remark)


def drop(claim: Claim, table: Table) -> list[Detail]:
    """The method loses most from the first figure to the second, whose methods are "heterogeneous NAME"."""
    (a,), (metric,) = claim.methods, claim.metrics
    details = []
    for b in claim.against:
        names = [(name, f"heterogeneous {name}") for name in (a, b)]
        if not untrained(table, *names[0], *names[1]):
            ours, theirs = (lead(table, *both, metric) for both in names)
            details.append(contrast(f"drop of {a} vs drop of {b}", metric, ours, theirs))
    return details


def density(claim: Claim, table: Table) -> list[Detail]:
    """No comparison."""
    return []


def rise(claim: Claim, table: Table) -> list[Detail]:
    """The smoothed curve (mean over 5 % of the rounds) has its minimum before 80 % of the rounds and ends above it."""
    (name,), (metric,) = claim.methods, claim.metrics
    method = table.get(name)
    if method is None or (metric not in method.values and not method.lost):
        return [not_run(f"{name}, end vs minimum", metric)]
    if method.untrained:
        return []
    label = method.label  # FedDA-1-1 is FedDA-MVR in the main figures
    smooth = {
        end: {seed: mean(tail(rows, end, method.rounds), metric) for seed, rows in by_seed(method.rows).items()}
        for end in sorted({row["round"] for row in method.rows})
    }
    if not all(math.isfinite(value) for at in smooth.values() for value in at.values()):
        return [Detail(f"{label} (not finite on the way)", metric, INCONCLUSIVE)]
    curve = {end: Value(at) for end, at in smooth.items()}
    low, end = min(curve, key=lambda r: curve[r].mean), max(curve)
    d = curve[end] - curve[low]
    line = detail(f"{label}, end vs minimum at round {low}", metric, d, curve[end].mean, curve[low].mean)
    if 5 * low >= 4 * method.rounds and d.seeds >= SEEDS:
        # It may still rise after the end of a short run.
        verdict, text = INCONCLUSIVE if method.short else NOT_SUPPORTED, f"{line.comparison}, in the last fifth"
        return [replace(line, comparison=text, verdict=verdict, p=None)]
    return [line]


# -- ranks ------------------------------------------------------------------------------------------------------------
def verdict_on_rank(claim: Claim, table: Table, details: Sequence[Detail]) -> Verdict:
    """The method's rank is in the better half, even if it lost every undecided comparison and to every method that was
    not run."""
    if every(d.verdict for d in details) == NOT_TESTED:
        return NOT_TESTED, ""
    counts = [d.verdict for d in details]
    whole = len(counts) + 1
    best, worst = 1 + counts.count(NOT_SUPPORTED), whole - counts.count(SUPPORTED)
    verdict = SUPPORTED if 2 * worst <= whole else NOT_SUPPORTED if 2 * best > whole else INCONCLUSIVE
    return verdict, f"rank of {claim.methods[0]}: {best}" + (f" to {worst}" if worst > best else "") + f" of {whole}"


def mean_rank(claim: Claim, table: Table) -> list[Detail]:
    """The mean rank of `methods` is better than that of `against`; a rank is per seed, the mean of those by loss and
    by accuracy. Methods that did not train have no rank."""
    trained = {name: method for name, method in table.items() if not method.untrained}
    ours, theirs = ([name for name in side if name in trained] for side in (claim.methods, claim.against))
    missing = [name for name in (*claim.methods, *claim.against) if name not in table]
    details = []
    for side in claim.metrics:
        ranks, text, metric = _ranks(trained, [*ours, *theirs], side), "mean rank, adaptive vs others", f"{side}_rank"
        if ours and theirs and ranks:
            a, b = (Value({s: fmean(r[n] for n in group) for s, r in ranks.items()}) for group in (ours, theirs))
            line = detail(text, metric, b - a, a.mean, b.mean)
            # A method that was not run would change all ranks.
            details.append(replace(line, verdict=INCONCLUSIVE, p=None) if missing else line)
        elif ours and theirs:
            details.append(not_run(text, metric))
        details += [not_run(f"rank of {name}", metric) for name in missing]
    return details


def verdict_without(claim: Claim, table: Table, details: Sequence[Detail]) -> Verdict:
    """The verdict, and beside it the one without the methods of `without`."""
    verdict = every(d.verdict for d in details)
    if not any(name in table for name in claim.without):
        return verdict, ""
    less = replace(claim, methods=tuple(name for name in claim.methods if name not in claim.without))
    again = combine(d.verdict for d in holm(mean_rank(less, table)))
    return verdict, f"without {', '.join(claim.without)}: {again}"


def _ranks(table: Table, names: list[str], side: str) -> dict[int, dict[str, float]]:
    """Seed -> method -> rank (1 is best, ties share), the mean of the ranks by loss and by accuracy."""
    metrics = [side] if side in COSTS else [m for m in METRICS if m.startswith(f"{side}_")]
    if not names or any(m not in table[name].values for name in names for m in metrics):
        return {}
    seeds = set.intersection(*(set(table[name].values[m].by_seed) for name in names for m in metrics))
    ranks: dict[int, dict[str, float]] = {}
    for seed in sorted(seeds):
        by_metric: dict[str, list[float]] = {name: [] for name in names}
        for metric in metrics:
            sign = 1 if metric in LOWER or metric in COSTS else -1
            values = {name: table[name].values[metric] for name in names}
            at = {n: math.inf if seed in v.open else sign * v.by_seed[seed] for n, v in values.items()}
            for name in names:
                below, same = (sum(op(v, at[name]) for v in at.values()) for op in (float.__lt__, float.__eq__))
                by_metric[name].append(below + (same + 1) / 2)
        ranks[seed] = {name: fmean(values) for name, values in by_metric.items()}
    return ranks


# -- local steps ------------------------------------------------------------------------------------------------------
def between(claim: Claim, table: Table) -> list[Detail]:
    """Each of `methods` is better than each of `against`, but by no more than `points`; of costs, better."""
    details = []
    for a, b in pairs(claim):
        for metric in claim.metrics:
            details += compare(table, a, b, metric)
            d = lead(table, a, b, metric)
            if d is not None and metric not in COSTS and not untrained(table, a, b):
                text = f"{a} vs {b}, at most {100 * claim.points:g} point{'s' * (claim.points != 0.01)}"
                details.append(
                    detail(text, metric, (-d).plus(claim.points), raw(table, a, metric), raw(table, b, metric))
                )
    return details


def growing(claim: Claim, table: Table, names: Sequence[str], what: str) -> tuple[list[tuple[int, int]], list[Detail]]:
    """Pairs of successive numbers of local steps for which all of `names` trained, and details for those not run."""
    there = [s for s in claim.steps if all(key(name, s) in table for name in names)]
    trained = [s for s in there if not untrained(table, *(key(name, s) for name in names))]
    absent = [f"{s}" for s in claim.steps if s not in there]
    if len(there) < 2:
        absent = [f"{t} vs {s}" for s, t in pairwise(claim.steps)]
    return list(pairwise(trained)), [not_run(f"{what}, I = {steps}", claim.metrics[0]) for steps in absent]


def margin(claim: Claim, table: Table) -> list[Detail]:
    """The lead of the method over the other grows from each number of local steps to the next."""
    (a,), (b,), (metric,) = claim.methods, claim.against, claim.metrics
    what = f"margin of {a} over {b}"
    ways, missing = growing(claim, table, (a, b), what)
    details = []
    for few, many in ways:
        now, before = (lead(table, key(a, steps), key(b, steps), metric) for steps in (many, few))
        details.append(contrast(f"{what}, I = {many} vs {few}", metric, now, before))
    return [*details, *missing]


def verdict_on_margin(claim: Claim, table: Table, details: Sequence[Detail]) -> Verdict:
    """The verdict; a margin below 1 in cost is a deficit, and a smaller deficit counts as growth."""
    behind = any(d.metric in COSTS and d.a is not None and d.a < 1 for d in details)
    a, b = claim.methods[0], claim.against[0]
    return every(d.verdict for d in details), f"{a} needs more rounds than {b}: its deficit shrinks" if behind else ""


def improves(claim: Claim, table: Table) -> list[Detail]:
    """Each method gets better from each number of local steps to the next."""
    (metric,), details = claim.metrics, []
    for name in claim.methods:
        ways, missing = growing(claim, table, (name,), name)
        details += [line for few, many in ways for line in compare(table, key(name, many), key(name, few), metric)]
        details += missing
    return details


def gain(claim: Claim, table: Table) -> list[Detail]:
    """From the fewest to the most local steps the method gains more than each of the others."""
    (a,), (metric,), details = claim.methods, claim.metrics, []
    few, many = min(claim.steps), max(claim.steps)
    for b in claim.against:
        ends = [(key(name, many), key(name, few)) for name in (a, b)]
        if not untrained(table, *ends[0], *ends[1]):
            ours, theirs = (lead(table, *both, metric) for both in ends)
            details.append(contrast(f"gain of {a} vs gain of {b}, I = {many} against {few}", metric, ours, theirs))
    return details


# -- bytes ------------------------------------------------------------------------------------------------------------
def traffic(claim: Claim, table: Table) -> list[Detail]:
    """Both send the same bytes per round, up and down. Bytes are counted and do not depend on the local steps: one seed
    and one number of steps are enough.

    If all clients take part, the means of what they sent up are enough for them to continue: a download counts at
    most as much as an upload.
    """
    details = []
    for a, b in pairs(claim):
        for metric in claim.metrics:
            ours, theirs = (needed(table.get(name), metric) for name in (a, b))
            if ours is None or theirs is None:
                details.append(not_run(f"{a} vs {b}", metric))
                continue
            verdict = SUPPORTED if math.isclose(ours, theirs, rel_tol=NEAR) else NOT_SUPPORTED
            seeds = min(table[a].seeds, table[b].seeds)
            details.append(Detail(f"{a} vs {b}", metric, verdict, ours, theirs, ours - theirs, seeds=seeds))
    return [d for d in details if d.verdict != NOT_TESTED] or details


def verdict_on_traffic(claim: Claim, table: Table, details: Sequence[Detail]) -> Verdict:
    """The verdict, and what was sent and needed."""
    texts = []
    for name in next((both for both in pairs(claim) if all(a_round(table.get(n), "bytes_down") for n in both)), ()):
        up, down = (a_round(table[name], metric) or 0.0 for metric in ("bytes_up", "bytes_down"))
        least = needed(table[name], "bytes_down") or 0.0
        enough = "" if math.isclose(least, down, rel_tol=NEAR) else f", of which {size(least)} are needed"
        texts.append(f"{name.split(' (')[0]} sends {size(up)} up and {size(down)} down per round{enough}")
    return every(d.verdict for d in details), "; ".join(texts)


def needed(method: MethodValues | None, metric: str) -> float | None:
    """Bytes per round that a method has to send."""
    up, sent = a_round(method, "bytes_up"), a_round(method, metric)
    return min(up, sent) if method and method.full and up is not None and sent is not None else sent


def a_round(method: MethodValues | None, metric: str) -> float | None:
    """Bytes per round, between the first and the last row: the start is not counted."""
    rows = sorted((r for r in method.rows if metric in r), key=lambda r: r["round"]) if method else []
    if not rows or rows[0]["round"] == rows[-1]["round"]:
        return None
    sent = (number(rows[-1][metric]) - number(rows[0][metric])) / (rows[-1]["round"] - rows[0]["round"])
    return sent if math.isfinite(sent) else None


KINDS = {
    "beats": Rule(beats),
    "at_least": Rule(at_least),
    "most": Rule(beats, verdict_on_most),
    "largest": Rule(beats, costs=False),
    "drop": Rule(drop),
    "density": Rule(density, checkpoint=False, costs=False),
    "rise": Rule(rise, checkpoint=False, costs=False),
    "rank": Rule(beats, verdict_on_rank),
    "mean_rank": Rule(mean_rank, verdict_without),
    "between": Rule(between),
    "margin": Rule(margin, verdict_on_margin),
    "improves": Rule(improves),
    "gain": Rule(gain),
    "traffic": Rule(traffic, verdict_on_traffic, checkpoint=False, costs=False),
}
