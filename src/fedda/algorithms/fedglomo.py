"""FedGLOMO and FedLOMO (Das, Acharya, Hashemi, Sanghavi, Dhillon, Topcu: Faster Non-Convex Federated Learning via
Global and Local Momentum, UAI 2022)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import Algorithm, Client, Cohort, on_client, step_counter
from ..registry import algorithms
from ..rules.schedules import schedule


@algorithms.register("fedglomo", reference="Das et al. 2022", example={"lr": 0.05})
@dataclass(frozen=True)
class FedGlomo(Algorithm):
    """Variance reduction on the server: clients run from the new and from the previous model on the SAME batches.

        V <- g(W; B) + local_momentum (V - g(W_old; B));     W <- W - eta_t V   (from x; from x_prev the same for W^)
        D_k = x - W,  D^_k = x_prev - W^;     u <- b mean D + (1 - b) (u + mean (D - D^));     x <- x - u

    b = server_beta; in the first round u = mean D. b = 1 is FedLOMO. Deviations: the paper quantises both uploads, we
    send them whole.

    Choose it to study global against local variance reduction; it costs four gradients per step.

    Args:
        local_momentum: the weight of the history in a client's estimate V; 0 is plain SGD on clients.
        server_beta: b, the weight of the new changes on the server; 1 for no variance reduction there.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> fedda.train(fedda.make("fedglomo", lr=0.1), problem, rounds=100).x
    tensor([1.0000], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor
        x_prev: Tensor
        u: Tensor
        t: Tensor

    lr: Any = 0.05
    steps: int = 5
    local_momentum: Any = 1.0
    server_beta: Any = 0.2

    def init(self, x: Tensor, clients: Cohort) -> Any:
        return self.Server(x, x, torch.zeros_like(x), step_counter(x))

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, x_prev, u, t = server
        D, change = cohort.average(self.local, x, x_prev, t)
        b = torch.where(t == 0, torch.ones_like(t), self.server_beta * torch.ones_like(t))
        u = b * D + (1 - b) * (u + change)
        return self.Server(x - u, x, u, t + self.steps)

    @on_client
    def local(self, client: Client, x: Tensor, x_prev: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        lr, b = schedule(self.lr), self.local_momentum
        W, W_ = before = x, x_prev
        for i, move in client.steps(self.steps):
            if i == 0:
                V, V_ = client.gradients(W, W_)
            else:
                g, g_, old, old_ = client.gradients(W, W_, *before)
                V, V_ = g + b * (V - old), g_ + b * (V_ - old_)
            before = W, W_
            W = move(W, self.decayed(W, lr(t + i)) - lr(t + i) * V)
            W_ = move(W_, self.decayed(W_, lr(t + i)) - lr(t + i) * V_)
        return x - W, (x - W) - (x_prev - W_)
