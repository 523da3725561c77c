"""Local-AMSGrad (Chen, Li, Li: Toward Communication Efficient Adaptive Gradient Method, FODS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check
from ..core import Algorithm, Client, Cohort, on_client, step_counter
from ..registry import algorithms
from ..rules.schedules import schedule


@algorithms.register("local-amsgrad", reference="Chen, Li, Li 2020")
@dataclass(frozen=True)
class LocalAmsgrad(Algorithm):
    """Local steps in a metric that all clients share and that is refreshed once a round.

        m <- beta1 m + (1 - beta1) g;     v <- beta2 v + (1 - beta2) g^2;     X <- X - eta_t m / (sqrt(v_hat) + eps)
        x <- mean_k X;     v_hat <- max(v_hat, mean_k v)

    `local_m=True` keeps m on the client (the paper), else it is averaged and sent round; the same for v with
    `local_v`. With both False clients are stateless, the better choice where they seldom return. `naive=True` is the
    variant that the paper shows to diverge: every client steps by its own v_hat. v_hat begins at the mean square of a
    first gradient (+ 1e-8), or at `v0`: the paper's tiny constant would make the whole first round as long as eta /
    sqrt(v0).

    Choose it as the adaptive baseline closest to FedDA-2-1. A single bad round freezes it: v_hat never falls.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> fedda.train(fedda.make("local-amsgrad", lr=0.05), problem, rounds=100).x
    tensor([1.0000], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor
        v_hat: Tensor
        m: Tensor  # means, where they are not local
        v: Tensor
        t: Tensor

    lr: Any = 0.001
    beta1: Any = 0.9
    beta2: Any = 0.999
    eps: Any = 1e-8
    steps: int = 5
    v0: Any = None
    local_m: bool = True
    local_v: bool = True
    naive: bool = False

    def __post_init__(self) -> None:
        if self.naive and not self.local_m:
            raise ValueError("LocalAmsgrad: local_m must be True with naive=True, which averages x alone, got False")
        words = {} if self.v0 is None else {"v0": self.v0}
        check("LocalAmsgrad", lr=self.lr, beta1=self.beta1, beta2=self.beta2, eps=self.eps, steps=self.steps, **words)

    @property
    def memory(self) -> tuple[str, ...]:  # type: ignore[override]
        kept = {"m": self.local_m, "v": self.local_v or self.naive, "v_hat": self.naive}
        return tuple(name for name, needed in kept.items() if needed)

    def init(self, x: Tensor, clients: Cohort) -> Any:
        zero = torch.zeros_like(x)
        v_hat = clients.average(self.first, x)[0] + 1e-8 if self.v0 is None else zero + self.v0
        return self.Server(x, v_hat, zero, zero, step_counter(x))

    @on_client
    def first(self, client: Client, x: Tensor) -> tuple[Tensor, ...]:
        (g,) = client.gradients(x)
        return (g**2,)

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, v_hat, m, v, t = server
        sent = {name: value for name, value in (("m", m), ("v", v)) if name not in self.memory}
        replies = cohort.average(self.local, x, v_hat, t, *sent.values())
        means = dict(zip(("x", *self.averaged), replies, strict=True))
        v_hat = torch.maximum(v_hat, means["v"]) if "v" in means else v_hat
        return self.Server(means["x"], v_hat, means.get("m", m), means.get("v", v), t + self.steps)

    @on_client
    def local(self, client: Client, x: Tensor, v_hat: Tensor, t: Tensor, *sent: Tensor) -> tuple[Tensor, ...]:
        lr, memory = schedule(self.lr), client.memory
        absent = [name for name in ("m", "v") if name not in self.memory]
        state = {**memory, **dict(zip(absent, sent, strict=True))}
        m, v, own = state["m"], state["v"], torch.maximum(memory["v_hat"], v_hat) if self.naive else v_hat
        for i in range(self.steps):
            (g,) = client.gradients(x)
            m = self.beta1 * m + (1 - self.beta1) * g
            v = self.beta2 * v + (1 - self.beta2) * g**2
            own = torch.maximum(own, v) if self.naive else own
            x = x - lr(t + i) * m / (own.sqrt() + self.eps)
        new = {"x": x, "m": m, "v": v, "v_hat": own}
        memory.update({name: new[name] for name in self.memory})
        return tuple(new[name] for name in ("x", *self.averaged))

    @property
    def averaged(self) -> tuple[str, ...]:
        """What goes up besides x; the naive variant averages nothing else."""
        return () if self.naive else ("v",) if self.local_m else ("v", "m")
