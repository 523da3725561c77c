"""Mime and MimeLite (Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh: Breaking the Centralized Barrier for
Cross-Device Federated Learning, NeurIPS 2021; first as Mime, 2020)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core import Algorithm, Client, Cohort, on_client, step_counter
from ..registry import algorithms
from ..rules.schedules import schedule


@algorithms.register("mime", reference="Karimireddy et al. 2021", example={"lr": 0.1})
@dataclass(frozen=True)
class Mime(Algorithm):
    """Clients mimic a central optimiser: its state is fixed in the round, and a correction removes their drift.

        c = mean_k grad f_k(x)  (all of each client's data)
        g = g_k(y; B) - g_k(x; B) + c;     y <- y - eta_t ((1 - momentum) g + momentum m)  [/ (sqrt(v) + eps) for adam]
        m <- (1 - momentum) c + momentum m;     v <- (1 - beta2) c^2 + beta2 v;     x <- x + server_lr (mean_k y - x)

    Deviations: none for base sgdm; for adam `mix_second_moment` puts g into v before each step, as one well-known
    library does.

    Choose it where clients are many and stateless and can afford a pass over their data; it needs two exchanges per
    round.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [3.0]], b=[[0.0], [4.0]])
    >>> fedda.train(fedda.make("mime", lr=0.1, momentum=0.5), problem, rounds=100).x
    tensor([3.0000], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor
        m: Tensor
        v: Tensor
        t: Tensor

    choices: ClassVar = {"base": ("sgdm", "adam")}
    variants: ClassVar = (
        {"base": "adam", "eps": 0.1},
        {"base": "adam", "eps": 0.1, "mix_second_moment": True},
    )
    lr: Any = 0.05
    steps: int = 5
    base: str = "sgdm"
    momentum: Any = 0.9
    beta2: Any = 0.99
    eps: Any = 1e-3
    server_lr: Any = 1.0
    mix_second_moment: bool = False

    def init(self, x: Tensor, clients: Cohort) -> Any:
        return self.Server(x, torch.zeros_like(x), torch.zeros_like(x), step_counter(x))

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, m, v, t = server
        (c,) = cohort.average(self.statistics, x)
        (y,) = cohort.average(self.local, x, t, *self.optimiser(m, v), c)
        return self.server_step(server, y, c)

    def optimiser(self, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The state of the central optimiser that clients need."""
        return (m, v) if self.base == "adam" else (m,)

    def server_step(self, server: Any, y: Tensor, c: Tensor) -> Any:
        x, m, v, t = server
        m = (1 - self.momentum) * c + self.momentum * m
        v = (1 - self.beta2) * c**2 + self.beta2 * v
        return self.Server(x + schedule(self.server_lr)(t) * (y - x), m, v, t + self.steps)

    @on_client
    def statistics(self, client: Client, x: Tensor) -> tuple[Tensor, ...]:
        return (client.full_gradient(x),)

    @on_client(model_replies=(0,))
    def local(self, client: Client, x: Tensor, t: Tensor, *sent: Tensor) -> tuple[Tensor, ...]:
        *state, c = sent
        lr, y = schedule(self.lr), x
        for i, move in client.steps(self.steps):
            g, g_x = client.gradients(y, x)
            g = g - g_x + c
            y = move(y, self.decayed(y, lr(t + i)) - lr(t + i) * self.direction(g, *state))
        return (y,)

    def direction(self, g: Tensor, m: Tensor, *second: Tensor) -> Tensor:
        """The step of the central optimiser, with its state fixed; `second` is v for base adam."""
        step: Tensor = (1 - self.momentum) * g + self.momentum * m
        if not second:
            return step
        (v,) = second
        if self.mix_second_moment:
            v = (1 - self.beta2) * g**2 + self.beta2 * v
        step = step / (v.sqrt() + self.eps)
        return step


@algorithms.register("mimelite", reference="Karimireddy et al. 2021", example={"lr": 0.1})
@dataclass(frozen=True)
class MimeLite(Mime):
    """Mime without the correction: g = g_k(y; B), and the full gradients go up with the models, in one exchange.

    Choose it instead of Mime where a second exchange or a second gradient per step costs too much.
    """

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, m, v, t = server
        y, c = cohort.average(self.local, x, t, *self.optimiser(m, v))
        return self.server_step(server, y, c)

    @on_client(model_replies=(0,))
    def local(self, client: Client, x: Tensor, t: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        lr, y = schedule(self.lr), x
        for i, move in client.steps(self.steps):
            (g,) = client.gradients(y)
            y = move(y, self.decayed(y, lr(t + i)) - lr(t + i) * self.direction(g, *state))
        return y, client.full_gradient(x)
