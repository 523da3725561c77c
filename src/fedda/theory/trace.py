"""The inside of a round of FedDA, from a recording: the algorithm has no hook. And the paper's measure G of it.

The points X are those of the recorded gradients. The estimates NU and the dual states Z follow from the gradients by
the algorithm's own rules. A test checks that they end at the clients' replies.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..algorithms.fedda import FedDA
from ..arguments import check_engine
from ..core import Problem
from ..rules.prox import Prox
from ..run import Run
from .recording import RecordedCall, RecordedExchange, Recording, Tensors


class Replayed:
    """A client that answers with recorded gradients."""

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
    t: Tensor  # the first step of the round
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
        if type(self.algorithm.prox) is Prox:  # no set: all at once
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
            raise ValueError(f"theory: {name} has no alpha that depends on eta; use Mvr")
        return torch.stack([torch.as_tensor(weight(e)).expand_as(e) for e in self.eta])


def trace(algorithm: FedDA, exchange: RecordedExchange) -> Trace:
    """The inside of a round, from its exchange."""
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


def traces(algorithm: Any, problem: Problem, rounds: int, engine: Any = "auto", **options: Any) -> Iterator[Trace]:
    """Run FedDA with the options of `fedda.Run` and yield the inside of each round. All clients take part.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> algorithm = fedda.make("fedda-mvr", lr=0.2, w=8.0, eps=1.0, steps=2)
    >>> [(trace.X.flatten(1) * 100).round().tolist() for trace in traces(algorithm, problem, rounds=1)]
    [[[0.0, 0.0], [10.0, 10.0], [14.0, 23.0]]]
    """
    checks.check("traces", rounds=rounds)
    if type(algorithm) is not FedDA:  # the rounds of a subclass are different
        raise ValueError(f"theory: the algorithm must be a FedDA, got {type(algorithm).__name__}")
    unequal = options.get("weights") == "samples" and len(problem.sizes.unique()) > 1
    if options.get("cohort") not in (None, problem.clients) or unequal:
        raise ValueError("theory: all clients must take part, with equal weights: the theory has no other case")
    recording = Recording(check_engine(engine))
    run = Run(algorithm, problem, engine=recording, **options)
    return (next_trace(run, recording) for _ in range(rounds))


def next_trace(run: Run, recording: Recording) -> Trace:
    """The inside of the next round."""
    recording.exchanges.clear()
    run.advance()
    [exchange] = recording.exchanges
    if not all(bool(reply.isfinite().all()) for reply in exchange.replies):
        raise ValueError("theory: a client's reply was not finite; the theory is about runs that do not diverge")
    assert isinstance(run.algorithm, FedDA)
    return trace(run.algorithm, exchange)


def value(problem: Problem, x: Tensor) -> Tensor:
    """f at points x [..., 1, d]: [..., 1, 1]. All clients have the same weight."""
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
    """G_t of equation `measure`. By default rho is the smallest entry of the round's H.

        G_t = (rho / (lambda eta_t))^2 |x~_t - x~_{t+1}|^2 + |nubar_t - grad f(x~_t)|^2

    At a stationary point with an exact estimate both parts vanish:

    >>> import fedda
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
    return trace.nubar - problem.full_gradients(trace.xt).mean(dim=-2, keepdim=True)


def square(v: Tensor) -> Tensor:
    """|v|^2 of [..., 1, d] vectors, [...]."""
    return (v**2).sum(dim=(-2, -1))
