"""Verdicts on claims C26 to C30 from the measurements: the content of `theory.json`, which `fedda claims` reads."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ..claims.compare import INCONCLUSIVE, NOT_SUPPORTED, SUPPORTED, Detail, combine, detail, every, holm
from ..claims.sentences import counts
from ..claims.values import Value
from .findings import Findings
from .rates import DECADES, Decay

SLOPE, RATIO = (-0.95, -0.55), (1.8, 3.6)  # gates; the theorem has -2/3, and 4^(2/3) = 2.52 for four times the clients
LINEAR = 0.8  # the least power of 1/K that counts as a linear speed-up
STEPS, ROUNDS = 1.6, 1.1  # the largest fitted powers of 1/eps that count as eps^-1.5 and eps^-1 with a logarithm
SAME = 1e-10  # paths that differ by less are the same


def over(values: Any) -> Value:
    """Numbers of one measurement by seed."""
    return Value(dict(enumerate(np.asarray(values, dtype=float).tolist())))


def between(text: str, metric: str, values: Any, low: float, high: float) -> Detail:
    """Whether all values lie in a gate. The difference is the smallest distance from its ends."""
    numbers = np.asarray(values, dtype=float)
    inside = float(np.minimum(numbers - low, high - numbers).min())
    verdict = SUPPORTED if inside >= 0 else NOT_SUPPORTED
    return Detail(text, metric, verdict, over(numbers).mean, None, inside, seeds=len(numbers))


def less(comparison: str, metric: str, ours: Any, theirs: Any) -> Detail:
    """Whether `ours` is lower than `theirs`, seed by seed (docs/claims.md)."""
    a, b = over(ours), over(theirs)
    return detail(comparison, metric, b - a, a.mean, b.mean)


def judged(
    results: Findings, reason: str, details: Sequence[Detail], join: Callable[..., str] = combine
) -> dict[str, Any]:
    """The verdict of the details, with its reason, which begins with "quick" and the counts.

    `join` is `combine` for a claim with separate parts, `every` for one that says the same of every case.
    """
    verdict = join(d.verdict for d in details)
    before = ["quick"] * results.quick + [counts(details)] * (verdict != SUPPORTED)
    return {"verdict": verdict, "reason": ": ".join([*before, reason]), "details": [asdict(d) for d in details]}


def c26(results: Findings) -> dict[str, Any]:
    """Dual and primal averaging differ under a constraint and coincide without one."""
    parts, texts = [], []
    for name, pair in results.averaging.items():
        most = pair.difference.max(axis=0)
        verdict = SUPPORTED if (most < SAME).all() == (name == "no constraint") else NOT_SUPPORTED
        parts.append(
            Detail(f"dual vs primal, {name}", "largest difference", verdict, float(most.mean()), seeds=most.size)
        )
        ends = ", ".join(f"{way} {pair.distance(way)[-1].mean():.3f}" for way in pair.path)
        distances = f" (from x*: {ends})" if name != "no constraint" else ""
        texts.append(f"{name}: at most {most.max():.2g} apart{distances}")
    if (own := results.ablation) is not None:
        dual, primal = own.values["dual"], own.values["primal"]
        parts.append(less("dual vs primal, L1 penalty", "nonzero", dual["nonzero"], primal["nonzero"]))
        means = [(metric.replace("_", " "), over(dual[metric]).mean, over(primal[metric]).mean) for metric in dual]
        numbers = ", ".join(f"{metric} {a:.3f} vs {b:.3f}" for metric, a, b in means)
        texts.append(f"L1 penalty on {own.experiment} ({own.about}), dual vs primal: {numbers}")
    rounds, seeds = next(iter(results.averaging.values())).difference.shape
    return judged(results, f"quadratics, {rounds} rounds, {seeds} seeds, {'; '.join(texts)}", parts)


def c27(results: Findings) -> dict[str, Any]:
    """H is smoother from z than from the last gradient: the deviation of log h over rounds, and of its changes."""
    parts = holm([
        less(f"z vs nu, {name}", metric, of("z"), of("nu"))
        for name, own in results.smoothness.items()
        for metric, of in (("deviation of log h", own.deviation), ("deviation of its changes", own.change))
    ])  # fmt: skip
    texts = []
    for i, (name, own) in enumerate(results.smoothness.items()):
        size = f"{len(own.path['z']) - 1} rounds, {len(own.deviation('z'))} seeds"
        both = ", of changes ".join(f"{d.a:.2g} vs {d.b:.2g} {d.verdict}" for d in parts[2 * i : 2 * i + 2])
        texts.append(f"{name} ({size}): {both}")
    return judged(results, f"deviation of log h, z vs nu: {'; '.join(texts)}", parts, every)


def c28(results: Findings) -> dict[str, Any]:
    """The error of second moments averaged over clients has no linear speed-up, that of those from z has.

    The variances are printed beside it. The paper says nothing of them, so they decide nothing.
    """
    own = results.moments
    parts = []
    for comparison, name, sign in (("from z: a linear speed-up", "FedDA", -1), ("averaged: none", "FAFED", 1)):
        powers = own.exponents(own.error(name))
        excess = over(sign * (powers + LINEAR))
        parts.append(detail(comparison, "power of K, error", excess, float(powers.mean()), -LINEAR))
    parts = holm(parts)
    linear = [speed_up(d, of) for d, of in zip(parts, (SUPPORTED, NOT_SUPPORTED), strict=True)]
    variance = [f"{name} K^{own.exponents(own.variance[name]).mean():.2f}" for name in ("FedDA", "FAFED")]
    reason = (
        f"K = {own.K[0]} to {own.K[-1]}, {own.replicas} runs each, linear from K^-{LINEAR} on; error against the square"
        f" of the true gradient: FedDA {linear[0]}, FAFED {linear[1]}; the variances, of which the paper says nothing:"
        f" {', '.join(variance)}"
    )
    return judged(results, reason, parts)


def speed_up(d: Detail, of_linear: str) -> str:
    """A power of K and whether it is a linear speed-up; `of_linear` is the verdict that means so."""
    kind = "undecided" if d.verdict == INCONCLUSIVE else "linear" if d.verdict == of_linear else "not linear"
    return f"K^{round(d.a or 0, 2) + 0:.2f} ({kind})"  # + 0: no -0.00


def c29(results: Findings) -> dict[str, Any]:
    """G falls like T^(-2/3) and like K^(-2/3), by the gates."""
    curve = results.decay
    parts = [between(f"K = {k}", "power of T", curve.slopes[i], *SLOPE) for i, k in enumerate(curve.K)]
    for i, k in enumerate(curve.K):
        if 4 * k in curve.K:
            ratio = curve.mean[i, :, -1] / curve.mean[curve.K.index(4 * k), :, -1]
            parts.append(between(f"K = {k} to {4 * k}", "ratio of G", ratio, *RATIO))
    if not curve.long:
        parts = [replace(d, verdict=INCONCLUSIVE) for d in parts]
    slopes = ", ".join(f"{v:.3f}" for v in curve.slopes.mean(axis=1))
    ratios = ", ".join(f"{d.comparison.removeprefix('K = ')}: {d.a:.2f}" for d in parts if d.metric == "ratio of G")
    powers, adaptive = (
        ", ".join(f"{v:.2f}" for v in own.slopes.mean(axis=1)) for own in (results.different, results.adaptive)
    )
    level = results.plain.mean.mean(axis=1)[:, -1] / at(results.decay, results.plain.t[-1])
    reason = (
        "with H = 1, clients with one Hessian, practical schedule (the theorem's eta is constant for 1e5 steps and"
        f" more), T = {curve.t[-1]:,}, {curve.mean.shape[1]} seeds{short(curve)}: powers of T {slopes} for K ="
        f" {', '.join(map(str, curve.K))} (at least as fast as -2/3; gate {SLOPE[0]} to {SLOPE[1]}),"
        f" G by four times the clients {ratios} (2.52; gate {RATIO[0]} to {RATIO[1]}); with Hessians of"
        f" their own {powers}; with the adaptive H of FedDA-1-1, T = {results.adaptive.t[-1]:,}: {adaptive}; mini-batch"
        f" gradients at the same rates have {level.min():.3g} to {level.max():.3g} times the G; the proof of the"
        " K-dependence rests on a false lemma (docs/errata.md, 2)"
    )
    return judged(results, reason, parts)


def short(curve: Decay) -> str:
    """A note on a curve that is too short for its slope."""
    return "" if curve.long else f" (fewer than {DECADES} decades of steps: nothing is decided)"


def at(curve: Decay, t: int) -> np.ndarray:
    """The running means, over seeds, of each number of clients at step t."""
    return np.array([np.interp(t, curve.t, mean) for mean in curve.mean.mean(axis=1)])


def c30(results: Findings) -> dict[str, Any]:
    """Gradients eps^-1.5 (follows from the bound, and is measured), rounds eps^-1 (does not follow; not measured)."""
    own, curve, parts = results.complexity, results.decay, []
    for comparison, metric, power, gate, wanted in (
        ("gradients: eps^-1.5", "power of 1/eps, bound", own.steps, STEPS, 1.5),
        ("gradients: eps^-1.5", "power of 1/eps, measured", own.measured, STEPS, 1.5),
        ("rounds: eps^-1", "power of 1/eps, bound", own.rounds, ROUNDS, 1.0),
    ):
        parts.append(Detail(comparison, metric, SUPPORTED if power < gate else NOT_SUPPORTED, power, wanted))
    if not results.decay.long:
        parts[1] = replace(parts[1], verdict=INCONCLUSIVE)
    reason = (
        "steps and rounds are computed from Theorem 1's bound, which rests on the false lemma A9; gradients: the bound"
        f" falls to eps after eps^-{own.steps:.2f} steps (1.5 and a logarithm; gate {STEPS}), measured on quadratics"
        f" eps^-{own.measured:.2f} (with H = 1: the inverse of C29's power of T, T = {curve.t[-1]:,.0f}{short(curve)};"
        f" gate {STEPS}); rounds, not measured: with the corollary's I = (T/K^2)^(1/6) local steps the same bound needs"
        f" eps^-{own.rounds:.2f} rounds (gate {ROUNDS})"
    )
    if parts[2].verdict == NOT_SUPPORTED:
        reason += ", not eps^-1, wherever I > 1"
    return judged(results, reason, parts)


JUDGES: dict[str, Callable[[Findings], dict[str, Any]]] = {"C26": c26, "C27": c27, "C28": c28, "C29": c29, "C30": c30}


def verdicts(results: Findings) -> dict[str, dict[str, Any]]:
    """The content of `theory.json`."""
    return {claim: judge(results) for claim, judge in JUDGES.items()}
