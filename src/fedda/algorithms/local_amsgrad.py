"""Local-AMSGrad (Chen, Li, Li: Toward Communication Efficient Adaptive Gradient Method, FODS 2020)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core import Algorithm, Client, Cohort, on_client, step_counter
from ..registry import algorithms
from ..rules.schedules import schedule

TINY = 1e-8


@algorithms.register("local-amsgrad", reference="Chen, Li, Li 2020", example={"lr": 0.01, "eps": 0.001})
@dataclass(frozen=True)
class LocalAmsgrad(Algorithm):
    """Local steps in a metric that all clients share and that is updated once per round.

        m <- beta1 m + (1 - beta1) g;     v <- beta2 v + (1 - beta2) g^2;     X <- X - eta_t m / (sqrt(v_hat) + eps)
        x <- mean_k X;     v_hat <- max(v_hat, mean_k v)

    Where m and v live is `state`: "local" keeps them on the client (the paper); "averaged" sends their means to all, so
    that clients are stateless, the better choice if they seldom return; "naive" is the variant that the paper shows
    to diverge: every client uses its own v_hat, and only x is averaged.

    How v_hat begins is `v0`. With "own", as in code of two of the authors, m, v and v_hat begin at 1e-8, and in the
    first round every client steps by its own sqrt(v). With "gradient", v_hat begins at the mean square of a first
    gradient (+ 1e-8), m and v at 0; it may then never be exceeded, and the metric stays as it is. A number is a v_hat
    of that size.

    Choose it as the adaptive baseline closest to FedDA-2-1. A single bad round freezes it: v_hat never falls.

    Args:
        v0: the start of v_hat: "own", "gradient" or a number.
        state: where m and v live: "local" on the clients, "averaged" by the server, or "naive".

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> fedda.train(fedda.make("local-amsgrad", lr=0.05), problem, rounds=100).x
    tensor([1.0000], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor
        v_hat: Tensor
        m: Tensor  # their means, for state averaged
        v: Tensor
        t: Tensor

    choices: ClassVar = {"state": ("local", "averaged", "naive")}
    named: ClassVar = {"v0": ("own", "gradient")}
    variants: ClassVar = ({"state": "averaged"}, {"state": "naive"}, {"v0": "gradient"})
    lr: Any = 0.001
    beta1: Any = 0.9
    beta2: Any = 0.999
    eps: Any = 1e-8
    steps: int = 5
    v0: Any = "own"
    state: str = "local"

    @property
    def memory(self) -> tuple[str, ...]:  # type: ignore[override]
        return {"local": ("m", "v"), "averaged": (), "naive": ("m", "v", "v_hat")}[self.state]

    def init(self, x: Tensor, clients: Cohort) -> Any:
        first = torch.zeros_like(x) + self.offset
        if self.start == "own":
            v_hat = first
        elif self.start == "gradient":
            v_hat = clients.average(self.first, x)[0] + TINY
        else:
            v_hat = torch.zeros_like(x) + self.v0
        return self.Server(x, v_hat, first, first, step_counter(x))

    @property
    def start(self) -> str:
        return self.v0 if isinstance(self.v0, str) else "number"

    @property
    def offset(self) -> float:
        """Where m and v begin. A client's memory begins at 0, so it keeps m and v less this number."""
        return TINY if self.start == "own" else 0.0

    @on_client
    def first(self, client: Client, x: Tensor) -> tuple[Tensor, ...]:
        (g,) = client.gradients(x)
        return (g**2,)

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, v_hat, m, v, t = server
        x, *means = cohort.average(self.local, x, v_hat, t, *((m, v) if self.state == "averaged" else ()))
        v_hat = torch.maximum(v_hat, means[0]) if means else v_hat
        v, m = means if self.state == "averaged" else (v, m)
        return self.Server(x, v_hat, m, v, t + self.steps)

    @on_client(model_replies=(0,))
    def local(self, client: Client, x: Tensor, v_hat: Tensor, t: Tensor, *sent: Tensor) -> tuple[Tensor, ...]:
        lr, memory, naive = schedule(self.lr), client.memory, self.state == "naive"
        m, v = sent or (memory["m"] + self.offset, memory["v"] + self.offset)
        v_hat = torch.maximum(memory["v_hat"], v_hat) if naive else v_hat
        for i, move in client.steps(self.steps):
            (g,) = client.gradients(x)
            m = move(m, self.beta1 * m + (1 - self.beta1) * g)
            v = move(v, self.beta2 * v + (1 - self.beta2) * g**2)
            v_hat = torch.maximum(v_hat, v) if naive else v_hat
            metric = torch.where(t == 0, v, v_hat) if self.start == "own" else v_hat
            x = move(x, self.decayed(x, lr(t + i)) - lr(t + i) * m / (metric.sqrt() + self.eps))
        kept = {"m": m - self.offset, "v": v - self.offset, "v_hat": v_hat}
        memory.update({name: kept[name] for name in self.memory})
        return {"local": (x, v), "averaged": (x, v, m), "naive": (x,)}[self.state]
