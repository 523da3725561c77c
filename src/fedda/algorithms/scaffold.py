"""SCAFFOLD (Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning, ICML 2020)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core import Algorithm, Client, Cohort, on_client, step_counter
from ..registry import algorithms
from ..rules.schedules import schedule


@algorithms.register("scaffold", reference="Karimireddy et al. 2020", example={"lr": 0.1})
@dataclass(frozen=True)
class Scaffold(Algorithm):
    """Each client corrects its gradients by the difference of a global and its own control variate.

        Y <- Y - eta_t (g_k(Y; B) - c_k + c)
        c_k+ = grad f_k(x)  (option 1),   c_k - c + (x - Y) / sum eta  (option 2)
        x <- x + server_lr mean_k (Y - x);     c <- c + (r / K) mean_k (c_k+ - c_k)

    r of K clients take part, so c moves by 1/K of the SUM of the changes and stays the mean of all c_k, also when a
    client fails or counts by its samples. c_k stays on the client. Deviations: none.

    Choose it where clients differ much and return often: it removes their drift exactly, at the cost of one vector
    that each client keeps.

    Args:
        option: how a client renews its control variate: 1 by a pass over its data, 2 from its change.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [3.0]], b=[[0.0], [4.0]])
    >>> fedda.train(fedda.make("scaffold", lr=0.1), problem, rounds=200).x
    tensor([3.0000], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor
        c: Tensor
        t: Tensor

    memory = ("c",)

    choices: ClassVar = {"option": (1, 2)}
    variants: ClassVar = ({"option": 1},)
    means_of_memory: ClassVar = {"c": "c"}
    lr: Any = 0.05
    steps: int = 5
    server_lr: Any = 1.0
    option: int = 2

    def init(self, x: Tensor, clients: Cohort) -> Any:
        return self.Server(x, torch.zeros_like(x), step_counter(x))

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, c, t = server
        dy, dc = cohort.average(self.local, x, c, t)
        c = c + cohort.share * dc
        return self.Server(x + schedule(self.server_lr)(t) * dy, c, t + self.steps)

    @on_client
    def local(self, client: Client, x: Tensor, c: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        lr, y, own, total = schedule(self.lr), x, client.memory["c"], 0.0
        for i, move in client.steps(self.steps):
            (g,) = client.gradients(y)
            y = move(y, self.decayed(y, lr(t + i)) - lr(t + i) * (g - own + c))
            total = move(total, total + lr(t + i))
        new = client.full_gradient(x) if self.option == 1 else own - c + (x - y) / total
        client.memory["c"] = new
        return y - x, new - own
