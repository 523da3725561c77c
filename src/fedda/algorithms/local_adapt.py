"""Local-Adapt (Wang, Xu, Garrett, Charles, Liu, Joshi: Local Adaptivity in Federated Learning: Convergence and
Consistency, 2021)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core import Algorithm, Client, Cohort, on_client, step_counter
from ..registry import algorithms
from ..rules.moments import KINDS, debiased, second_moment
from ..rules.schedules import schedule


@algorithms.register(
    "local-adapt",
    reference="Wang et al. 2021",
    example={"lr": 0.01, "server": "sgd", "server_lr": 1.0, "eps": 0.001, "correction": "joint"},
)
@dataclass(frozen=True)
class LocalAdapt(Algorithm):
    """Clients run an adaptive optimiser that restarts every round; the server runs another one on the mean change.

        m <- beta1 m + (1 - beta1) g;     v <- second moment (client = adam, yogi, adagrad; sgd has none)
        X <- X - eta_t m / (sqrt(v) + eps)
        P = 1 / (sqrt(v) + eps);     A <- beta1 A + (1 - beta1) P;     C <- C + A
        D = mean dX  (correction none),   mean(dX / C)  (local),   mean(dX / C) / mean(1 / C)  (joint)
        x <- x + server_lr D  (server = sgd), or Adam's step on D

    Deviations: momentum only for client adam and yogi. `bias_correction` is on (also for A), because clients start at
    zero every round: without it the first step is 3.2 times too long. `server_eps` and `v0` are the server Adam's.
    The authors' code corrects the bias of the step, but takes P and A as they are: `raw_statistics`. Its README
    recommends client adagrad with lr = 0.3 and eps = 1e-3, server adam with server_lr = 0.03, and correction "joint".
    The usual starts of other codes are client_v0 = 0.1 for adagrad, and 1 with eps = 1e-3 for yogi.

    Choose it with a correction where clients are adaptive and must not pull the average towards their own optimum.

    Args:
        client: the optimiser of the clients: "adam", "yogi", "adagrad" or "sgd".
        server: the optimiser of the server, on the mean change: "adam" or "sgd".
        correction: how clients with different steps are made comparable: "none", "local" or "joint".
        eps: added to the root of the second moment on the clients.
        server_eps: the same on the server.
        v0: the start of the second moment on the server.
        client_v0: the start of the second moment on the clients; other than 0 with client="adagrad", or without
            bias_correction.
        raw_statistics: take P and A without bias correction, as the authors' code does.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> algorithm = fedda.make("local-adapt", lr=0.01, correction="joint", server="sgd", server_lr=1.0)
    >>> fedda.train(algorithm, problem, rounds=300).x
    tensor([1.0000], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor
        m: Tensor
        v: Tensor
        t: Tensor

    choices: ClassVar = {"client": (*KINDS, "sgd"), "server": ("adam", "sgd"), "correction": ("none", "local", "joint")}
    variants: ClassVar = (
        {"client": "yogi", "correction": "local"},
        {"client": "adagrad", "correction": "none", "server": "adam", "server_lr": 0.01},
        {"raw_statistics": True},
        {"client": "adagrad", "client_v0": 0.1},
    )
    lr: Any = 0.001
    server_lr: Any = 0.002
    steps: int = 5
    client: str = "adam"
    server: str = "adam"
    correction: str = "none"
    beta1: Any = 0.9
    beta2: Any = 0.999
    eps: Any = 1e-8
    server_eps: Any = 1e-8
    v0: Any = 0.0
    bias_correction: bool = True
    raw_statistics: bool = False
    client_v0: Any = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bias_correction and self.client != "adagrad" and torch.as_tensor(self.client_v0).any():
            wrong = f"client_v0 must be 0 with bias_correction and client={self.client!r}, got {self.client_v0}"
            raise ValueError(f"LocalAdapt: {wrong}")

    def init(self, x: Tensor, clients: Cohort) -> Any:
        return self.Server(x, torch.zeros_like(x), torch.zeros_like(x) + self.v0, step_counter(x))

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, m, v, t = server
        D, *inverse = cohort.average(self.local, x, t)
        D = D / inverse[0] if inverse else D
        if self.server == "adam":
            n = t / self.steps + 1
            m = self.beta1 * m + (1 - self.beta1) * D
            v = second_moment("adam", v, D, self.beta2)
            D = self.corrected(m, self.beta1, n) / (self.corrected(v, self.beta2, n).sqrt() + self.server_eps)
        return self.Server(x + schedule(self.server_lr)(t) * D, m, v, t + self.steps)

    @on_client
    def local(self, client: Client, x0: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        lr, x = schedule(self.lr), x0
        b1 = self.beta1 if self.client in ("adam", "yogi") else 0.0
        m, A, C = (torch.zeros_like(x0) for _ in range(3))
        v = torch.zeros_like(x0) + self.client_v0
        for i, move in client.steps(self.steps):
            (g,) = client.gradients(x)
            m = b1 * m + (1 - b1) * g
            P = raw = torch.ones_like(x0)
            if self.client != "sgd":
                v = second_moment(self.client, v, g, self.beta2)
                v_hat = v if self.client == "adagrad" else self.corrected(v, self.beta2, i + 1)
                P, raw = 1 / (v_hat.sqrt() + self.eps), 1 / (v.sqrt() + self.eps)
            x = move(x, self.decayed(x, lr(t + i)) - lr(t + i) * self.corrected(m, b1, i + 1) * P)
            A = b1 * A + (1 - b1) * (raw if self.raw_statistics else P)
            C = move(C, C + (A if self.raw_statistics else self.corrected(A, b1, i + 1)))
        dx = x - x0
        if self.correction == "none":
            return (dx,)
        return (dx / C,) if self.correction == "local" else (dx / C, 1 / C)

    def corrected(self, moment: Tensor, beta: Any, n: Any) -> Tensor:
        return debiased(moment, beta, n) if self.bias_correction else moment
