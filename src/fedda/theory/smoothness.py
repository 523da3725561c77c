"""Remark 2, first half: is H smoother over rounds when it is built from z than from the last estimate? (C27)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..algorithms.fedda import FedDA
from ..run import Run

INPUTS = ("z", "nu")


@dataclass(frozen=True)
class Smoothness:
    """log h of every round, by what H is built from: [rounds + 1, seeds, d]; the first half of the run is its start."""

    path: dict[str, Tensor]

    def late(self, source: str) -> Tensor:
        own = self.path[source]
        return own[len(own) // 2 :]

    def deviation(self, source: str) -> Tensor:
        """The standard deviation of log h over the rounds of the second half, mean over coordinates: [seeds]."""
        return self.late(source).std(dim=0).mean(dim=-1)

    def change(self, source: str) -> Tensor:
        """The same of its changes from one round to the next, which a slow drift does not enter: [seeds]."""
        return self.late(source).diff(dim=0).std(dim=0).mean(dim=-1)


def smoothness(algorithm: FedDA, problem: Any, rounds: int, seeds: Sequence[int], **how: Any) -> Smoothness:
    """Run a FedDA twice, H from z and H from the last estimate (in the same units), and keep log h of every round.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0, 2.0]], b=[[5.0, 5.0]], noise=1.0)
    >>> algorithm = fedda.make("fedda-2-1", lr=1e-6, eps=0.1, beta=0.9, momentum=0.0)
    >>> found = smoothness(algorithm, problem, 40, [0, 1])
    >>> found.path["z"].shape, bool((found.change("z") < found.change("nu")).all())
    (torch.Size([41, 2, 2]), True)
    """
    paths = {}
    for source in INPUTS:
        run = Run(replace(algorithm, v_input=source), problem, seed=list(seeds), **how)
        own = [log_h(run)]
        for _ in range(rounds):
            run.advance()
            own.append(log_h(run))
        paths[source] = torch.stack(own)
    return Smoothness(paths)


def log_h(run: Run) -> Tensor:
    """log of H's diagonal for the round to come, [seeds, d]."""
    algorithm: FedDA = run.algorithm  # type: ignore[assignment]
    H = algorithm.preconditioner.diagonal(run.server.mu, run.server.t / algorithm.steps)
    return H.double().log()[..., 0, :]
