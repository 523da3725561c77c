"""FedDA with control variates: FedDA (Li, Huang, Huang, arXiv 2302.06103) whose clients correct their gradients as
those of SCAFFOLD do (Karimireddy et al., ICML 2020). The combination is ours; neither paper has it."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core import Client, Cohort, on_client
from ..meanings import explained
from ..registry import algorithms
from ..rules.preconditioners import Diagonal
from .fedda import FedDA, Squares, StepMean, build, momentum_parts, mvr_parts


@explained
@dataclass(frozen=True)
class FedDACV(FedDA):
    """FedDA without drift: clients correct their gradients by the difference of a global and a local control variate.

        z <- z - eta_t nu;     X <- argmin_x -<x, z> + S psi(x) + |x - x_tau|_H^2 / (2 lambda)
        g = g_k(X; B) - c_k + c;     nu <- a g + (1 - a) nu,   or with MVR   nu <- g + (1 - a) (nu - g_old)
        c_k+ = the mean of the g_k(X; B) of the round;     c <- c + (r / K) mean_k (c_k+ - c_k)

    x, nu and H are then as in FedDA. Every client keeps its c_k, and c is the mean of all c_k, also of the clients that
    were away. g_old is corrected like g and taken on the same batch. At a solution c_k is the gradient of client k and
    nu that of the whole problem, so that no local step leads away from it: with exact gradients and a constant rate the
    method ends at the solution itself, also under a penalty or a constraint and with part of the clients per round.
    FedDA ends near it, the nearer the smaller the rate.

    Deviations: no paper has this method. With a constant rate, H = 1, a = 1 and no penalty it is SCAFFOLD (option 2),
    one step later. `v_input="gradients"` squares the gradients before they are corrected.

    Choose it where clients differ and return often, and where you need an adaptive rate, a penalty or a constraint. It
    costs FedDA's gradients, one vector more each way, and one vector that every client keeps. Where clients are alike,
    FedDA does the same for less. Where they seldom return, their control variates are old.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [3.0]], b=[[0.0], [4.0]])  # x = 3 is best, and 2.9 with the penalty
    >>> params = {"lr": 0.05, "eps": 0.5, "prox": fedda.prox.L1(0.2)}
    >>> [fedda.train(fedda.make(name, **params), problem, rounds=600).x for name in ("fedda-2-1", "fedda-cv")]
    [tensor([2.8818], dtype=torch.float64), tensor([2.9000], dtype=torch.float64)]
    """

    class Server(NamedTuple):
        x: Tensor  # the model
        nu: Tensor  # the gradient estimate
        mu: Tensor  # the second moment behind H
        c: Tensor  # the mean of all control variates
        t: Tensor  # the global step
        units: Tensor  # of the rate

    means_of_memory: ClassVar = {"c": "c"}

    @property
    def memory(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("c", *super().memory)

    def init(self, x: Tensor, clients: Cohort) -> Any:
        x, nu, mu, t, units = super().init(x, clients)
        return self.Server(x, nu, mu, torch.zeros_like(x), t, units)

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, nu, mu, c, t, units = server
        H = self.metric(server)
        z, nu, dc, *squares = cohort.average(self.local, x, nu, H, c, t)
        x, mu = self.server_step(server, H, z, nu, *squares)  # as in FedDA
        c = c + cohort.share * dc
        return self.Server(x, nu, mu, c, t + self.steps, units)

    @on_client
    def local(  # type: ignore[override]
        self, client: Client, x: Tensor, nu: Tensor, H: Tensor, c: Tensor, t: Tensor
    ) -> tuple[Tensor, ...]:
        own = client.memory["c"]
        squares = Squares(client)
        corrected = Corrected(squares if self.v_input == "gradients" else client, c - own)
        z, nu = super().local(corrected, x, nu, H, t)  # FedDA's steps, on corrected gradients
        new = corrected.mean(otherwise=own)
        client.memory["c"] = new
        q = (squares.mean(),) if self.v_input == "gradients" else ()
        return z, nu, new - own, *q


class Corrected(StepMean):
    """A client whose gradients are shifted by c - c_k. It averages its own gradients at the new points, unshifted."""

    def __init__(self, client: Client, shift: Tensor):
        super().__init__(client)
        self.shift = shift

    def gradients(self, *points: Tensor, active: Tensor | None = None) -> tuple[Tensor, ...]:
        gradients = super().gradients(*points, active=active)  # one batch; the new point is the first
        active = self.working(active)
        self.add(gradients[0], active)
        shifted = tuple(g + self.shift for g in gradients)
        return shifted if active is None else tuple(torch.where(active, g, 0.0) for g in shifted)

    def full_gradient(self, x: Tensor) -> Tensor:
        return super().full_gradient(x) + self.shift


@algorithms.register("fedda-cv", reference="this project", owner="FedDACV", example={"lr": 0.02, "eps": 0.5})
def fedda_cv(
    *, lr: Any = 0.001, momentum: Any = 0.9, alpha_mode: str = "history", steps: int = 5, scale: Any = 1.0,
    mu_scale: str = "sum", v_input: str = "z", prox: Any = None, beta: Any = 0.999, eps: Any = 0.01,
    mu0: str = "zero", beta_mode: str = "decay", h0: str = "from_mu", bias_correction: bool = False,
    eps_mode: str = "absolute", kappa: Any = 1.0, mu_update: str = "after",
    lr_mode: str = "absolute",
) -> FedDACV:  # fmt: skip
    """FedDA without drift: control variates, momentum estimator, diagonal H."""
    return build(FedDACV, momentum_parts, Diagonal, locals())


@algorithms.register(
    "fedda-cv-mvr", reference="this project", owner="FedDACV", example={"lr": 0.1, "w": 8.0, "eps": 0.5}
)
def fedda_cv_mvr(
    *, lr: Any = 0.02, w: Any = 1e4, c: Any = None, steps: int = 5, scale: Any = 1.0, mu_scale: str = "sum",
    v_input: str = "z", old_point: str = "server", prox: Any = None, beta: Any = 0.999, eps: Any = 0.01,
    mu0: str = "zero", beta_mode: str = "decay", h0: str = "from_mu", bias_correction: bool = False,
    eps_mode: str = "absolute", kappa: Any = 1.0, mu_update: str = "after",
    lr_mode: str = "absolute",
) -> FedDACV:  # fmt: skip
    """FedDA without drift: control variates, variance-reduced estimator, diagonal H."""
    return build(FedDACV, mvr_parts, Diagonal, locals())
