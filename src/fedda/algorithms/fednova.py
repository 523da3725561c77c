"""FedNova (Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization, NeurIPS 2020)."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core import Algorithm, Client, Cohort, on_client, step_counter
from ..registry import algorithms
from ..rules.schedules import schedule


@algorithms.register("fednova", reference="Wang et al. 2020", example={"lr": 0.1})
@dataclass(frozen=True)
class FedNova(Algorithm):
    """Clients take different numbers of steps, and the server averages their changes per step.

        u <- momentum u + g_k(X; B);     X <- X - eta_t (u + mu (X - x))      (tau_k times, from X = x and u = 0)
        s <- momentum s + 1;     a_k <- (1 - eta_t mu) a_k + s                (tau_k times, from a_k = s = 0)
        x <- x - server_lr tau_eff mean_k ((x - X_k) / a_k);     tau_eff = mean_k a_k

    a_k is the weight of client k's gradients in its change: tau_k for plain SGD. Without the division by a_k a client
    that takes more steps would count for more, and the method would solve another problem. With equal tau_k and mu = 0
    it is FedAvg.

    `work` says how many steps a client takes, at most `steps`: "samples" gives tau_k = steps n_k / max n (rounded, at
    least 1), so that all clients pass over their data equally often; "random" draws tau_k from 1 to `steps` in each
    round; "equal" gives all clients `steps`, or what `epochs` and `stragglers` say. Deviations: the means are uniform,
    unless ``weights="samples"`` makes them the paper's p_k = n_k / n. The paper has momentum or mu; with both, a_k is
    the exact weight.

    Choose it if clients have different amounts of data or time, and no client should wait for the slowest.

    Args:
        work: how the steps of a client are chosen: "samples" (by its data), "random" or "equal".
        momentum: the momentum of the clients' SGD.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]], sizes=[1, 10])
    >>> fedda.train(fedda.make("fednova", lr=0.01, steps=10), problem, rounds=400).x  # without a_k: 1.8
    tensor([0.9776], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor
        most: Tensor  # the samples of the largest client, for work = samples
        t: Tensor

    choices: ClassVar = {"work": ("samples", "random", "equal")}
    variants: ClassVar = ({"work": "random"}, {"work": "equal"}, {"work": "random", "momentum": 0.5, "mu": 0.1})
    lr: Any = 0.05
    steps: int = 5
    server_lr: Any = 1.0
    work: str = "samples"
    momentum: Any = 0.0
    mu: Any = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.work != "equal" and (self.epochs is not None or self.proportional):
            raise ValueError(
                f"FedNova: work must be 'equal' if epochs or steps='proportional' say it, got {self.work!r}"
            )

    def init(self, x: Tensor, clients: Cohort) -> Any:
        most = torch.ones_like(x[..., :1])
        if self.work == "samples":
            (samples,), _ = clients.replies(self.samples, x)
            most = samples.amax(dim=-2, keepdim=True)
        return self.Server(x, most, step_counter(x))

    @on_client
    def samples(self, client: Client, x: Tensor) -> tuple[Tensor, ...]:
        return (client.samples,)

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, most, t = server
        change, tau_eff = cohort.average(self.local, x, most, t)
        return self.Server(x - schedule(self.server_lr)(t) * tau_eff * change, most, t + self.steps)

    @on_client
    def local(self, client: Client, x0: Tensor, most: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        lr, tau = schedule(self.lr), self.local_steps(client, most)
        x, u, s, a = x0, torch.zeros_like(x0), torch.zeros_like(tau), torch.zeros_like(tau)
        for i, move in client.steps(self.steps):
            active, eta = tau > i, lr(t + i)
            (g,) = client.gradients(x, active=active)
            u, s = self.momentum * u + g, self.momentum * s + 1
            new = self.decayed(x, eta) - eta * (u + self.mu * (x - x0))
            x = move(x, torch.where(active, new, x))
            a = move(a, torch.where(active, (1 - eta * self.mu) * a + s, a))
        return (x0 - x) / a, a

    def local_steps(self, client: Client, most: Tensor) -> Tensor:
        """tau_k, [..., clients, 1]."""
        if self.work == "random":
            return 1 + (client.uniform() * self.steps).floor()
        if self.work == "samples":
            return (self.steps * client.samples / most).round().clamp(min=1)
        return torch.full_like(most, math.inf)
