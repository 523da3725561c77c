"""FedProx (Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks,
MLSys 2020)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core import Client, on_client
from ..registry import algorithms
from ..rules.schedules import schedule
from .fedavg import FedAvg


@algorithms.register("fedprox", reference="Li et al. 2020", example={"lr": 0.1, "mu": 0.1})
@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose clients are pulled back to x by the penalty (mu / 2) ||X - x||^2.

        X <- X - eta_t (g_k(X; B) + mu (X - x));     x <- x + server_lr (mean_k X - x)

    Deviations: every client takes the same number of steps; the paper's variable local work is not simulated.

    Choose it where local work makes clients drift apart and no state may be kept on them.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> fedda.train(fedda.make("fedprox", lr=0.1, mu=1.0), problem, rounds=60).x
    tensor([1.0000], dtype=torch.float64)
    """

    mu: Any = 0.01

    @on_client(model_replies=(0,))
    def local(self, client: Client, x0: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        lr, x = schedule(self.lr), x0
        for i, move in client.steps(self.steps):
            (g,) = client.gradients(x)
            pulled = g + self.mu * (x - x0)  # the gradient of the SQUARED norm, halved
            x = move(x, self.decayed(x, lr(t + i)) - lr(t + i) * pulled)
        return (x,)
