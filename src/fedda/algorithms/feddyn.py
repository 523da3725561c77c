"""FedDyn (Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic Regularization,
ICLR 2021)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core import Algorithm, Client, Cohort, on_client, step_counter
from ..registry import algorithms
from ..rules.schedules import schedule


@algorithms.register("feddyn", reference="Acar et al. 2021", example={"lr": 0.1, "alpha": 0.5})
@dataclass(frozen=True)
class FedDyn(Algorithm):
    """Each client minimises its loss plus a linear and a quadratic term that align its minimum with the global one.

        y_k ~ argmin f_k(y) - <g_k, y> + (alpha / 2) ||y - x||^2  (steps of SGD);     g_k <- g_k - alpha (y_k - x)
        h <- h - alpha (r / K) mean_k (y_k - x);     x <- mean_k y_k - h / alpha

    The model that is evaluated is mean_k y_k, the mean of the clients of the round (`evaluate="mean"`), as in the
    authors' code, or the point x that the clients start from (`evaluate="cloud"`), which moves much more.

    Deviations: the local problem is solved by `steps` gradient steps, inexactly. g_k stays on the client. `server_lr`
    shortens the server's whole step. The authors' alpha is 0.01.

    Choose it where clients differ much and return often, as SCAFFOLD, when only one vector may go up.

    Args:
        alpha: the weight of the quadratic term: larger keeps clients nearer to x.
        evaluate: the model that is evaluated: "mean" of the clients, or "cloud", the point that they start from.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [3.0]], b=[[0.0], [4.0]])
    >>> fedda.train(fedda.make("feddyn", lr=0.1, alpha=1.0, steps=20), problem, rounds=100).x
    tensor([3.0000], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor  # the model that is evaluated
        cloud: Tensor  # the point that clients start from
        h: Tensor
        t: Tensor

    memory = ("g",)
    means_of_memory: ClassVar = {"h": "g"}
    choices: ClassVar = {"evaluate": ("mean", "cloud")}
    variants: ClassVar = ({"evaluate": "cloud"},)

    lr: Any = 0.05
    alpha: Any = 0.1
    steps: int = 5
    server_lr: Any = 1.0
    evaluate: str = "mean"

    def init(self, x: Tensor, clients: Cohort) -> Any:
        return self.Server(x, x, torch.zeros_like(x), step_counter(x))

    def round(self, server: Any, cohort: Cohort) -> Any:
        _, x, h, t = server
        (mean,) = cohort.average(self.local, x, t)
        h = h - self.alpha * cohort.share * (mean - x)
        cloud = x + schedule(self.server_lr)(t) * (mean - h / self.alpha - x)
        return self.Server(mean if self.evaluate == "mean" else cloud, cloud, h, t + self.steps)

    @on_client(model_replies=(0,))
    def local(self, client: Client, x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        lr, y, own = schedule(self.lr), x, client.memory["g"]
        for i, move in client.steps(self.steps):
            (g,) = client.gradients(y)
            aligned = g - own + self.alpha * (y - x)
            y = move(y, self.decayed(y, lr(t + i)) - lr(t + i) * aligned)
        client.memory["g"] = own - self.alpha * (y - x)
        return (y,)
