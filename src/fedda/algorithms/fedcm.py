"""FedCM (Xu, Wang, Wang, Yao: FedCM: Federated Learning with Client-level Momentum, 2021)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import Algorithm, Client, Cohort, on_client, step_counter
from ..registry import algorithms
from ..rules.schedules import schedule


@algorithms.register("fedcm", reference="Xu et al. 2021", example={"lr": 0.05})
@dataclass(frozen=True)
class FedCM(Algorithm):
    """Clients mix the server's last direction Delta into every step.

        X <- X - eta_t (a g_k(X; B) + (1 - a) Delta),   1 - a = momentum
        Delta <- (x - mean_k X) / sum eta;     x <- x - server_lr (sum eta) Delta

    Delta is gradient-like: positive where the loss rises. Deviations: with a decaying rate the sum of the etas replaces
    eta I. `momentum` is the weight of the history; the paper's alpha is 1 - momentum.

    Choose it where few clients take part in a round: each of them follows the direction of the others.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> fedda.train(fedda.make("fedcm", lr=0.1), problem, rounds=300).x
    tensor([1.0000], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor
        delta: Tensor
        t: Tensor

    lr: Any = 0.01
    momentum: Any = 0.9
    steps: int = 5
    server_lr: Any = 1.0

    def init(self, x: Tensor, clients: Cohort) -> Any:
        return self.Server(x, torch.zeros_like(x), step_counter(x))

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, delta, t = server
        (mean,) = cohort.average(self.local, x, delta, t)
        total = sum(schedule(self.lr)(t + i) for i in range(self.steps))
        delta = (x - mean) / total
        return self.Server(x - schedule(self.server_lr)(t) * total * delta, delta, t + self.steps)

    @on_client(model_replies=(0,))
    def local(self, client: Client, x: Tensor, delta: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        lr = schedule(self.lr)
        for i, move in client.steps(self.steps):
            (g,) = client.gradients(x)
            mixed = (1 - self.momentum) * g + self.momentum * delta
            x = move(x, self.decayed(x, lr(t + i)) - lr(t + i) * mixed)
        return (x,)
