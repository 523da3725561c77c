"""Remark 1: averaging dual and averaging primal states, without a constraint and with one. (C26)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..algorithms.fedda import FedDA, FedDAPrimal
from ..registry import make
from ..rules.prox import Box, L1Ball, Prox
from ..run import Run

WAYS = ("dual", "primal")
SETS: dict[str, Prox] = {"no constraint": Prox(), "box": Box(-0.5, 0.5), "L1 ball": L1Ball(2.0)}


@dataclass(frozen=True)
class Averaging:
    """Of one constraint: both paths of x, {way: [rounds, seeds, d]}, and the constrained minimum [d]."""

    path: dict[str, Tensor]
    minimum: Tensor

    @property
    def difference(self) -> np.ndarray:
        """max over coordinates of |x_dual - x_primal|, [rounds, seeds]."""
        found: np.ndarray = (self.path["dual"] - self.path["primal"]).abs().amax(dim=-1).numpy()
        return found

    def distance(self, way: str) -> np.ndarray:
        """|x - x*|, [rounds, seeds]."""
        found: np.ndarray = (self.path[way] - self.minimum).norm(dim=-1).numpy()
        return found


def averaging(
    prox: Prox, rounds: int = 300, seeds: Sequence[int] = (0, 1, 2), clients: int = 10, d: int = 8
) -> Averaging:
    """FedDA-MVR on clients with Hessians of their own, a diagonal adaptive H, noise 0.3, averaging either way.

    >>> found = averaging(SETS["no constraint"], rounds=20)
    >>> bool(found.difference.max() < 1e-12)
    True
    >>> bool(averaging(SETS["box"], rounds=20).difference.max() > 1e-3)
    True
    """
    from ..problems import Quadratic

    generator = torch.Generator().manual_seed(0)
    A = 0.1 + 1.4 * torch.rand(clients, d, generator=generator, dtype=torch.float64)
    problem = Quadratic(A, torch.randn(clients, d, generator=generator, dtype=torch.float64), noise=0.3)
    algorithm: Any = make("fedda-mvr", lr=0.3, w=100.0, eps=0.3, prox=prox)
    paths = {way: path(averaged(algorithm, way), problem, rounds, seeds) for way in WAYS}
    return Averaging(paths, prox(problem.minimum[None], A.mean(dim=0), 0.0)[0])


def averaged(algorithm: FedDA, way: str) -> FedDA:
    return algorithm if way == "dual" else FedDAPrimal.of(algorithm)


def path(algorithm: FedDA, problem: Any, rounds: int, seeds: Sequence[int]) -> Tensor:
    """x after each round, [rounds, seeds, d]."""
    run = Run(algorithm, problem, seed=list(seeds))
    return torch.stack([run.step().x[..., 0, :] for _ in range(rounds)])


METRICS = ("objective", "test_accuracy", "density", "nonzero")


def ablation(algorithm: FedDA, problem: Any, rounds: int, seeds: Sequence[int]) -> dict[str, dict[str, list[float]]]:
    """A penalised FedDA trained both ways: {way: {metric: one number a seed}} after the last round."""
    found: dict[str, dict[str, list[float]]] = {}
    for way in WAYS:
        run = Run(averaged(algorithm, way), problem, seed=list(seeds))
        for _ in range(rounds):
            run.advance()
        rows = run.evaluate()
        found[way] = {metric: [row[metric] for row in rows] for metric in METRICS if metric in rows[0]}
    return found
