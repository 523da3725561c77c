"""Verdicts on claims C26 to C30 from what was measured: the content of `theory.json`, which `fedda claims` reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ..experiments.claims.compare import NOT_SUPPORTED, SUPPORTED, Detail, combine, detail
from ..experiments.claims.values import Value
from .decay import Decay
from .findings import Findings

SLOPE, RATIO = (
    (-0.95, -0.55),
    (1.8, 3.6),
)  # the gates; the theorem says -2/3, and 4^(2/3) = 2.52 for four times the clients
LINEAR = 0.8  # a power of 1/K from which on a speed-up is called linear
SAME = 1e-10  # paths that differ by less coincide


def over(values: Any) -> Value:
    """A mean over seeds with its standard error."""
    numbers = np.asarray(values, dtype=float)
    se = float(numbers.std(ddof=1) / math.sqrt(len(numbers))) if len(numbers) > 1 else 0.0
    return Value(float(numbers.mean()), se, math.nan, len(numbers))


def between(comparison: str, metric: str, values: Any, low: float, high: float) -> Detail:
    """Whether every one of the values lies in a gate; the difference is how far inside the nearest is."""
    numbers = np.asarray(values, dtype=float)
    inside = float(np.minimum(numbers - low, high - numbers).min())
    word = SUPPORTED if inside >= 0 else NOT_SUPPORTED
    return Detail(comparison, metric, word, float(numbers.mean()), None, inside, over(numbers).se, None, len(numbers))


def less(comparison: str, metric: str, ours: Any, theirs: Any) -> Detail:
    """Whether `ours` is lower than `theirs`, seed by seed."""
    ours, theirs = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    return detail(comparison, metric, over(theirs - ours), float(ours.mean()), float(theirs.mean()))


def said(verdict: str, reason: str, details: Sequence[Detail]) -> dict[str, Any]:
    return {"verdict": verdict, "reason": reason, "details": [asdict(d) for d in details]}


def c26(found: Findings) -> dict[str, Any]:
    """Dual and primal averaging differ under a constraint and coincide without one."""
    own, parts, words = found.averaging, [], []
    for name, pair in own.items():
        most = pair.difference.max(axis=0)
        word = SUPPORTED if (most < SAME).all() == (name == "no constraint") else NOT_SUPPORTED
        parts.append(Detail(f"dual vs primal, {name}", "largest difference", word, float(most.mean()), seeds=most.size))
        ends = ", ".join(f"{way} {pair.distance(way)[-1].mean():.3f}" for way in pair.path)
        words.append(
            f"{name}: at most {most.max():.2g} apart" + (f" (from x*: {ends})" if name != "no constraint" else "")
        )
    if found.ablation is not None:
        dual, primal = found.ablation.values["dual"], found.ablation.values["primal"]
        parts.append(less("dual vs primal, L1 penalty", "nonzero", dual["nonzero"], primal["nonzero"]))
        numbers = ", ".join(
            f"{metric.replace('_', ' ')} {over(dual[metric]).mean:.3f} vs {over(primal[metric]).mean:.3f}"
            for metric in dual
        )
        words.append(f"L1 penalty on {found.ablation.experiment} ({found.ablation.about}), dual vs primal: {numbers}")
    return said(combine(d.verdict for d in parts), "quadratics, " + "; ".join(words), parts)


def c27(found: Findings) -> dict[str, Any]:
    """H is smoother from z than from the last gradient: the deviation of log h over rounds, and of its changes."""
    parts, words = [], []
    for name, own in found.smoothness.items():
        for metric, of in (("deviation of log h", own.deviation), ("deviation of its changes", own.change)):
            parts.append(less(f"z vs nu, {name}", metric, of("z"), of("nu")))
        words.append(f"{name}: {parts[-2].a:.3g} vs {parts[-2].b:.3g}")
    why = "z averages the noise of a round: that helps where the last gradient is noisy and its mean is not zero"
    return said(combine(d.verdict for d in parts), f"deviation of log h, z vs nu: {'; '.join(words)}; {why}", parts)


def c28(found: Findings) -> dict[str, Any]:
    """Second moments averaged over clients have no linear speed-up, those from z have."""
    own = found.moments
    ours, theirs = own.exponents(own.error("FedDA")), own.exponents(own.error("FAFED"))
    spread_ours, spread_theirs = (own.exponents(own.variance[name]) for name in ("FedDA", "FAFED"))
    parts = [
        detail("from z: a linear speed-up", "power of K, error", over(-ours - LINEAR), ours.mean(), -LINEAR),
        detail(
            "from z: a linear speed-up",
            "power of K, variance",
            over(-spread_ours - LINEAR),
            spread_ours.mean(),
            -LINEAR,
        ),
        detail("averaged: none", "power of K, error", over(theirs + LINEAR), theirs.mean(), -LINEAR),
        detail("averaged: none", "power of K, variance", over(spread_theirs + LINEAR), spread_theirs.mean(), -LINEAR),
    ]
    parts = [Detail(**{**asdict(d), "a": float(d.a or 0)}) for d in parts]
    reason = (
        f"K = {own.K[0]} to {own.K[-1]}, error against the square of the true gradient: FedDA K^{ours.mean():.2f},"
        f" FAFED K^{theirs.mean():.2f} (its bias stays); but the variance of FAFED's average falls as well,"
        f" like K^{spread_theirs.mean():.2f} (FedDA K^{spread_ours.mean():.2f}): squaring is not linear, averaging is"
    )
    return said(combine(d.verdict for d in parts), reason, parts)


def c29(found: Findings) -> dict[str, Any]:
    """G falls like T^(-2/3) and like K^(-2/3), by the gates."""
    curve = found.decay
    parts = [between(f"K = {k}", "power of T", curve.slopes[i], *SLOPE) for i, k in enumerate(curve.K)]
    for i, k in enumerate(curve.K):
        if 4 * k in curve.K:
            ratio = curve.mean[i, :, -1] / curve.mean[curve.K.index(4 * k), :, -1]
            parts.append(between(f"K = {k} to {4 * k}", "ratio of G", ratio, *RATIO))
    slopes = ", ".join(f"{v:.3f}" for v in curve.slopes.mean(axis=1))
    ratios = ", ".join(f"{d.comparison.removeprefix('K = ')}: {d.a:.2f}" for d in parts if d.metric == "ratio of G")
    level = found.plain.mean.mean(axis=1)[:, -1] / at(found.decay, found.plain.t[-1])
    reason = (
        "clients with one Hessian, practical schedule (the theorem's eta is constant for 1e5 steps and more),"
        f" T = {curve.t[-1]:,}: powers of T {slopes} for K = {', '.join(map(str, curve.K))} (-2/3; gate {SLOPE[0]} to"
        f" {SLOPE[1]}), G by four times the clients {ratios} (2.52; gate {RATIO[0]} to {RATIO[1]}); with Hessians of"
        f" their own {', '.join(f'{v:.2f}' for v in found.own.slopes.mean(axis=1))}; mini-batch gradients at the same"
        f" rates stay {level.min():.0f} to {level.max():.0f} times higher; the proof of the K-dependence rests on a"
        " false lemma (docs/errata.md, 2)"
    )
    return said(combine(d.verdict for d in parts), reason, parts)


def at(curve: Decay, t: int) -> np.ndarray:
    """The running means, over seeds, of each number of clients at step t."""
    found: np.ndarray = np.array([np.interp(t, curve.t, own) for own in curve.mean.mean(axis=1)])
    return found


def c30(found: Findings) -> dict[str, Any]:
    """Gradients eps^-1.5 (follows from the bound, and is measured), rounds eps^-1 (does not follow)."""
    own = found.complexity
    steps = Detail(
        "gradients: eps^-1.5", "power of 1/eps, bound", SUPPORTED if own.steps < 1.6 else NOT_SUPPORTED, own.steps, 1.5
    )
    seen = Detail(
        "gradients: eps^-1.5",
        "power of 1/eps, measured",
        SUPPORTED if own.measured < 1.6 else NOT_SUPPORTED,
        own.measured,
        1.5,
    )
    rounds = Detail(
        "rounds: eps^-1", "power of 1/eps, bound", SUPPORTED if own.rounds < 1.1 else NOT_SUPPORTED, own.rounds, 1.0
    )
    reason = (
        f"gradients: the bound falls to eps after eps^-{own.steps:.2f} steps (1.5 and a logarithm), measured on"
        f" quadratics eps^-{own.measured:.2f}; rounds: with the corollary's I = (T/K^2)^(1/6) local steps the same"
        f" bound needs eps^-{own.rounds:.2f} rounds (1.25 and a logarithm), not eps^-1, wherever I > 1"
    )
    return said(combine(d.verdict for d in (steps, seen, rounds)), reason, (steps, seen, rounds))


JUDGES: dict[str, Callable[[Findings], dict[str, Any]]] = {"C26": c26, "C27": c27, "C28": c28, "C29": c29, "C30": c30}


def verdicts(found: Findings) -> dict[str, dict[str, Any]]:
    """What `theory.json` holds."""
    return {claim: judge(found) for claim, judge in JUDGES.items()}
