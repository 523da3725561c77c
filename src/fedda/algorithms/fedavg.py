"""FedAvg (McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks from
Decentralized Data, AISTATS 2017)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ..core import Algorithm, Client, Cohort, on_client, step_counter
from ..registry import algorithms
from ..rules.schedules import schedule


@algorithms.register("fedavg", reference="McMahan et al. 2017", example={"lr": 0.1})
@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Local SGD: each client takes `steps` gradient steps from x, the server averages where they end.

        X <- X - eta_t g_k(X; B)  (steps times, from x);     x <- x + server_lr (mean_k X - x)

    Deviations: clients are averaged uniformly, as in the FedDA paper's objective. McMahan et al. weight them by their
    samples and let them work for epochs: ``train(..., weights="samples")`` and ``make("fedavg", epochs=1)``.

    Choose it as the first baseline of every comparison, with its rate tuned: it is often hard to beat.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> fedda.train(fedda.make("fedavg", lr=0.5, steps=1), problem, rounds=30).x
    tensor([1.0000], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor
        t: Tensor

    lr: Any = 0.05
    steps: int = 5
    server_lr: Any = 1.0

    def init(self, x: Tensor, clients: Cohort) -> Server:
        return self.Server(x, step_counter(x))

    def round(self, server: Server, cohort: Cohort) -> Server:
        x, t = server
        (mean,) = cohort.average(self.local, x, t)
        return self.Server(x + schedule(self.server_lr)(t) * (mean - x), t + self.steps)

    @on_client(model_replies=(0,))
    def local(self, client: Client, x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        lr = schedule(self.lr)
        for i, move in client.steps(self.steps):
            (g,) = client.gradients(x)
            x = move(x, self.decayed(x, lr(t + i)) - lr(t + i) * g)
        return (x,)


@algorithms.register("fedavg-subgradient", reference="Yuan, Zaheer, Reddi 2021", example={"lr": 0.1})
@dataclass(frozen=True)
class FedAvgSubgradient(FedAvg):
    """FedAvg on f + gamma ||x||_1 by a subgradient.

        X <- X - eta_t (g_k(X; B) + gamma sign(X))                                     (sign = "before")
        Y = X - eta_t g_k(X; B);     X <- Y - eta_t gamma sign(Y)                      (sign = "after")

    The authors' code takes the sign after the gradient step. It also penalises the kernels of dense layers alone and
    weights clients by their samples (`weights="samples"` of a run).

    Choose it as the dense control: it shrinks weights but never makes one exactly zero.

    Args:
        sign: where the sign of the penalty is taken: "before" the gradient step, or "after" it.
    """

    choices: ClassVar = {"sign": ("before", "after")}
    variants: ClassVar = ({"sign": "after"},)
    gamma: Any = 0.001
    sign: str = "before"

    @on_client(model_replies=(0,))
    def local(self, client: Client, x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        lr = schedule(self.lr)
        for i, move in client.steps(self.steps):
            (g,) = client.gradients(x)
            new = self.decayed(x, lr(t + i)) - lr(t + i) * g
            x = move(x, new - lr(t + i) * self.gamma * (x if self.sign == "before" else new).sign())
        return (x,)
