"""How far the clients are apart within a round, beside what lemmas A8.1 and A13 allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..registry import make
from .lemmas import a8_1, a13, spread
from .synthetic import Synthetic
from .trace import traces


@dataclass(frozen=True)
class Consensus:
    """Means over rounds for i = 0..I: of the estimates and of the dual states, and the lemmas' right sides for them."""

    estimates: np.ndarray  # sum_k |nu_i - nubar_i|^2 / K
    duals: np.ndarray  # sum_k |z_i - zbar_i|^2 / K
    estimates_bound: np.ndarray  # A13, from i = 1 on
    duals_bound: np.ndarray  # A8.1


def consensus(rounds: int = 60, steps: int = 10, clients: int = 8, d: int = 8) -> Consensus:
    """FedDA-MVR on clients with Hessians of their own in a box, without noise, where both lemmas hold path by path.

    >>> found = consensus(rounds=5, steps=4)
    >>> bool((found.duals <= found.duals_bound + 1e-15).all())
    True
    >>> bool((found.estimates[1:] <= found.estimates_bound).all())
    True
    """
    generator = torch.Generator().manual_seed(0)
    A = 0.1 + 0.9 * torch.rand(clients, d, generator=generator, dtype=torch.float64)
    problem = Synthetic(A, torch.randn(clients, d, generator=generator, dtype=torch.float64))
    algorithm: Any = make(
        "fedda-mvr", lr=0.05, w=100.0, eps=0.3, steps=steps, prox={"kind": "box", "lower": -1.0, "upper": 1.0}
    )
    own: list[list[np.ndarray]] = []
    for trace in traces(algorithm, problem, rounds):
        nu, z = spread(trace.NU), spread(trace.Z)
        right = (a13(trace, problem, problem.L) + nu[1:], a8_1(trace) + z)
        own.append([(v / clients).numpy() for v in (nu, z, *right)])
    return Consensus(*(np.mean(column, axis=0) for column in zip(*own, strict=True)))
