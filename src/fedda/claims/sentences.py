"""Verdicts as text: the line that gives the reason."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..runs.formats import plain
from .compare import INCONCLUSIVE, NOT_SUPPORTED, NOT_TESTED, SUPPORTED, Detail, Table

FEW = 3  # comparisons shown with their numbers
LIST = 6  # comparisons named in a list
COUNTED = {verdict: verdict.lower() for verdict in (SUPPORTED, INCONCLUSIVE, NOT_SUPPORTED)} | {NOT_TESTED: "not run"}


def sentence(details: Sequence[Detail]) -> str:
    """The numbers of a few comparisons; of many, those that contradict the paper.

    >>> line = Detail("fedda-mvr vs fedavg", "test_accuracy", SUPPORTED, 0.92, 0.9, 0.02, 0.004, 0.03, 5)
    >>> sentence([line])
    'fedda-mvr vs fedavg: test accuracy 0.92 vs 0.9 (+0.02 ± 0.004, area +0.03)'
    >>> sentence([line] * 5)
    'all 5 comparisons supported, the closest fedda-mvr vs fedavg: test accuracy 0.92 vs 0.9 (+0.02 ...)'
    """
    if len(details) <= FEW:
        several = len({d.verdict for d in details}) > 1
        return "; ".join(
            f"{comparison}: " + ", ".join(numbers(d) + (f" {d.verdict}" if several else "") for d in own)
            for comparison, own in grouped(details)
        )
    parts = []
    for verdict in COUNTED:
        own = [d for d in details if d.verdict == verdict]
        if own and verdict == SUPPORTED:
            close = min(own, key=lambda d: math.inf if d.difference is None else d.difference / (d.se or 1e-300))
            if len(own) == len(details):
                parts.append(f"all {len(own)} comparisons supported, the closest {close.comparison}: {numbers(close)}")
        elif own and verdict != NOT_TESTED:
            parts.append(f"{COUNTED[verdict]}: {_listed(own)}")
    return "; ".join(parts)


def counts(details: Sequence[Detail]) -> str:
    """The number of comparisons per verdict.

    >>> counts([Detail("a vs b", "test_loss", SUPPORTED)] * 2 + [Detail("a vs c", "test_loss", NOT_TESTED)])
    '2 supported, 1 not run'
    >>> counts([Detail("a vs b", "test_loss", SUPPORTED, 0.1)])
    '1 supported (1 by a divergence)'
    """
    count = Counter(d.verdict for d in details)
    lost = sum(d.by_divergence for d in details)
    beside = {SUPPORTED: f" ({lost} by a divergence)" if lost else ""}
    shown = {verdict: text + beside.get(verdict, "") for verdict, text in COUNTED.items()}
    return ", ".join(f"{count[verdict]} {text}" for verdict, text in shown.items() if count[verdict])


def grouped(details: Sequence[Detail]) -> list[tuple[str, list[Detail]]]:
    """The metrics of each comparison together."""
    groups: dict[str, list[Detail]] = {}
    for d in details:
        groups.setdefault(d.comparison, []).append(d)
    return list(groups.items())


def numbers(d: Detail) -> str:
    """The metric of a comparison with its numbers."""
    if d.verdict == NOT_TESTED:
        return named(d.metric)
    beside = []
    if d.difference is not None:
        beside.append(signed(d.difference) + (f" ± {plain(d.se, 2)}" if d.se is not None else ""))
    if d.area is not None:
        beside.append(f"area {signed(d.area)}")
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
        metrics = (named(d.metric) + (f" {signed(d.difference)}" if d.difference is not None else "") for d in own)
        shown.append(f"{comparison} ({', '.join(metrics)})")
    return ", ".join(shown) + (f" and {len(groups) - LIST} more" if len(groups) > LIST else "")


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


def collapsed(table: Table) -> Iterable[str]:
    """Methods that predict a constant: their comparisons are decided for a trivial reason."""
    for name, method in table.items():
        if method.constant:
            accuracy = method.values["test_accuracy"].mean if "test_accuracy" in method.values else None
            at = f"test accuracy {plain(accuracy, 3)}"
            yield f"{name} collapsed to a constant predictor ({at}), which decides for a trivial reason"
