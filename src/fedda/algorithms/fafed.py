"""FAFED (Wu, Huang, Hu, Huang: Faster Adaptive Federated Learning, AAAI 2023)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core import Algorithm, Client, Cohort, on_client, step_counter
from ..registry import algorithms
from ..rules.schedules import schedule
from .old_point import CHOICES, MEMORY, keep_point, own_point


@algorithms.register("fafed", reference="Wu et al. 2023", example={"lr": 0.02, "eps": 0.5})
@dataclass(frozen=True)
class Fafed(Algorithm):
    """The closest relative of FedDA-MVR: v is accumulated on the clients and averaged, and so is the model itself.

        X <- X - eta m / h,  h = sqrt(v) + eps fixed in the round;     m <- g(X; B) + (1 - alpha) (m - g(X_old; B))
        v <- beta2 v + (1 - beta2) g(X; B)^2;     x, m, v <- means over the clients

    m_0 and v_0 are means of the first gradients and of their squares (v0 = a number instead starts v there); the very
    first step is taken with h = 1. The authors' code averages after a step, not after an estimate. With
    `old_point="own"` we do the same in other words: the first step of a round has the h of the round before, and its
    X_old is the client's own last point, which the client keeps. With `old_point="server"` it has the new h, and X_old
    is the x that the server sends: clients keep nothing, and on clients that differ the drift is larger. The authors'
    code has other defaults: beta = 0.1, rho = 0.1 (our eps) and 10 steps.

    Choose it as the ablation of FedDA's remark that averaging v on clients gives no linear speed-up.

    Args:
        alpha: the weight of a new gradient in the estimate m.
        v0: the start of v, a number; by default the mean square of the first gradients.
        ext: a factor of the old gradient in the first step of every round but the first; the authors' option has 0.95.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> fedda.train(fedda.make("fafed", lr=0.05, eps=0.5), problem, rounds=100).x
    tensor([1.0000], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor
        m: Tensor
        v: Tensor
        v_old: Tensor  # that of the round before
        t: Tensor

    choices: ClassVar = {"old_point": CHOICES}
    variants: ClassVar = ({"old_point": "server"}, {"ext": 0.95})
    lr: Any = 0.001
    alpha: Any = 0.1
    beta2: Any = 0.999
    eps: Any = 0.01
    steps: int = 5
    v0: Any = None
    old_point: str = "own"
    ext: Any = 1.0

    @property
    def memory(self) -> tuple[str, ...]:  # type: ignore[override]
        return MEMORY if self.old_point == "own" else ()

    def init(self, x: Tensor, clients: Cohort) -> Any:
        m, v = clients.average(self.first, x)
        v = v if self.v0 is None else torch.zeros_like(x) + self.v0
        return self.Server(x, m, v, v, step_counter(x))

    @on_client
    def first(self, client: Client, x: Tensor) -> tuple[Tensor, ...]:
        (g,) = client.gradients(x)
        return g, g**2

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, m, v, v_old, t = server
        x, m, new = cohort.average(self.local, x, m, v, t, *((v_old,) if self.old_point == "own" else ()))
        return self.Server(x, m, new, v, t + self.steps)

    @on_client(model_replies=(0,))
    def local(self, client: Client, x: Tensor, m: Tensor, v: Tensor, t: Tensor, *v_old: Tensor) -> tuple[Tensor, ...]:
        lr, h = schedule(self.lr), v.sqrt() + self.eps
        before = v_old[0].sqrt() + self.eps if v_old else h
        x_old = own_point(client, x, t) if v_old else x
        for i, move in client.steps(self.steps):
            scale = torch.where(t == 0, torch.ones_like(h), before) if i == 0 else h
            x = move(x, self.decayed(x, lr(t + i)) - lr(t + i) * m / scale)
            g, g_old = client.gradients(x, x_old)
            g_old = torch.where(t == 0, g_old, self.ext * g_old) if i == 0 else g_old
            m = move(m, g + (1 - self.alpha) * (m - g_old))
            v = move(v, self.beta2 * v + (1 - self.beta2) * g**2)
            x_old = x
        if v_old:
            keep_point(client, x, t + self.steps)
        return x, m, v
