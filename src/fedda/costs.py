"""What an algorithm costs, measured by running it: vectors down and up, gradient evaluations, what clients keep."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .problems import Quadratic
from .registry import algorithms
from .run import Run

D = 512  # far more than any algorithm sends as single numbers, so that vectors and numbers can be told apart


class Cost(NamedTuple):
    """For one client and one round of I local steps; `start` is what every client sends once, before round one."""

    down: str
    up: str
    gradients: str
    start: str
    memory: str


def cost(name: str) -> Cost:
    """Measured on a small quadratic with the algorithm's defaults.

    >>> cost("fedda-mvr")
    Cost(down='3 + 1 number', up='2', gradients='2I', start='1', memory='none')
    """
    (two, start, memory), (three, _, _) = (_measure(name, steps) for steps in (2, 3))
    slope = three["gradients"] - two["gradients"]
    rest = two["gradients"] - 2 * slope
    gradients = f"{slope if slope != 1 else ''}I" + (f" {'+' if rest > 0 else '-'} {abs(rest)}" if rest else "")
    gradients += " + full pass" if two["full_gradients"] else ""
    return Cost(
        down=_vectors(two["bytes_down"]),
        up=_vectors(two["bytes_up"]),
        gradients=gradients,
        start=_vectors(start["bytes_up"]),
        memory=", ".join(memory) or "none",
    )


def _measure(name: str, steps: int) -> tuple[dict[str, int], dict[str, int], tuple[str, ...]]:
    """Counts of the second round, of the start, and what clients remember."""
    ones = torch.ones(1, D, dtype=torch.float64)
    run = Run(algorithms.find(name)(steps=steps), Quadratic(ones, ones))
    start = _counts(run)
    run.step()
    first = _counts(run)
    run.step()
    return {key: value - first[key] for key, value in _counts(run).items()}, start, tuple(run.algorithm.memory)


def _counts(run: Run) -> dict[str, int]:
    counts: dict[str, Any] = vars(run.counts)
    return dict(counts)


def _vectors(count: int) -> str:
    vectors, numbers = divmod(count // 8, D)
    return f"{vectors}" + (f" + {numbers} number{'s' if numbers > 1 else ''}" if numbers else "")
