"""Mime and MimeLite (Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh: Breaking the Centralized Barrier for
Cross-Device Federated Learning, NeurIPS 2021; first as Mime, 2020)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core import Algorithm, Client, Cohort, on_client, step_counter
from ..registry import algorithms
from ..rules.moments import debiased, second_moment
from ..rules.schedules import schedule


@algorithms.register("mime", reference="Karimireddy et al. 2021", example={"lr": 0.1})
@dataclass(frozen=True)
class Mime(Algorithm):
    """Clients mimic a central optimiser: its state is fixed in the round, and a correction removes their drift.

        c = mean_k grad f_k(x)  (all of each client's data)
        g = g_k(y; B) - g_k(x; B) + c;     y <- y - eta_t ((1 - momentum) g + momentum m)  [/ (sqrt(v) + eps) for adam]
        m <- (1 - momentum) c + momentum m;     v <- (1 - beta2) c^2 + beta2 v;     x <- x + server_lr (mean_k y - x)

    For adam, the v of a step is `second_moment`. With "round" it is that of the server after this round: c is in it
    already. With "step" the step's own g is mixed in instead, as well-known libraries do. Both have Adam's bias
    correction, which counts rounds. With "frozen" it is the server's v from before the round; v then begins at the
    square of a first c, for which all clients pass over their data once.

    Deviations: none for base sgdm. Other codes have no factor 1 - momentum: their lr is ours times 1 - momentum.

    Choose it where clients are many and stateless and can afford a pass over their data; it needs two exchanges per
    round.

    Args:
        base: the optimiser that clients mimic: "sgdm" (SGD with momentum) or "adam".
        beta2: for adam, the decay of the second moment.
        eps: for adam, added to the root of the second moment.
        second_moment: for adam, the v of a step: "round", "step" or "frozen".

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

    choices: ClassVar[dict[str, tuple[str, ...]]] = {
        "base": ("sgdm", "adam"),
        "second_moment": ("round", "step", "frozen"),
    }
    variants: ClassVar[tuple[Any, ...]] = (
        {"base": "adam", "eps": 0.1},
        {"base": "adam", "eps": 0.1, "second_moment": "step"},
        {"base": "adam", "eps": 0.1, "second_moment": "frozen"},
    )
    lr: Any = 0.05
    steps: int = 5
    base: str = "sgdm"
    momentum: Any = 0.9
    beta2: Any = 0.99
    eps: Any = 1e-3
    server_lr: Any = 1.0
    second_moment: str = "round"

    def init(self, x: Tensor, clients: Cohort) -> Any:
        v = torch.zeros_like(x)
        if self.base == "adam" and self.second_moment == "frozen":
            v = clients.average(self.statistics, x)[0] ** 2
        return self.Server(x, torch.zeros_like(x), v, step_counter(x))

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, m, v, t = server
        (c,) = cohort.average(self.statistics, x)
        v = self.mixed(v, c) if self.second_moment == "round" else v
        (y,) = cohort.average(self.local, x, t, *self.optimiser(m, v), c)
        return self.server_step(server, y, c)

    def optimiser(self, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The state of the central optimiser that clients need."""
        return (m, v) if self.base == "adam" else (m,)

    def mixed(self, v: Tensor, g: Tensor) -> Tensor:
        return second_moment("adam", v, g, self.beta2)

    def server_step(self, server: Any, y: Tensor, c: Tensor) -> Any:
        x, m, v, t = server
        m = (1 - self.momentum) * c + self.momentum * m
        server_lr = schedule(self.server_lr)(t)
        return self.Server(x + server_lr * (y - x), m, self.mixed(v, c), t + self.steps)

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
            y = move(y, self.decayed(y, lr(t + i)) - lr(t + i) * self.direction(t, g, *state))
        return (y,)

    def direction(self, t: Tensor, g: Tensor, m: Tensor, *second: Tensor) -> Tensor:
        """The step of the central optimiser, with its state fixed; `second` is v for base adam."""
        step: Tensor = (1 - self.momentum) * g + self.momentum * m
        if not second:
            return step
        (v,) = second
        if self.second_moment != "frozen":
            v, n = self.mixed(v, g) if self.second_moment == "step" else v, t / self.steps + 1
            step, v = debiased(step, self.momentum, n), debiased(v, self.beta2, n)
        step = step / (v.sqrt() + self.eps)
        return step


@algorithms.register("mimelite", reference="Karimireddy et al. 2021", example={"lr": 0.1})
@dataclass(frozen=True)
class MimeLite(Mime):
    """Mime without the correction: g = g_k(y; B), and the full gradients go up with the models, in one exchange.

    So the round's c is not known in its steps: for adam, `second_moment` is "step" or "frozen".

    Choose it instead of Mime where a second exchange or a second gradient per step costs too much.

    Args:
        second_moment: for adam, the v of a step: "step" or "frozen".
    """

    choices: ClassVar = {"base": ("sgdm", "adam"), "second_moment": ("step", "frozen")}
    variants: ClassVar = (
        {"base": "adam", "eps": 0.1},
        {"base": "adam", "eps": 0.1, "second_moment": "frozen"},
    )
    second_moment: str = "step"

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, m, v, t = server
        y, c = cohort.average(self.local, x, t, *self.optimiser(m, v))
        return self.server_step(server, y, c)

    @on_client(model_replies=(0,))
    def local(self, client: Client, x: Tensor, t: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        lr, y = schedule(self.lr), x
        for i, move in client.steps(self.steps):
            (g,) = client.gradients(y)
            y = move(y, self.decayed(y, lr(t + i)) - lr(t + i) * self.direction(t, g, *state))
        return y, client.full_gradient(x)
