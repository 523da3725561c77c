"""SCAFFOLD-M (Cheng, Huang, Wu, Yuan: Momentum Benefits Non-IID Federated Learning Simply and Provably, ICLR 2024,
Algorithm 2)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core import Algorithm, Client, Cohort, on_client, step_counter
from ..registry import algorithms
from ..rules.schedules import schedule


@algorithms.register("scaffold-m", reference="Cheng et al. 2024", example={"lr": 0.05})
@dataclass(frozen=True)
class ScaffoldM(Algorithm):
    """SCAFFOLD whose clients mix the server's last direction Delta into every step, as FedCM does.

        Y <- Y - eta_t (a (g_k(Y; B) - c_k + c) + (1 - a) Delta),   1 - a = momentum
        c_k+ = the mean of the client's gradients in this round
        Delta <- (x - mean_k Y) / sum eta;     x <- x - server_lr (sum eta) Delta
        c <- c + (r / K) mean_k (c_k+ - c_k)

    Delta is gradient-like: positive where the loss rises. Deviations: with a decaying rate the sum of the etas replaces
    eta I. `momentum` is the weight of the history; the paper's beta is 1 - momentum.

    Choose it where clients differ much and few of them take part in a round: control variates remove their drift, and
    the momentum damps the noise of the small cohort.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [3.0]], b=[[0.0], [4.0]])
    >>> fedda.train(fedda.make("scaffold-m", lr=0.1), problem, rounds=300).x
    tensor([3.0000], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor
        delta: Tensor
        c: Tensor
        t: Tensor

    memory = ("c",)

    means_of_memory: ClassVar = {"c": "c"}
    lr: Any = 0.05
    momentum: Any = 0.9
    steps: int = 5
    server_lr: Any = 1.0

    def init(self, x: Tensor, clients: Cohort) -> Any:
        return self.Server(x, torch.zeros_like(x), torch.zeros_like(x), step_counter(x))

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, delta, c, t = server
        dy, dc = cohort.average(self.local, x, delta, c, t)
        total = sum(schedule(self.lr)(t + i) for i in range(self.steps))
        delta = -dy / total
        x = x - schedule(self.server_lr)(t) * total * delta
        return self.Server(x, delta, c + cohort.share * dc, t + self.steps)

    @on_client
    def local(self, client: Client, x: Tensor, delta: Tensor, c: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        lr, y, own = schedule(self.lr), x, client.memory["c"]
        mean = own  # of the gradients so far
        for i, move in client.steps(self.steps):
            (g,) = client.gradients(y)
            mixed = (1 - self.momentum) * (g - own + c) + self.momentum * delta
            y = move(y, self.decayed(y, lr(t + i)) - lr(t + i) * mixed)
            mean = move(mean, mean + (g - mean) / (i + 1))
        client.memory["c"] = mean
        return y - x, mean - own
