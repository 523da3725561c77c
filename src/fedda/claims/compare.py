"""The verdict rule: a difference against twice its standard error, and how verdicts combine."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .values import MethodValues, Value

SUPPORTED, PARTIAL, INCONCLUSIVE = "SUPPORTED", "PARTIAL", "INCONCLUSIVE"
NOT_SUPPORTED, NOT_TESTED = "NOT SUPPORTED", "NOT TESTED"
WORDS = (SUPPORTED, PARTIAL, NOT_SUPPORTED, INCONCLUSIVE, NOT_TESTED)
SEEDS = 3  # fewer seeds decide nothing
EQUAL = 1e-12  # smaller differences are rounding
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
    difference: float | None = None
    se: float | None = None
    area: float | None = None  # the same difference for the means over all rounds
    seeds: int | None = None

    @property
    def by_divergence(self) -> bool:
        """Whether A wins because B diverged."""
        return self.verdict == SUPPORTED and self.a is not None and self.b is None


@dataclass(frozen=True)
class Judged:
    """The verdict of a rule on one case."""

    verdict: str
    details: Sequence[Detail] = ()
    remarks: Sequence[str] = ()
    summary: str = ""  # replaces the sentence made of the details


def decide(difference: Value) -> str:
    """The verdict on a difference that should be positive.

    >>> decide(Value(0.03, 0.01, 0.0, 5)), decide(Value(0.01, 0.01, 0.0, 5)), decide(Value(-0.03, 0.01, 0.0, 5))
    ('SUPPORTED', 'INCONCLUSIVE', 'NOT SUPPORTED')
    >>> decide(Value(0.03, 0.01, 0.0, 2))
    'INCONCLUSIVE'
    """
    d, bar = difference.mean, 2 * difference.se + EQUAL
    if difference.seeds < SEEDS or math.isnan(d):
        return INCONCLUSIVE
    return SUPPORTED if d > bar else NOT_SUPPORTED if d < -bar else INCONCLUSIVE


def combine(verdicts: Iterable[str]) -> str:
    """The verdict on a claim of several parts; a part that is not tested is not supported."""
    parts = set(verdicts)
    if parts <= {NOT_TESTED}:
        return NOT_TESTED
    if parts == {SUPPORTED}:
        return SUPPORTED
    if parts & {SUPPORTED, PARTIAL}:
        return PARTIAL
    return NOT_SUPPORTED if NOT_SUPPORTED in parts else INCONCLUSIVE


def worth(table: Table, key: str, metric: str) -> Value | None:
    """A method's value, negated if lower is better; minus infinity if it diverged."""
    method = table.get(key)
    if method is None:
        return None
    if method.lost:
        return Value(-math.inf, 0.0, math.nan, method.seeds)
    value = method.values.get(metric)
    return value if value is None or metric not in LOWER else -value


def lead(table: Table, a: str, b: str, metric: str) -> Value | None:
    """How much better `a` is than `b`; None if one of them has no value."""
    ours, theirs = worth(table, a, metric), worth(table, b, metric)
    return None if ours is None or theirs is None else ours - theirs


def compare(table: Table, a: str, b: str, metric: str, margin: float = 0.0, what: str = "") -> Detail:
    """Whether `a` is better than `b`, or not worse by more than `margin`."""
    d = lead(table, a, b, metric)
    d = None if d is None else d.plus(margin)
    text = what or f"{called(table, a)} vs {called(table, b)}"
    # A model without weights, or one that predicts a constant, does not count as sparse.
    empty = d is not None and metric in SPARSE and table[a].constant and decide(d) == SUPPORTED
    return detail(text, metric, d, raw(table, a, metric), raw(table, b, metric), INCONCLUSIVE if empty else "")


def called(table: Table, key: str) -> str:
    """A method's name in a comparison, with a note if it diverged or predicts a constant."""
    if key not in table or not (table[key].lost or table[key].constant):
        return key
    return f"{key} ({'diverged' if table[key].lost else 'constant'})"


def detail(text: str, metric: str, d: Value | None, a: float | None, b: float | None, verdict: str = "") -> Detail:
    """A comparison; a number that does not exist is None."""
    if d is None:
        return Detail(text, metric, NOT_TESTED, a, b)
    exists = math.isfinite(d.mean)
    difference, se = (d.mean, d.se) if exists else (None, None)
    area = d.area if math.isfinite(d.area) else None
    return Detail(text, metric, verdict or decide(d), a, b, difference, se, area, d.seeds)


def not_run(comparison: str, metric: str) -> Detail:
    """A part of the claim without a run: a method or a number of steps is missing."""
    return Detail(comparison, metric, NOT_TESTED)


def raw(table: Table, key: str, metric: str) -> float | None:
    """A method's mean, not negated."""
    value = table[key].values.get(metric) if key in table else None
    return None if value is None else value.mean
