"""FedDualAvg (Yuan, Zaheer, Reddi: Federated Composite Optimization, ICML 2021)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import Algorithm, Client, Cohort, on_client, positive, step_counter
from ..registry import algorithms
from ..rules.prox import feasible_start, prox
from ..rules.schedules import schedule


@algorithms.register(
    "feddualavg", reference="Yuan, Zaheer, Reddi 2021", example={"lr": 0.1, "prox": {"kind": "l1", "gamma": 0.001}}
)
@dataclass(frozen=True)
class FedDualAvg(Algorithm):
    """Dual averaging without restart: the dual state y and the elapsed step size s grow over the whole run.

        W <- PROX(Y, s + elapsed);     Y <- Y - eta_t g_k(W; B)   (from y; elapsed: the etas before this step)
        y <- y + server_lr mean_k (Y - y);     s <- s + server_lr sum eta;     x = PROX(y, s)

    y is kept in float64, as it sums over all rounds. `osp=True` leaves PROX to the server alone. Deviations: the
    penalty is on all coordinates unless the map says otherwise; the authors' code penalises dense kernels only.

    Choose it for a penalty or a constraint in the Euclidean metric; FedDA is its restarted, preconditioned sibling.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> fedda.train(fedda.make("feddualavg", lr=0.1, prox=fedda.prox.L1(0.25)), problem, rounds=200).x
    tensor([0.7500], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor  # PROX of the dual state
        y: Tensor  # the dual state, float64
        s: Tensor  # the elapsed step size, [..., 1, 1] float64
        t: Tensor

    lr: Any = 0.1
    server_lr: Any = 1.0
    steps: int = 5
    prox: Any = None
    osp: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "prox", prox(self.prox))  # also from a table, as in TOML

    def init(self, x: Tensor, clients: Cohort) -> Any:
        return self.Server(
            feasible_start("FedDualAvg", self.prox, x),
            x.double(),
            torch.zeros_like(x[..., :1]).double(),
            step_counter(x),
        )

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, y, s, t = server
        (change,) = cohort.average(self.local, y.to(x.dtype), s.to(x.dtype), t)
        total = sum(schedule(self.lr)(t + i) for i in range(self.steps))
        server_lr = schedule(self.server_lr)(t)
        y, s = y + server_lr * change, s + server_lr * total
        return self.Server(self.primal(y, s).to(x.dtype), y, s, t + self.steps)

    def primal(self, y: Tensor, s: Any) -> Tensor:
        """PROX(y, s). Weight decay is one more penalty, (weight_decay / 2) ||x||^2."""
        h: Any = 1.0
        if positive(self.weight_decay):
            h = (1 + s * self.weight_decay) * torch.ones_like(y)
        x: Tensor = self.prox(y / h, h, s)
        return x

    @on_client
    def local(self, client: Client, y: Tensor, s: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        lr, Y = schedule(self.lr), y
        for i, move in client.steps(self.steps):
            W = Y if self.osp else self.primal(Y, s)
            (g,) = client.gradients(W)
            Y, s = move(Y, Y - lr(t + i) * g), move(s, s + lr(t + i))
        return (Y - y,)
