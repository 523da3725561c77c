"""Corollary 1: how many steps and rounds reach a stationary point, by the bound and as measured. (C30)"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .decay import Decay
from .theorem import local_steps, rounds_of, steps_to


@dataclass(frozen=True)
class Complexity:
    """Powers p in eps^-p."""

    steps: float  # of T, where the bound falls to eps
    rounds: float  # of E = T / I with the corollary's I
    least_steps: float  # the smallest I among those points: there are local steps in all of them
    measured: float  # of T on the quadratics, mean over numbers of clients


def complexity(curve: Decay, K: int = 10) -> Complexity:
    """Fit the powers: of the bound over eps so small that I > 1 and logarithms count little, of the curve where it is.

    >>> from .decay import decay
    >>> found = complexity(decay(K=(1, 4), T=2000, seeds=1))
    >>> round(found.steps, 1), round(found.rounds, 2), found.least_steps > 1
    (1.5, 1.28, True)
    """
    eps = np.geomspace(1e-12, 1e-8, 9)
    T = np.array([steps_to(e, K) for e in eps])
    E = np.array([rounds_of(t, K) for t in T])
    return Complexity(
        power(eps, T),
        power(eps, E),
        min(local_steps(t, K) for t in T),
        float(np.mean([power(levels, curve_steps(curve, i, levels)) for i, levels in enumerate(_levels(curve))])),
    )


def power(eps: np.ndarray, amount: np.ndarray) -> float:
    """p in amount = eps^-p, by least squares."""
    return float(-np.polyfit(np.log(eps), np.log(amount), 1)[0])


def curve_steps(curve: Decay, i: int, levels: np.ndarray) -> np.ndarray:
    return np.array([curve.first_below(level)[i] for level in levels])


def _levels(curve: Decay) -> list[np.ndarray]:
    """Levels that the last decade of steps passes through, for each number of clients."""
    late = curve.t >= curve.t[-1] / 10
    ends = [(own[late][0], own[-1]) for own in curve.mean.mean(axis=1)]
    return [np.geomspace(0.99 * high, 1.01 * low, 8) for high, low in ends]
