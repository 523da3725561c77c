"""FedDA (Li, Huang, Huang: FedDA: Faster Framework of Local Adaptive Gradient Methods via Restarted Dual Averaging,
arXiv 2302.06103). Line numbers are those of the paper's Algorithms 1 (server) and 2 (client)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..checks import one_of
from ..core import Algorithm, Client, ClientWrapper, Cohort, on_client, positive, step_counter
from ..meanings import explained
from ..registry import algorithms
from ..rules.estimators import Estimator, Momentum, Mvr
from ..rules.preconditioners import AbsoluteUnits, Diagonal, ParameterUnits, Preconditioner, Scalar, Units
from ..rules.prox import L1, Box, L1Ball, NonNegative, Prox, feasible_start, prox
from ..rules.schedules import Schedule, cube_root, schedule
from .old_point import CHOICES, MEMORY, keep_point, own_point

PAPER = "Li, Huang, Huang 2023"
COSINE = {"kind": "cosine", "start": 0.3, "warmup": 0.05}  # a table, as in TOML


@explained
@dataclass(frozen=True)
class FedDA(Algorithm):
    """Restarted dual averaging: clients accumulate gradient estimates in the dual space of a shared metric H.

        z <- z - eta_t nu;    X <- argmin_x -<x, z> + S psi(x) + |x - x_tau|_H^2 / (2 lambda);    nu <- U(nu, X; B)

    from z = 0, X = x_tau. The server then maps the mean of z with the SAME H, averages nu, and updates H from z. S is
    the sum of the etas in z. `mu_scale="mean"` divides z by S instead of the last eta. `v_input="nu"` builds H from the
    last estimate; with `mu_update="before"` the H of the first round holds the first estimate already, as in the
    authors' SuperAdam. The variance-reduced variants also take `old_point="own"`: the first old gradient of a round is
    then taken at the client's own last point, as in STEM, and not at x_tau, as in Algorithm 2. `averaging="primal"` is
    an ablation of the paper's remark that the server must average z: it averages X (`FedDAPrimal`).

    Beyond the paper: `eps_mode="relative"` replaces epsilon by kappa times the mean of H's other part, so that no
    number has to be tuned to the size of a model's gradients. It implies `mu_scale="mean"`, `mu0="zero"` and bias
    correction, and ignores `eps`. Its first round measures H at x_0, and no client moves. `lr_mode="relative"` divides
    H by the size that each parameter (a matrix of weights, a bias) has at the start, so that one rate fits layers and
    models of different widths: the size is the root of the mean of its squares, but at least 0.01, and 1 if the whole
    model starts at zero. `v_input="gradients"` builds H from the squares of the clients' mini-batch gradients, averaged
    over steps and clients: one vector more goes up.

    Deviations: where the paper is ambiguous (beta, alpha, mu_0, the L1 weight) see docs/deviations.md.

    Choose it for adaptive local steps, for penalties and constraints, or for both. The momentum variants (2-1, 2-2)
    cost one gradient per step, the variance-reduced ones (1-1, 1-2) two. A diagonal H (1-1, 2-1) sends one vector more
    down than a scalar one; with `lr_mode="relative"` a scalar H is sent as a vector too.

    Args:
        lr: the clients' rate as a schedule, eta_t.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> box = fedda.prox.Box(-0.5, 0.5)
    >>> fedda.train(fedda.make("fedda-mvr", lr=0.5, w=8.0, eps=1.0, prox=box), problem, rounds=30).x
    tensor([0.5000], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor  # the model
        nu: Tensor  # the gradient estimate
        mu: Tensor  # the second moment behind H
        t: Tensor  # the global step
        units: Tensor  # of the rate

    choices: ClassVar = {"mu_scale": ("sum", "mean"), "v_input": ("z", "nu", "gradients"), "old_point": CHOICES}
    variants: ClassVar = (
        {"averaging": "primal", "prox": L1(0.05)},
        {"old_point": "own", "prox": Box(-0.2, 0.3)},
        {"eps_mode": "relative", "kappa": 0.5, "averaging": "primal"},
        {"lr_mode": "relative", "prox": L1(0.05)},
        {"eps_mode": "relative", "v_input": "gradients", "prox": L1Ball(1.0)},
        {"v_input": "gradients", "averaging": "primal", "prox": L1(0.05)},
        {"v_input": "nu", "mu0": "nu0", "mu_update": "before", "bias_correction": True, "prox": L1(0.05)},
        {"v_input": "nu", "mu_scale": "mean", "mu0": "zero", "bias_correction": True, "h0": "one"},
        {"beta_mode": "weight", "alpha_mode": "weight", "prox": NonNegative()},
    )
    lr: Schedule
    estimator: Estimator
    preconditioner: Preconditioner
    steps: int = 5
    scale: Any = 1.0
    prox: Prox = field(default_factory=Prox)
    mu_scale: str = "sum"
    v_input: str = "z"
    old_point: str = "server"
    units: Units = field(default_factory=AbsoluteUnits)

    @property
    def memory(self) -> tuple[str, ...]:  # type: ignore[override]
        return MEMORY if self.old_point == "own" else ()

    def init(self, x: Tensor, clients: Cohort) -> Any:
        if isinstance(self.estimator, Mvr):
            self.estimator.warn(self.lr(step_counter(x)))
        x = feasible_start("FedDA", self.prox, x)
        (nu,) = clients.average(self.first, x)
        mu = self.preconditioner.start(self.gain * nu)
        return FedDA.Server(x, nu, mu, step_counter(x), self.units.start(x))

    @on_client
    def first(self, client: Client, x: Tensor) -> tuple[Tensor, ...]:
        return client.gradients(x)

    def round(self, server: Any, cohort: Cohort) -> Any:  # Algorithm 1
        H = self.metric(server)
        z, nu, *squares = self.averages(server, H, cohort)  # lines 5-8, 10
        x, mu = self.server_step(server, H, z, nu, *squares)  # lines 9, 11
        return FedDA.Server(x, nu, mu, server.t + self.steps, server.units)

    def averages(self, server: Any, H: Tensor, cohort: Cohort) -> tuple[Tensor, ...]:
        """The means of the clients' z and nu, and of their squared gradients if H is built from those."""
        down = server.x, server.nu, H, server.t
        if self.v_input != "gradients":
            return cohort.average(self.local, *down)
        squares, *means = cohort.average(self.local_and_squares, *down)
        return *means, squares

    def server_step(self, server: Any, H: Tensor, z: Tensor, nu: Tensor, squares: Any = None) -> tuple[Tensor, Tensor]:
        """The new x and mu, from the means of the clients' z and nu (and of their squared gradients)."""
        etas = [self.lr(server.t + i) for i in range(self.steps)]
        x = self.next_point(z, server.x, H, sum(etas), server.t)  # line 9, with the OLD H
        if self.v_input == "z":
            s = z / (etas[-1] if self.mu_scale == "sum" else sum(etas))
        else:
            s = self.gain * (nu if self.v_input == "nu" else squares.sqrt())
        return x, self.preconditioner.update(server.mu, s)  # line 11

    def metric(self, server: Any) -> Tensor:
        """The diagonal of H in this round."""
        h = self.preconditioner.diagonal(server.mu, server.t / self.steps)
        H: Tensor = h / self.units.spread(server.units)
        return H

    @on_client
    def local(self, client: Client, x0: Tensor, nu: Tensor, H: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        return self.local_steps(client, x0, nu, H, t)[:2]  # line 8

    def local_steps(
        self, client: Client, x0: Tensor, nu: Tensor, H: Tensor, t: Tensor
    ) -> tuple[Tensor, ...]:  # Algorithm 2
        """The last z, nu and x of the client."""
        z, total = torch.zeros_like(x0), 0.0  # line 2
        x_prev = own_point(client, x0, t) if self.old_point == "own" else x0
        for i, move in client.steps(self.steps):  # line 3
            eta = self.lr(t + i)
            z, total = move(z, z - eta * nu), move(total, total + eta)  # line 4
            x = self.next_point(z, x0, H, total, t)  # line 5
            nu = move(nu, self.estimator(nu, x, x_prev, eta, client))  # line 6
            x_prev = x
        if self.old_point == "own":
            keep_point(client, x, t + self.steps)
        return z, nu, x

    @on_client
    def local_and_squares(self, client: Client, *down: Tensor) -> tuple[Tensor, ...]:
        squares = Squares(client)
        replies = self.local(squares, *down)
        return squares.mean(), *replies

    @property
    def gain(self) -> int:
        """How much larger s = z / eta is than one gradient estimate: the length of the sum in z, or 1."""
        return self.steps if self.mu_scale == "sum" else 1

    def accepts(self, server: Any) -> bool:
        return self.units.accepts(server.units)

    def first_rate(self, server: Any) -> Tensor | None:
        if self.preconditioner.measures_first:
            return None  # H is not known yet
        rate: Tensor = self.scale * self.lr(server.t) / self.metric(server).amin(-1, True)
        return rate

    def mapping(self, server: Any, gradient: Tensor) -> Tensor:
        S = sum(self.lr(server.t + i) for i in range(self.steps))
        moved = self.primal(-S * gradient, server.x, self.metric(server), S)
        mapping: Tensor = (server.x - moved).double().norm(dim=-1, keepdim=True) / S
        return mapping

    def monitor(self, server: Any) -> dict[str, Tensor]:
        H = self.metric(server)
        return {"h_min": H.amin(-1, True), "h_max": H.amax(-1, True)}

    def primal(self, z: Tensor, x0: Tensor, H: Tensor, total: Any) -> Tensor:
        """The primal point of z: the argmin above, as PROX in the metric H / lambda. Weight decay is one more penalty,
        (weight_decay / 2) |x|_H^2 / lambda, so that it does not depend on the metric."""
        if not positive(self.weight_decay):
            return self.prox(x0 + self.scale * z / H, H / self.scale, total)
        shrink = 1 + total * self.weight_decay
        return self.prox((x0 + self.scale * z / H) / shrink, shrink * H / self.scale, total)

    def next_point(self, z: Tensor, x0: Tensor, H: Tensor, total: Any, t: Tensor) -> Tensor:
        """The primal point of z; x0 in a first round that only measures H (`eps_mode="relative"`)."""
        x = self.primal(z, x0, H, total)
        return torch.where(t == 0, x0, x) if self.preconditioner.measures_first else x


@explained
@dataclass(frozen=True)
class FedDAPrimal(FedDA):
    """FedDA whose server averages the clients' last points X instead of z: an ablation. One vector more goes up."""

    def round(self, server: Any, cohort: Cohort) -> Any:
        H = self.metric(server)
        z, nu, x, *squares = self.averages(server, H, cohort)
        _, mu = self.server_step(server, H, z, nu, *squares)
        return FedDA.Server(x, nu, mu, server.t + self.steps, server.units)

    @on_client(model_replies=(2,))
    def local(self, client: Client, x0: Tensor, nu: Tensor, H: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        return self.local_steps(client, x0, nu, H, t)

    @on_client(model_replies=(3,))
    def local_and_squares(self, client: Client, *down: Tensor) -> tuple[Tensor, ...]:
        return super().local_and_squares(client, *down)

    @classmethod
    def of(cls, algorithm: FedDA) -> FedDAPrimal:
        """The same FedDA with the other average."""
        return cls(**{field.name: getattr(algorithm, field.name) for field in fields(FedDA)})


class StepMean(ClientWrapper):
    """A client that averages a vector over the steps in which it is active."""

    def __init__(self, client: Client):
        super().__init__(client)
        self.total, self.taken = 0.0, 0  # type: Any, Any

    def add(self, value: Tensor, active: Tensor | None) -> None:
        self.total = self.total + (value if active is None else torch.where(active, value, 0.0))
        self.taken = self.taken + (1 if active is None else active.to(value.dtype))

    def mean(self, otherwise: Any = 0.0) -> Tensor:
        """The mean over the steps taken; `otherwise` for a client that took none."""
        if not isinstance(self.taken, Tensor):
            mean: Tensor = self.total / self.taken
            return mean
        return torch.where(self.taken > 0, self.total / self.taken.clamp(min=1), otherwise)


class Squares(StepMean):
    """A client that averages the squares of its mini-batch gradients at the new points."""

    def gradients(self, *points: Tensor, active: Tensor | None = None) -> tuple[Tensor, ...]:
        gradients = super().gradients(*points, active=active)  # the new point is the first
        self.add(gradients[0] ** 2, self.working(active))
        return gradients


def mvr_parts(params: dict[str, Any]) -> tuple[Schedule, Estimator]:
    """The rate and the estimator of the variance-reduced variants; c = None is 0.5 / eta_0^2."""
    rate = cube_root(params.pop("lr"), params.pop("w"))
    return rate, Mvr.default(params.pop("c"), rate)


def momentum_parts(params: dict[str, Any]) -> tuple[Schedule, Estimator]:
    """The rate and the estimator of the momentum variants, which take no old gradient."""
    return schedule(params.pop("lr")), Momentum(params.pop("momentum"), params.pop("alpha_mode"))


F = TypeVar("F", bound=FedDA)
Parts = Callable[[dict[str, Any]], tuple[Schedule, Estimator]]


def build(cls: type[F], parts: Parts, matrix: type[Diagonal], params: dict[str, Any]) -> F:
    """FedDA from flat hyper-parameters: those of the rate and the estimator, those of the matrix, and the rest."""
    params = dict(params)
    if params["eps_mode"] == "relative":
        params |= {"mu0": "zero", "bias_correction": True, "mu_scale": "mean"}
    if params["mu_update"] == "before" and params["v_input"] != "nu":
        raise ValueError(f"FedDA: v_input must be 'nu' with mu_update='before', got {params['v_input']!r}")
    one_of("FedDA", "lr_mode", lr_mode := params.pop("lr_mode"), ("absolute", "relative"))
    units = ParameterUnits() if lr_mode == "relative" else AbsoluteUnits()
    H = matrix(**{field.name: params.pop(field.name) for field in fields(Diagonal)})
    rate, estimator = parts(params)
    return cls(rate, estimator, H, units=units, **params | {"prox": prox(params["prox"])})


def build_variant(parts: Parts, matrix: type[Diagonal], params: dict[str, Any]) -> FedDA:
    """One of the paper's four variants, or its ablation."""
    averaging = params.pop("averaging")
    one_of("FedDA", "averaging", averaging, ("dual", "primal"))
    return build(FedDA if averaging == "dual" else FedDAPrimal, parts, matrix, params)


# The defaults are the paper's values for CIFAR-10.
@algorithms.register(
    "fedda-mvr", "fedda-1-1", reference=PAPER, owner="FedDA", example={"lr": 0.1, "w": 8.0, "eps": 0.5}
)
def fedda_mvr(
    *, lr: Any = 0.02, w: Any = 1e4, c: Any = None, steps: int = 5, scale: Any = 1.0, mu_scale: str = "sum",
    v_input: str = "z", averaging: str = "dual", old_point: str = "server", prox: Any = None, beta: Any = 0.999,
    eps: Any = 0.01, mu0: str = "zero", beta_mode: str = "decay", h0: str = "from_mu",
    bias_correction: bool = False, eps_mode: str = "absolute", kappa: Any = 1.0, mu_update: str = "after",
    lr_mode: str = "absolute",
) -> FedDA:  # fmt: skip
    """FedDA, variance-reduced estimator, diagonal H."""
    return build_variant(mvr_parts, Diagonal, locals())


@algorithms.register("fedda-1-2", reference=PAPER, owner="FedDA", example={"lr": 0.5, "w": 8.0, "eps": 0.5})
def fedda_1_2(
    *, lr: Any = 1.0, w: Any = 5e3, c: Any = None, steps: int = 5, scale: Any = 1.0, mu_scale: str = "sum",
    v_input: str = "z", averaging: str = "dual", old_point: str = "server", prox: Any = None, beta: Any = 0.999,
    eps: Any = 0.01, mu0: str = "nu0", beta_mode: str = "decay", h0: str = "from_mu", bias_correction: bool = False,
    eps_mode: str = "absolute", kappa: Any = 1.0, mu_update: str = "after",
    lr_mode: str = "absolute",
) -> FedDA:  # fmt: skip
    """FedDA, variance-reduced estimator, scalar H."""
    return build_variant(mvr_parts, Scalar, locals())


@algorithms.register("fedda-2-1", reference=PAPER, owner="FedDA", example={"lr": 0.02, "eps": 0.5})
def fedda_2_1(
    *, lr: Any = 0.001, momentum: Any = 0.9, alpha_mode: str = "history", steps: int = 5, scale: Any = 1.0,
    mu_scale: str = "sum", v_input: str = "z", averaging: str = "dual", prox: Any = None, beta: Any = 0.999,
    eps: Any = 0.01, mu0: str = "zero", beta_mode: str = "decay", h0: str = "from_mu",
    bias_correction: bool = False, eps_mode: str = "absolute", kappa: Any = 1.0, mu_update: str = "after",
    lr_mode: str = "absolute",
) -> FedDA:  # fmt: skip
    """FedDA, momentum estimator, diagonal H."""
    return build_variant(momentum_parts, Diagonal, locals())


@algorithms.register("fedda-2-2", reference=PAPER, owner="FedDA", example={"lr": 0.1, "eps": 0.5})
def fedda_2_2(
    *, lr: Any = 0.01, momentum: Any = 0.9, alpha_mode: str = "history", steps: int = 5, scale: Any = 1.0,
    mu_scale: str = "sum", v_input: str = "z", averaging: str = "dual", prox: Any = None, beta: Any = 0.999,
    eps: Any = 0.01, mu0: str = "nu0", beta_mode: str = "decay", h0: str = "from_mu", bias_correction: bool = False,
    eps_mode: str = "absolute", kappa: Any = 1.0, mu_update: str = "after",
    lr_mode: str = "absolute",
) -> FedDA:  # fmt: skip
    """FedDA, momentum estimator, scalar H."""
    return build_variant(momentum_parts, Scalar, locals())


@algorithms.register("fedda", reference="this project", owner="FedDA", example={"lr": 0.3})
def fedda(
    *, lr: Any = COSINE, momentum: Any = 0.9, steps: int = 5, prox: Any = None, beta: Any = 0.99, kappa: Any = 0.3
) -> FedDA:
    """FedDA with defaults that fit many models: begin with it if you do not want to tune.

    It is FedDA-2-1 with `eps_mode="relative"`, `lr_mode="relative"` and `v_input="gradients"`: nothing in it depends on
    the size of the gradients. A rate of 0.3 means that a local step changes a weight by about a third of the size that
    its layer has at the start, at most, and usually by much less, because H also holds the noise of the gradients. (A
    weight that only few clients use can change more.) The rate rises for a twentieth of the run and then falls to 0 as
    half a cosine; a number is a constant rate.

    If you tune a single value, tune the start of the rate, from 0.1 to 1: `lr=fedda.schedules.cosine(0.1, warmup=0.05)`
    in Python, `--grid "fedda.lr=x0.3,x1,x3"` in a sweep.

    >>> import fedda
    >>> problem = fedda.load("digits", clients=10, partition="dominant_class", rho=0.8, model="mlp", batch=16)
    >>> result = fedda.train(fedda.make("fedda"), problem, rounds=60)
    >>> result.history[-1]["test_accuracy"] > 0.9
    True
    """
    return fedda_2_1(
        lr=lr, momentum=momentum, steps=steps, prox=prox, beta=beta, kappa=kappa,
        eps_mode="relative", lr_mode="relative", v_input="gradients",
    )  # fmt: skip
