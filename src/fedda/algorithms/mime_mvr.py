"""Mime-MVR and MimeLite-MVR: Mime (Karimireddy et al. 2021) with STORM's estimator, a baseline of the FedDA paper."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core import Algorithm, Client, Cohort, on_client, step_counter
from ..registry import algorithms
from ..rules.estimators import Mvr, default_c, weight
from ..rules.schedules import Schedule, cube_root


@algorithms.register("mime-mvr", reference="Karimireddy et al. 2021", example={"lr": 0.2, "w": 8.0, "c": 100.0})
@dataclass(frozen=True)
class MimeMvr(Algorithm):
    """Clients mimic central STORM: the momentum is updated once per round, on one batch at both models, then fixed.

        m <- mean_k g(x; B) + (1 - a) (m - mean_k g(x_prev; B)),   a = min(1, c eta^2) of the step that led to x
        y <- y - eta (g(y; B) - g(x; B) + m)                                       (form A)
        y <- y - eta (g(y; B) - g(x; B) + a mean_k g(x; B) + (1 - a) m_before)     (form B);     x <- mean_k y
        y <- y - eta (g(y; B) + (1 - a) (m_before - g(x_prev; B)) + a (mean_k g(x; B) - g(x; B)))     (form C)

    eta = lr / (w + t)^(1/3) is constant in a round, as all states are. Form C puts STORM, whose state is m and x_prev,
    into Mime word for word, at the cost of a third gradient in each step. Forms A and B are ours. `statistics` says
    what the means over clients are taken of: one mini-batch ("batch"), or all of a client's data, as in Mime ("full").
    It has no preconditioner, though the FedDA paper files it under adaptive methods.

    Choose it as the control for FedDA-MVR that updates its momentum once per round instead of at every step.

    Args:
        form: how a step is corrected: "A", "B" or "C" above.
        statistics: what the means over clients are taken of: one "batch", or the "full" data of a client.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> fedda.train(fedda.make("mime-mvr", lr=0.3, w=8.0), problem, rounds=100).x
    tensor([1.0000], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor
        x_prev: Tensor
        m: Tensor
        t: Tensor

    choices: ClassVar[dict[str, tuple[str, ...]]] = {"form": ("A", "B", "C"), "statistics": ("batch", "full")}
    one_rate_per_round: ClassVar[bool] = True
    variants: ClassVar[tuple[Any, ...]] = ({"form": "B"}, {"form": "C"}, {"statistics": "full"})
    lr: Any = 0.1
    w: Any = 100.0
    c: Any = None
    steps: int = 5
    form: str = "A"
    statistics: str = "batch"

    @property
    def rate(self) -> Schedule:
        return cube_root(self.lr, self.w)

    def alpha(self, t: Tensor) -> Any:
        """The weight of the step that led to x; 1 in the first round, which has no history."""
        a = weight(default_c(self.c, self.rate), self.rate((t - self.steps).clamp(min=0)))
        return torch.where(t == 0, torch.ones_like(torch.as_tensor(a)), torch.as_tensor(a))

    def init(self, x: Tensor, clients: Cohort) -> Any:
        Mvr.default(self.c, self.rate).warn(self.rate(step_counter(x)))
        return self.Server(x, x, torch.zeros_like(x), step_counter(x))

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, x_prev, m, t = server
        a = self.alpha(t)
        fresh, *g = cohort.average(self.first_pass, x, x_prev, t)  # forms B and C send g too
        first = a * g[0] if g else fresh
        (y,) = cohort.average(self.local, x, t, first + (1 - a) * m, *((x_prev,) if self.form == "C" else ()))
        return self.Server(y, x, fresh + (1 - a) * m, t + self.steps)

    @on_client
    def first_pass(self, client: Client, x: Tensor, x_prev: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        if self.statistics == "full":
            g, g_prev = client.full_gradient(x), client.full_gradient(x_prev)
        else:
            g, g_prev = client.gradients(x, x_prev)
        fresh = g - (1 - self.alpha(t)) * g_prev
        return (fresh,) if self.form == "A" else (fresh, g)

    @on_client(model_replies=(0,))
    def local(self, client: Client, x: Tensor, t: Tensor, m: Tensor, *x_prev: Tensor) -> tuple[Tensor, ...]:
        y, eta, a = x, self.rate(t), self.alpha(t)
        for _, move in client.steps(self.steps):
            g, g_x, *g_prev = client.gradients(y, x, *x_prev)
            own = a * g_x + (1 - a) * g_prev[0] if g_prev else g_x
            y = move(y, self.decayed(y, eta) - eta * (g - own + m))
        return (y,)


@algorithms.register("mimelite-mvr", reference="Karimireddy et al. 2021", example={"lr": 0.2, "w": 8.0, "c": 100.0})
@dataclass(frozen=True)
class MimeLiteMvr(MimeMvr):
    """Mime-MVR in one exchange: the correction is at the previous model, and the statistics go up with the models.

        y <- y - eta (g(y; B) + (1 - a) (m - g(x_prev; B)))

    Choose it instead of Mime-MVR where a second exchange per round costs too much.

    Args:
        form: "A" alone: the others need a second exchange.
    """

    choices: ClassVar = {"form": ("A",), "statistics": ("batch", "full")}  # other forms need a second exchange
    variants: ClassVar[tuple[Any, ...]] = ({"statistics": "full"},)

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, x_prev, m, t = server
        y, fresh = cohort.average(self.local, x, t, m, x_prev)
        return self.Server(y, x, fresh + (1 - self.alpha(t)) * m, t + self.steps)

    @on_client(model_replies=(0,))
    def local(  # type: ignore[override]
        self, client: Client, x: Tensor, t: Tensor, m: Tensor, x_prev: Tensor
    ) -> tuple[Tensor, ...]:
        y, eta, a = x, self.rate(t), self.alpha(t)
        for _, move in client.steps(self.steps):
            g, g_prev = client.gradients(y, x_prev)
            y = move(y, self.decayed(y, eta) - eta * (g + (1 - a) * (m - g_prev)))
        return y, *self.first_pass(client, x, x_prev, t)
