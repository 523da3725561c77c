"""STEM (Khanduri, Sharma, Yang, Hong, Liu, Rajawat, Varshney: STEM: A Stochastic Two-Sided Momentum Algorithm Achieving
Near-Optimal Sample and Communication Complexities for Federated Learning, NeurIPS 2021)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ..core import Algorithm, Client, Cohort, on_client, step_counter
from ..registry import algorithms
from ..rules.estimators import Mvr
from ..rules.schedules import Schedule, cube_root
from .old_point import CHOICES, MEMORY, keep_point, own_point


@algorithms.register("stem", reference="Khanduri et al. 2021", example={"lr": 0.1, "w": 8.0})
@dataclass(frozen=True)
class Stem(Algorithm):
    """Variance-reduced momentum on clients and server: FedDA-MVR without the adaptive metric.

        X <- X - eta_t nu;     nu <- g(X; B) + (1 - a_t) (nu - g(X_old; B));     x <- mean_k X;     nu <- mean_k nu
        eta_t = lr / (w + t)^(1/3),   a_t = min(1, c eta_t^2)

    X_old is the point before X. In the first step of a round it is the client's own last point, not the average x
    (`old_point="own"`), so each client keeps its last point. A client that took no part in the round before uses x.
    `old_point="server"` always uses x: then nothing is kept, and on clients that differ the drift is larger.

    Deviations: nu_0 is one batch of the ordinary size from every client; c = None is 0.5 / eta_0^2.

    Choose it as the control for FedDA-MVR with the same `old_point`: the difference between the two is the metric.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> fedda.train(fedda.make("stem", lr=0.5, w=8.0), problem, rounds=60).x
    tensor([1.0000], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor
        nu: Tensor
        t: Tensor

    choices: ClassVar = {"old_point": CHOICES}
    variants: ClassVar = ({"old_point": "server"},)
    lr: Any = 0.1
    w: Any = 100.0
    c: Any = None
    steps: int = 5
    old_point: str = "own"

    @property
    def memory(self) -> tuple[str, ...]:  # type: ignore[override]
        return MEMORY if self.old_point == "own" else ()

    @property
    def rate(self) -> Schedule:
        return cube_root(self.lr, self.w)

    @cached_property  # created once, because it reads numbers, which a recorded round must not
    def estimator(self) -> Mvr:
        return Mvr.default(self.c, self.rate)

    def init(self, x: Tensor, clients: Cohort) -> Any:
        self.estimator.warn(self.rate(step_counter(x)))
        (nu,) = clients.average(self.first, x)
        return self.Server(x, nu, step_counter(x))

    @on_client
    def first(self, client: Client, x: Tensor) -> tuple[Tensor, ...]:
        return client.gradients(x)

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, nu, t = server
        x, nu = cohort.average(self.local, x, nu, t)
        return self.Server(x, nu, t + self.steps)

    @on_client(model_replies=(0,))
    def local(self, client: Client, x: Tensor, nu: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        rate, estimator = self.rate, self.estimator
        x_old = own_point(client, x, t) if self.old_point == "own" else x
        for i, move in client.steps(self.steps):
            eta = rate(t + i)
            x = move(x, self.decayed(x, eta) - eta * nu)
            nu = move(nu, estimator(nu, x, x_old, eta, client))
            x_old = x
        if self.old_point == "own":
            keep_point(client, x, t + self.steps)
        return x, nu
