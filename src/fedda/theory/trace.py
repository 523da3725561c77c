"""What went on inside a round of FedDA, from what passed the wrapper: no hook in the algorithm.

The points X are those that gradients were asked at. The estimates NU and the dual states Z follow from the recorded
gradients by the algorithm's own rules; that they end at what the clients sent is a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..algorithms.fedda import FedDA
from ..core import Problem
from ..rules.prox import Prox
from ..run import Run
from .recording import RecordedCall, RecordedExchange, Recording, Tensors


class Replayed:
    """A client that answers with gradients recorded before."""

    def __init__(self, call: RecordedCall):
        self.call = call

    def gradients(self, *points: Tensor) -> Tensors:
        return self.call.gradients


@dataclass(frozen=True)
class Trace:
    """One round: i = 0..I first, then replicas, clients (or 1), coordinates.

    X, NU, Z are the clients' points, estimates and dual states; zbar and nubar their means; xt the virtual points
    x~_i = argmin -<x, zbar_i> + |x - x_tau|_H^2 / (2 lambda) of the paper (its section B.2).
    """

    algorithm: FedDA
    x: Tensor  # x_tau, [..., 1, d]
    H: Tensor  # [..., 1, d] or [..., 1, 1]
    t: Tensor  # the step at which the round begins
    eta: Tensor  # [I, ..., 1, 1]
    X: Tensor  # [I + 1, ..., K, d]
    NU: Tensor
    Z: Tensor

    @property
    def steps(self) -> int:
        return len(self.eta)

    @property
    def clients(self) -> int:
        return self.X.shape[-2]

    @property
    def scale(self) -> Any:
        return self.algorithm.scale

    @cached_property
    def rho(self) -> Tensor:
        """The smallest entry of H, [..., 1, 1]."""
        return self.H.amin(dim=-1, keepdim=True)

    @cached_property
    def zbar(self) -> Tensor:
        return self.Z.mean(dim=-2, keepdim=True)

    @cached_property
    def nubar(self) -> Tensor:
        return self.NU.mean(dim=-2, keepdim=True)

    @cached_property
    def xt(self) -> Tensor:
        if type(self.algorithm.prox) is Prox:  # no set: all of them at once
            return self.x + self.scale * self.zbar / self.H
        sums = self.eta.cumsum(dim=0)
        points = [self.algorithm.primal(z, self.x, self.H, S) for z, S in zip(self.zbar[1:], sums, strict=True)]
        return torch.stack([self.x.expand_as(self.zbar[0]), *points])

    @cached_property
    def d(self) -> Tensor:
        """The clients' steps d_i = (X_i - X_{i+1}) / eta_i, [I, ..., K, d]."""
        return (self.X[:-1] - self.X[1:]) / self.eta

    @cached_property
    def dt(self) -> Tensor:
        """The virtual steps d~_i = (x~_i - x~_{i+1}) / eta_i, [I, ..., 1, d]."""
        return (self.xt[:-1] - self.xt[1:]) / self.eta

    @cached_property
    def weights(self) -> Tensor:
        """alpha of the estimate after each step, [I, ..., 1, 1]."""
        weight = getattr(self.algorithm.estimator, "weight", None)
        if weight is None:
            name = type(self.algorithm.estimator).__name__
            raise ValueError(f"theory: {name} has no alpha that follows eta; take Mvr")
        return torch.stack([torch.as_tensor(weight(e)).expand_as(e) for e in self.eta])


def trace(algorithm: FedDA, exchange: RecordedExchange) -> Trace:
    """The inside of a round from its exchange."""
    x, nu, H, t = exchange.down
    K = exchange.replies[0].shape[-2]
    lead = (*exchange.replies[0].shape[:-2], K, x.shape[-1])
    X, NU, Z, etas = [x.expand(lead)], [nu.expand(lead)], [torch.zeros_like(x).expand(lead)], []
    for i, call in enumerate(exchange.calls):
        eta = torch.as_tensor(algorithm.lr(t + i), dtype=x.dtype).expand_as(t)
        etas.append(eta)
        Z.append(Z[-1] - eta * NU[-1])
        X.append(call.points[0])
        NU.append(algorithm.estimator(NU[-1], X[-1], X[-2], eta, Replayed(call)))
    return Trace(algorithm, x, H, t, torch.stack(etas), torch.stack(X), torch.stack(NU), torch.stack(Z))


def traces(algorithm: Any, problem: Problem, rounds: int, **how: Any) -> Iterator[Trace]:
    """Run FedDA as `fedda.rounds` does, all clients in every round, and give the inside of each.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> algorithm = fedda.make("fedda-mvr", lr=0.2, w=8.0, eps=1.0, steps=2)
    >>> [(trace.X.flatten(1) * 100).round().tolist() for trace in traces(algorithm, problem, rounds=1)]
    [[[0.0, 0.0], [10.0, 10.0], [14.0, 23.0]]]
    """
    run = Run(algorithm, problem, **how)
    return continued(run, rounds)


@torch.no_grad()
def _round(run: Run) -> Trace:
    cohort = Recording(run.simulation.cohort(run.round, run.cohort))
    run.server = run.algorithm.round(run.server, cohort)
    run.round += 1
    [exchange] = cohort.exchanges
    if not all(bool(reply.isfinite().all()) for reply in exchange.replies):
        raise ValueError("theory: a client's reply was not finite; the theory speaks of runs that do not diverge")
    assert isinstance(run.algorithm, FedDA)
    return trace(run.algorithm, exchange)


def continued(run: Run, rounds: int) -> Iterator[Trace]:
    """The insides of the next rounds of a run that has begun."""
    checks.check("traces", rounds=rounds)
    if type(run.algorithm) is not FedDA:  # nor a subclass, whose rounds are others
        raise ValueError(f"theory: the algorithm must be a FedDA, got {type(run.algorithm).__name__}")
    if run.cohort != run.problem.clients or len(run.simulation.weights.unique()) > 1:
        raise ValueError("theory: all clients must take part, with equal weights: the theory has no other case")
    return (_round(run) for _ in range(rounds))
