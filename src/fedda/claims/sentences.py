"""Verdicts as text: the line that gives the reason."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..runs.formats import plain
from .compare import INCONCLUSIVE, NOT_SUPPORTED, NOT_TESTED, SUPPORTED, Detail, Table
from .values import COSTS

FEW = 3  # comparisons shown with their numbers
LIST = 6  # comparisons named in a list
COUNTED = {SUPPORTED: "won", INCONCLUSIVE: "undecided", NOT_SUPPORTED: "lost", NOT_TESTED: "not run"}


def sentence(details: Sequence[Detail], prefix: str = "") -> str:
    """The numbers of a few comparisons; of many, those that contradict the paper. `prefix` is left out.

    >>> line = Detail("fedda-mvr vs fedavg", "test_accuracy", SUPPORTED, 0.92, 0.9, 0.02, 0.004, 0.03, 5)
    >>> sentence([line])
    'fedda-mvr vs fedavg: test accuracy 0.92 vs 0.9 (+0.02 ± 0.004, p 0.03)'
    >>> sentence([line] * 5)
    'all 5 won, the closest fedda-mvr vs fedavg: test accuracy 0.92 vs 0.9 (+0.02 ...)'
    """
    details = [replace(d, comparison=d.comparison.removeprefix(prefix)) for d in details]
    if len(details) <= FEW:
        several = len({d.verdict for d in details}) > 1
        return "; ".join(
            f"{comparison}: " + ", ".join(numbers(d) + (f" {COUNTED[d.verdict]}" if several else "") for d in own)
            for comparison, own in grouped(details)
        )
    parts = []
    for verdict in COUNTED:
        own = [d for d in details if d.verdict == verdict]
        if own and verdict == SUPPORTED:
            close = max(own, key=lambda d: (d.p or 0.0, -(d.difference or 0.0)))
            if len(own) == len(details):
                parts.append(f"all {len(own)} won, the closest {close.comparison}: {numbers(close)}")
        elif own and verdict != NOT_TESTED:
            parts.append(f"{COUNTED[verdict]}: {_listed(own)}")
    return "; ".join(parts)


def counts(details: Sequence[Detail]) -> str:
    """The number of comparisons that were won, undecided and lost, and of those that were not run.

    >>> counts([Detail("a vs b", "test_loss", SUPPORTED)] * 2 + [Detail("a vs c", "test_loss", NOT_TESTED)])
    '2 won, 0 undecided, 0 lost, 1 not run'
    """
    count = Counter(d.verdict for d in details)
    return ", ".join(f"{count[v]} {text}" for v, text in COUNTED.items() if count[v] or v != NOT_TESTED)


def grouped(details: Sequence[Detail]) -> list[tuple[str, list[Detail]]]:
    """The metrics of each comparison together."""
    groups: dict[str, list[Detail]] = {}
    for d in details:
        groups.setdefault(d.comparison, []).append(d)
    return list(groups.items())


def numbers(d: Detail) -> str:
    """The metric of a comparison with its numbers; of costs, the ratio."""
    if d.verdict == NOT_TESTED:
        return named(d.metric)
    beside = []
    if d.difference is not None and d.metric in COSTS:
        beside.append(f"{plain(math.exp(d.difference), 3)} times")
    elif d.difference is not None:
        beside.append(signed(d.difference) + (f" ± {plain(d.interval, 2)}" if d.interval is not None else ""))
    beside += [f"p {plain(d.p, 2)}"] if d.p is not None else []
    text = f"{named(d.metric)} {plain(d.a, 3)} vs {plain(d.b, 3)}"
    return text + (f" ({', '.join(beside)})" if beside else "")


def signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{plain(value, 3)}"


def named(metric: str) -> str:
    return metric.replace("_", " ")


def _listed(details: Sequence[Detail]) -> str:
    """Comparisons with their metrics and differences."""
    groups = grouped(details)
    shown = []
    for comparison, own in groups[:LIST]:
        metrics = (named(d.metric) + _size(d) for d in own)
        shown.append(f"{comparison} ({', '.join(metrics)})")
    return ", ".join(shown) + (f" and {len(groups) - LIST} more" if len(groups) > LIST else "")


def _size(d: Detail) -> str:
    if d.difference is None:
        return ""
    return f" {plain(math.exp(d.difference), 3)} times" if d.metric in COSTS else f" {signed(d.difference)}"


def variants(table: Table) -> str:
    """How the paper was read for these curves: the start of mu, the penalty, and whether variance is reduced.

    >>> from .values import MethodValues
    >>> variants({"fedda-1-2": MethodValues("a", params={"mu0": "nu0", "prox": {"kind": "l1", "gamma": 0.01}})})
    'fedda-1-2: mu0 nu0, l1 0.01'
    """
    labels: dict[str, list[str]] = {}
    for name, method in table.items():
        short = name.removeprefix("heterogeneous ").split(" (")[0]
        text = ", ".join([*_readings(method.params), *(["alpha 1, no variance reduction"] if method.unreduced else [])])
        if text and short not in labels.setdefault(text, []):
            labels[text].append(short)
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in labels.items())


def _readings(params: Mapping[str, Any]) -> Iterable[str]:
    if "mu0" in params:
        yield f"mu0 {params['mu0']}"
    if params.get("mu_scale", "sum") != "sum":
        yield f"mu_scale {params['mu_scale']}"
    prox = params.get("prox")
    if isinstance(prox, dict):
        yield f"{prox.get('kind')} {plain(prox['gamma']) if isinstance(prox.get('gamma'), float) else ''}".strip()
        if prox.get("decoupled"):
            yield "decoupled"
