"""The rules: from a claim and a table of values to a verdict with its numbers.

A table maps a method's name ("fedavg", or "fedavg (5)" if the claim is about local steps) to its `MethodValues`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
    Judged,
    Table,
    combine,
    compare,
    decide,
    detail,
    lead,
    not_run,
    raw,
    worth,
)
from .statements import Claim, key
from .values import METRICS, MethodValues, Value, by_seed

NEAR = 1e-3  # a few bytes of counters beside the vectors do not count


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
    (a,), needed = claim.methods, 3
    # One better rival refutes "best"; all must be beaten to support it.
    order = (NOT_SUPPORTED, NOT_TESTED, INCONCLUSIVE, SUPPORTED)

    def closeness(d: Detail) -> tuple[int, float]:
        return order.index(d.verdict), math.inf if d.difference is None else d.difference

    shown = [min((compare(table, a, b, m) for b in claim.against), key=closeness) for m in claim.metrics]
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
    details = []
    for b in claim.against:
        ours, theirs = (lead(table, name, f"heterogeneous {name}", metric) for name in (a, b))
        text = f"drop of {a} vs drop of {b}"
        for name in (a, b):
            if f"heterogeneous {name}" in table and table[f"heterogeneous {name}"].lost:
                text += f" ({name} diverged)"
        diverged_first = any(name in table and table[name].lost for name in (a, b))
        details.append(contrast(text, metric, ours, theirs, INCONCLUSIVE if diverged_first else ""))
    return together(details)


def contrast(text: str, metric: str, ours: Value | None, theirs: Value | None, verdict: str = "") -> Detail:
    """One difference against another: a drop, a margin or a gain."""
    d = None if ours is None or theirs is None else ours - theirs
    a, b = (None if v is None or not math.isfinite(v.mean) else v.mean for v in (ours, theirs))
    return detail(text, metric, d, a, b, verdict)


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
    smooth = {
        end: {seed: mean(tail(rows, end, method.rounds), metric) for seed, rows in by_seed(method.rows).items()}
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


# -- ranks ------------------------------------------------------------------------------------------------------------
def rank(claim: Claim, table: Table) -> Judged:
    """The method's rank is in the better half, even if it lost every undecided comparison and to every method that was
    not run."""
    (a,), (metric,) = claim.methods, claim.metrics
    there = [b for b in claim.against if worth(table, b, metric) is not None]
    details = [compare(table, a, b, metric) for b in there]
    ours = worth(table, a, metric)
    if ours is None or not details:
        return together([not_run(f"rank of {a}", metric)])
    size, whole = len(details) + 1, len(claim.against) + 1
    best = 1 + sum(d.verdict == NOT_SUPPORTED for d in details)
    worst = whole - sum(d.verdict == SUPPORTED for d in details)
    verdict = SUPPORTED if 2 * worst <= whole else NOT_SUPPORTED if 2 * best > whole else INCONCLUSIVE

    def place(of: str) -> int:
        rivals = [worth(table, b, metric) for b in claim.against]
        return 1 + sum(bool(getattr(rival, of) > getattr(ours, of)) for rival in rivals if rival is not None)

    at, half = place("mean"), whole / 2
    seeds = min(d.seeds or 0 for d in details)
    area = half - place("area") if math.isfinite(ours.area) else None
    line = Detail(f"rank of {a} among {size}", f"{metric}_rank", verdict, at, half, half - at, None, area, seeds)
    missing = [not_run(f"{a} vs {b}", metric) for b in claim.against if b not in there]
    return together([line, *missing], f"surely {best}" + (f" to {worst}" if worst > best else "") + f" of {whole}")


def mean_rank(claim: Claim, table: Table) -> Judged:
    """The mean rank of `methods` is better than that of `against`; a rank is per seed, the mean of those by loss and
    by accuracy."""
    first, again = _mean_rank(claim, table), []
    if any(name in table for name in claim.without):
        less = replace(claim, methods=tuple(name for name in claim.methods if name not in claim.without))
        again = [f"without {', '.join(claim.without)}: {_mean_rank(less, table).verdict}"]
    return Judged(first.verdict, first.details, again)


def _mean_rank(claim: Claim, table: Table) -> Judged:
    ours, theirs = ([name for name in side if name in table] for side in (claim.methods, claim.against))
    details = []
    for side in claim.metrics:
        last = _by_seed(table, [*ours, *theirs], side, "last")
        areas = _by_seed(table, [*ours, *theirs], side, "areas")
        d = None
        if ours and theirs and last:
            d = Value.over(*({s: _apart(r, ours, theirs) for s, r in ranks.items()} for ranks in (last, areas)))
        a, b = (fmean(r[n] for r in last.values() for n in group) if d else None for group in (ours, theirs))
        missing = [name for name in (*claim.methods, *claim.against) if name not in table]
        # A method that was not run would change all ranks.
        open_ = INCONCLUSIVE if d and missing else ""
        details.append(detail("mean rank, adaptive vs others", f"{side}_rank", d, a, b, open_))
        details += [not_run(f"rank of {name}", f"{side}_rank") for name in missing]
    return together(details)


def _apart(ranks: dict[str, float], ours: list[str], theirs: list[str]) -> float:
    return fmean(ranks[name] for name in theirs) - fmean(ranks[name] for name in ours)


def _by_seed(table: Table, names: list[str], side: str, of: str) -> dict[int, dict[str, float]]:
    """Seed -> method -> rank (1 is best, ties share), the mean of the ranks by loss and by accuracy."""
    metrics = [m for m in METRICS if m.startswith(f"{side}_")]
    alive = {n: table[n] for n in names if not table[n].lost}
    if not alive or any(m not in method.values for method in alive.values() for m in metrics):
        return {}
    seeds = set.intersection(*(set(method.values[m].last) for method in alive.values() for m in metrics))
    by_seed: dict[int, dict[str, float]] = {}
    for seed in seeds:
        ranks: dict[str, list[float]] = {name: [] for name in names}
        for metric in metrics:
            sign = 1 if metric in LOWER else -1
            at = {n: sign * getattr(m.values[metric], of)[seed] for n, m in alive.items()}
            at |= {n: math.inf for n in names if n not in alive}
            for name in names:
                below = sum(v < at[name] for v in at.values())
                same = sum(v == at[name] for v in at.values())
                ranks[name].append(below + (same + 1) / 2)
        by_seed[seed] = {name: fmean(values) for name, values in ranks.items()}
    return by_seed


# -- local steps ------------------------------------------------------------------------------------------------------
def between(claim: Claim, table: Table) -> Judged:
    """Each of `methods` is better than each of `against`, but by no more than `points`."""
    (metric,), details = claim.metrics, []
    for a, b in pairs(claim):
        line, d = compare(table, a, b, metric), lead(table, a, b, metric)
        if d is not None:
            bounds = {decide(d), decide((-d).plus(claim.points))}
            undecided = INCONCLUSIVE if INCONCLUSIVE in bounds else SUPPORTED
            line = replace(line, verdict=NOT_SUPPORTED if NOT_SUPPORTED in bounds else undecided)
        details.append(line)
    return together(details)


def growing(claim: Claim, table: Table, names: Sequence[str], what: str) -> tuple[list[tuple[int, int]], list[Detail]]:
    """Pairs of successive numbers of local steps that were run for all of `names`, and details for those not run."""
    there = [s for s in claim.steps if all(key(name, s) in table for name in names)]
    ways, (metric,) = list(pairwise(there)), claim.metrics
    absent = (
        [f"{s}" for s in claim.steps if s not in there] if ways else [f"{t} vs {s}" for s, t in pairwise(claim.steps)]
    )
    return ways, [not_run(f"{what}, I = {steps}", metric) for steps in absent]


def bounded(line: Detail) -> Detail:
    """A difference to a method that diverged has no size, so no growth can be judged."""
    unbounded = line.verdict == SUPPORTED and line.difference is None
    return replace(line, verdict=INCONCLUSIVE) if unbounded else line


def margin(claim: Claim, table: Table) -> Judged:
    """The lead of the method over the other grows from each number of local steps to the next."""
    (a,), (b,), (metric,) = claim.methods, claim.against, claim.metrics
    details, what = [], f"margin of {a} over {b}"
    ways, missing = growing(claim, table, (a, b), what)
    for few, many in ways:
        now, before = (lead(table, key(a, steps), key(b, steps), metric) for steps in (many, few))
        details.append(bounded(contrast(f"{what}, I = {many} vs {few}", metric, now, before)))
    return together([*details, *missing])


def improves(claim: Claim, table: Table) -> Judged:
    """Each method gets better from each number of local steps to the next."""
    (metric,), details = claim.metrics, []
    for name in claim.methods:
        ways, missing = growing(claim, table, (name,), name)
        details += [bounded(compare(table, key(name, many), key(name, few), metric)) for few, many in ways]
        details += missing
    return together(details)


def gain(claim: Claim, table: Table) -> Judged:
    """From the fewest to the most local steps the method gains more than each of the others."""
    (a,), (metric,) = claim.methods, claim.metrics
    few, many = min(claim.steps), max(claim.steps)
    ours, details = lead(table, key(a, many), key(a, few), metric), []
    for b in claim.against:
        theirs = lead(table, key(b, many), key(b, few), metric)
        details.append(contrast(f"gain of {a} vs gain of {b}, I = {many} against {few}", metric, ours, theirs))
    return together(details)


# -- bytes ------------------------------------------------------------------------------------------------------------
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
    return Judged(combine(d.verdict for d in details), details, summary=summary)


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


KINDS = {
    rule.__name__: rule
    for rule in (
        beats, at_least, most, largest, drop, density, rise, rank, mean_rank, between, margin, improves, gain, traffic,
    )
}  # fmt: skip
