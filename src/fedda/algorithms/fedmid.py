"""FedMiD (Yuan, Zaheer, Reddi: Federated Composite Optimization, ICML 2021)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core import Client, Cohort, on_client
from ..registry import algorithms
from ..rules.prox import feasible_start, prox
from ..rules.schedules import schedule
from .fedavg import FedAvg


@algorithms.register(
    "fedmid", reference="Yuan, Zaheer, Reddi 2021", example={"lr": 0.1, "prox": {"kind": "l1", "gamma": 0.001}}
)
@dataclass(frozen=True)
class FedMiD(FedAvg):
    """Mirror descent: a proximal step on the clients, models averaged in the primal, a proximal step on the server.

        X <- PROX(X - eta_t g_k(X; B), eta_t);     x <- PROX(x + server_lr mean_k (X - x), server_lr sum eta)

    `osp=True` leaves PROX to the server alone; otherwise clients and server both apply the penalty in full, as the
    paper writes it, so that it weighs about twice.

    Choose it as the control for dual averaging: the mean of sparse models is dense before the server's PROX, and the
    mean of models at the edge of a set lies inside it (in the example the minimum over the box is 0.5).

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> fedda.train(fedda.make("fedmid", lr=0.1, steps=1, prox=fedda.prox.Box(-0.5, 0.5)), problem, rounds=60).x
    tensor([0.4545], dtype=torch.float64)
    """

    prox: Any = None
    osp: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "prox", prox(self.prox))  # also from a table, as in TOML

    def init(self, x: Tensor, clients: Cohort) -> Any:
        return super().init(feasible_start("FedMiD", self.prox, x), clients)

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, t = super().round(server, cohort)
        total = sum(schedule(self.lr)(server.t + i) for i in range(self.steps))
        return self.Server(self.prox(x, 1.0, schedule(self.server_lr)(server.t) * total), t)

    @on_client(model_replies=(0,))
    def local(self, client: Client, x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        lr = schedule(self.lr)
        for i, move in client.steps(self.steps):
            (g,) = client.gradients(x)
            new = self.decayed(x, lr(t + i)) - lr(t + i) * g
            x = move(x, new if self.osp else self.prox(new, 1.0, lr(t + i)))
        return (x,)
