"""The rule of a comparison: a difference by seeds, its t test, Holm's correction; and how verdicts combine."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .values import COSTS, LEVEL, MethodValues, Value

SUPPORTED, PARTIAL, INCONCLUSIVE = "SUPPORTED", "PARTIAL", "INCONCLUSIVE"
NOT_SUPPORTED, NOT_TESTED = "NOT SUPPORTED", "NOT TESTED"
WORDS = (SUPPORTED, PARTIAL, NOT_SUPPORTED, INCONCLUSIVE, NOT_TESTED)
SEEDS = 3  # fewer seeds decide nothing
SPARSE = frozenset(("density", "nonzero"))
LOWER = SPARSE | {"train_loss", "test_loss"}  # lower is better; for all others, higher

Table = Mapping[str, MethodValues]


@dataclass(frozen=True)
class Detail:
    """One comparison, A against B; a positive difference favours the claim."""

    comparison: str
    metric: str
    verdict: str
    a: float | None = None
    b: float | None = None
    difference: float | None = None  # of costs: the natural logarithm of B / A
    interval: float | None = None  # half the width of the 95 % t interval
    p: float | None = None  # with Holm's correction, once the claim is judged
    seeds: int | None = None
    way: str = ""  # where on the curves it was made


def decide(difference: Value, p: float | None = None) -> str:
    """The verdict on a difference that should be positive; `p` replaces its own p-value.

    >>> [decide(Value({0: v, 1: v + 0.01, 2: v - 0.01})) for v in (0.03, 0.01, -0.03)]
    ['SUPPORTED', 'INCONCLUSIVE', 'NOT SUPPORTED']
    >>> decide(Value({0: 0.03, 1: 0.03}))
    'INCONCLUSIVE'
    """
    if difference.seeds < SEEDS or (difference.p if p is None else p) >= LEVEL:
        return INCONCLUSIVE
    return SUPPORTED if difference.mean > 0 else NOT_SUPPORTED


def holm(details: Sequence[Detail]) -> list[Detail]:
    """The comparisons with p-values, and verdicts, that hold for all of them together.

    >>> [d.p for d in holm([Detail("a", "", SUPPORTED, difference=1.0, p=p) for p in (0.02, 0.04, 0.01)])]
    [0.04, 0.04, 0.03]
    """
    adjusted, least = list(details), 0.0
    order = sorted((p, i) for i, d in enumerate(details) if (p := d.p) is not None)
    for rank, (p, i) in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * p))
        verdict = details[i].verdict if least < LEVEL else INCONCLUSIVE
        adjusted[i] = replace(details[i], p=least, verdict=verdict)
    return adjusted


def combine(parts: Iterable[str]) -> str:
    """The verdict on a claim with separate parts: PARTIAL if some hold, but not all."""
    verdicts = set(parts)
    if SUPPORTED in verdicts and verdicts != {SUPPORTED}:
        return PARTIAL
    return every(verdicts)


def every(cases: Iterable[str]) -> str:
    """The verdict on a claim about every case: one case against it refutes it."""
    verdicts = set(cases)
    if verdicts <= {NOT_TESTED}:
        return NOT_TESTED
    if NOT_SUPPORTED in verdicts:
        return NOT_SUPPORTED
    return SUPPORTED if verdicts == {SUPPORTED} else INCONCLUSIVE


def lead(table: Table, a: str, b: str, metric: str) -> Value | None:
    """How much better `a` is than `b`; None if one of them has no value."""
    if a not in table or b not in table:
        return None
    ours, theirs = table[a].values.get(metric), table[b].values.get(metric)
    if ours is None or theirs is None:
        return None
    if metric in COSTS:
        return ours.saved(theirs)
    return theirs - ours if metric in LOWER else ours - theirs


def compare(table: Table, a: str, b: str, metric: str, margin: float = 0.0, what: str = "") -> list[Detail]:
    """Whether `a` is better than `b`, or not worse by more than `margin`; nothing if one of them did not train."""
    if untrained(table, a, b):
        return []
    d = lead(table, a, b, metric)
    d = None if d is None else d.plus(margin)
    return [detail(what or f"{a} vs {b}", metric, d, raw(table, a, metric), raw(table, b, metric))]


def better(a: MethodValues, b: MethodValues, metric: str) -> str:
    """The verdict on one comparison by itself; a method without values loses to one that has some."""
    d = lead({"a": a, "b": b}, "a", "b", metric)
    return decide(d) if d is not None else SUPPORTED if metric in a.values else INCONCLUSIVE


def untrained(table: Table, *keys: str) -> bool:
    return any(key in table and table[key].untrained for key in keys)


def detail(text: str, metric: str, d: Value | None, a: float | None, b: float | None) -> Detail:
    """A comparison by its difference; None means that it was not run."""
    if d is None or not d.seeds:
        return not_run(text, metric)
    p, interval = (d.p, d.interval) if d.seeds >= SEEDS else (None, None)
    return Detail(text, metric, decide(d), a, b, d.mean, interval, p, d.seeds)


def contrast(text: str, metric: str, ours: Value | None, theirs: Value | None) -> Detail:
    """One difference against another: a drop, a margin or a gain. Of costs, both must reach the target everywhere."""
    if ours is None or theirs is None:
        return not_run(text, metric)
    a, b = (math.exp(v.mean) if metric in COSTS else v.mean for v in (ours, theirs))
    line = detail(text, metric, ours - theirs, a, b)
    return replace(line, verdict=INCONCLUSIVE, p=None) if ours.open | theirs.open else line


def not_run(comparison: str, metric: str) -> Detail:
    """A part of the claim without a run: a method or a number of steps is missing."""
    return Detail(comparison, metric, NOT_TESTED)


def raw(table: Table, key: str, metric: str) -> float | None:
    """A method's mean."""
    value = table[key].values.get(metric) if key in table else None
    return None if value is None else value.mean
