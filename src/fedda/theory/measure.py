"""The paper's measure of stationarity and its two parts, from the inside of a round."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import Problem
from .trace import Trace


def each(problem: Problem, x: Tensor) -> Tensor:
    """The full gradient of every client at points x [..., 1, d]: [..., K, d]."""
    return problem.full_gradients(x)


def value(problem: Problem, x: Tensor) -> Tensor:
    """f at points x [..., 1, d]: [..., 1, 1], clients weighted alike."""
    weights = torch.ones(problem.clients, dtype=torch.float64, device=x.device)
    return problem.evaluate(x.squeeze(-2), weights)["train_loss"][..., None, None]


class Measure(NamedTuple):
    """G_t = step + error for the steps of a round, each [I, ...]."""

    step: Tensor  # (rho / (lambda eta))^2 |x~_t - x~_{t+1}|^2: how far the virtual point moves
    error: Tensor  # |nubar_t - grad f(x~_t)|^2: how wrong the estimate is

    @property
    def total(self) -> Tensor:
        return self.step + self.error


def measure(trace: Trace, problem: Problem, rho: Any = None) -> Measure:
    """G_t of equation `measure`, with rho the smallest entry of the round's H where none is given.

        G_t = (rho / (lambda eta_t))^2 |x~_t - x~_{t+1}|^2 + |nubar_t - grad f(x~_t)|^2

    At a stationary point with an exact estimate both parts vanish:

    >>> import fedda
    >>> from fedda.theory import traces
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> algorithm = fedda.make("fedda-mvr", lr=0.2, w=8.0, eps=1.0, steps=2)
    >>> [trace] = traces(algorithm, problem, rounds=1, x0=problem.minimum)
    >>> measure(trace, problem).total.tolist()
    [0.0, 0.0]
    """
    rho = trace.rho if rho is None else rho
    return Measure(square(rho / trace.scale * trace.dt), square(error(trace, problem)[:-1]))


def error(trace: Trace, problem: Problem) -> Tensor:
    """ebar_i = nubar_i - grad f(x~_i) for i = 0..I, [I + 1, ..., 1, d]."""
    return trace.nubar - each(problem, trace.xt).mean(dim=-2, keepdim=True)


def square(v: Tensor) -> Tensor:
    """|v|^2 of [..., 1, d] vectors, [...]."""
    return (v**2).sum(dim=(-2, -1))


def stationarity(trace: Trace, problem: Problem) -> tuple[Tensor, Tensor]:
    """Both sides of the remark |grad f(x~_t)|^2 <= 2 (max h / rho)^2 G_t, each [I, ...]; without a constraint only."""
    left = square(each(problem, trace.xt[:-1]).mean(dim=-2, keepdim=True))
    worst = (trace.H.amax(dim=-1, keepdim=True) / trace.rho)[..., 0, 0] ** 2
    return left, 2 * worst * measure(trace, problem).total
