"""FedAvgM (Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core import Cohort, step_counter
from ..registry import algorithms
from ..rules.schedules import schedule
from .fedavg import FedAvg


@algorithms.register("fedavgm", reference="Hsu et al. 2019", example={"lr": 0.02})
@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """FedAvg with momentum on the server.

        delta = mean_k X - x;     m <- momentum m + delta;     x <- x + server_lr m
        x <- x + server_lr (delta + momentum m)  (nesterov)

    Deviations: none. Without dampening, a momentum of 0.9 makes the server's step ten times longer in the end.

    Choose it if few clients take part in a round and the averages vary much.

    Args:
        nesterov: look ahead: add the new change once more to the server's step.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> fedda.train(fedda.make("fedavgm", lr=0.1, steps=1, momentum=0.5), problem, rounds=100).x
    tensor([1.0000], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor
        m: Tensor
        t: Tensor

    variants: ClassVar = ({"nesterov": True},)
    momentum: Any = 0.9
    nesterov: bool = False

    def init(self, x: Tensor, clients: Cohort) -> Any:
        return self.Server(x, torch.zeros_like(x), step_counter(x))

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, m, t = server
        (mean,) = cohort.average(self.local, x, t)
        m = self.momentum * m + (mean - x)
        step = (mean - x) + self.momentum * m if self.nesterov else m
        return self.Server(x + schedule(self.server_lr)(t) * step, m, t + self.steps)
