"""The rules about ranks: of one method among all, or of a group against the rest."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

from .compare import (
    INCONCLUSIVE,
    LOWER,
    NOT_SUPPORTED,
    SUPPORTED,
    Detail,
    Judged,
    Table,
    compare,
    detail,
    not_run,
    worth,
)
from .kinds import together
from .statements import Claim
from .values import METRICS, Value


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
