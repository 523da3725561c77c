"""FedExP (Jhunjhunwala, Wang, Joshi: FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..core import Client, Cohort, on_client, step_counter
from ..registry import algorithms
from ..rules.schedules import schedule
from .fedavg import FedAvg


@algorithms.register("fedexp", reference="Jhunjhunwala et al. 2023", example={"lr": 0.1, "eps": 0.1})
@dataclass(frozen=True)
class FedExP(FedAvg):
    """FedAvg with a server step that grows as the clients' changes disagree.

        eta_g = max(1, mean_k ||D_k||^2 / (2 (||mean_k D_k||^2 + eps))),   D_k = X - y
        y <- y + server_lr eta_g mean_k D_k

    The model that is evaluated, `x`, is the mean of the last two iterates y, as in the paper. One number more goes up.
    The authors' code differs in three things: it multiplies eps by the number of clients of the round, lets eps fall
    with the square of the clients' rate, and weights the clients by their samples (`weights="samples"` of a run).

    Choose it for a longer server step without state and without tuning.

    Args:
        eps: limits the server's step when the clients' changes almost cancel.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> fedda.train(fedda.make("fedexp", lr=0.1, eps=0.1), problem, rounds=60).x
    tensor([1.0000], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor  # the mean of the last two iterates
        y: Tensor  # the iterate
        t: Tensor

    eps: Any = 1e-3

    def init(self, x: Tensor, clients: Cohort) -> Any:
        return self.Server(x, x, step_counter(x))

    def round(self, server: Any, cohort: Cohort) -> Any:
        _, y, t = server
        mean, squared = cohort.average(self.change, y, t)
        ratio = squared / (2 * (mean.double().square().sum(dim=-1, keepdim=True) + self.eps))
        new = y + schedule(self.server_lr)(t) * ratio.clamp(min=1).to(y.dtype) * mean
        return self.Server((y + new) / 2, new, t + self.steps)

    @on_client
    def change(self, client: Client, y: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        (x,) = self.local(client, y, t)
        return x - y, (x - y).double().square().sum(dim=-1, keepdim=True).to(x.dtype)
