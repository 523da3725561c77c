"""Adaptive matrices: the paper's rule V, from the averaged dual state of a round to the diagonal of H.

``mu = start(s0)``; each round ``H = diagonal(mu, n)`` after n updates, and ``mu = update(mu, s)`` with
s = z / eta, the round's sum of gradient estimates up to sign.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..checks import POSITIVE, check, number, one_of
from .prox.layout import Layout

__all__ = ["AbsoluteUnits", "Diagonal", "Fixed", "Identity", "ParameterUnits", "Preconditioner", "Scalar", "Units"]

FLOOR = 1e-12  # the smallest h, whatever eps is
SMALLEST_SIZE = 0.01  # the size of a parameter that is smaller, such as a bias that starts at zero


class Preconditioner(Protocol):
    """What FedDA asks of a matrix: mu is its state, h the diagonal of H."""

    @property
    def measures_first(self) -> bool:
        """Whether the first round only measures H, and no client moves."""

    def start(self, s0: Tensor) -> Tensor:
        """The first mu.

        Args:
            s0: the first gradient estimate, as long as the s of a round.
        """

    def diagonal(self, mu: Tensor, n: Tensor) -> Tensor:
        """h.

        Args:
            mu: the state.
            n: how often it was updated.
        """

    def update(self, mu: Tensor, s: Tensor) -> Tensor:
        """The next mu.

        Args:
            mu: the state.
            s: the sum of the gradient estimates of the round, up to sign.
        """


@dataclass(frozen=True)
class Fixed(Preconditioner):
    """H = Diag(h) for the whole run.

    Args:
        h: a number, or one for each coordinate.
    """

    measures_first: ClassVar[bool] = False
    h: Any = 1.0

    def __post_init__(self) -> None:
        number(type(self).__name__, "h", self.h, POSITIVE)

    def start(self, s0: Tensor) -> Tensor:
        return torch.zeros_like(s0[..., :1])

    def diagonal(self, mu: Tensor, n: Tensor) -> Tensor:
        h: Tensor = self.h + mu
        return h

    def update(self, mu: Tensor, s: Tensor) -> Tensor:
        return mu


@dataclass(frozen=True)
class Identity(Fixed):
    """H = I.

    Args:
        h: 1; any other number is a scaled identity.
    """


@dataclass(frozen=True)
class Diagonal(Preconditioner):
    """mu = beta mu + (1 - beta) s^2, h = sqrt(mu) + eps (equation mu-case1).

    With ``eps_mode="relative"``, h has the size of the gradients, whatever the model, and only their ratios matter. H
    is unknown before the first update, so the first round measures it and no client moves.

    Args:
        beta: the decay of mu: nearer to 1 remembers longer.
        eps: added to the root of mu: it limits the step where gradients are small.
        mu0: the start of mu: "zero" as in the paper, or "nu0" for the first estimate.
        beta_mode: "decay", or "weight": `beta` is then the weight of the new term, as the equation prints it.
        h0: "from_mu", or "one": the H of the first round is the identity.
        bias_correction: divide mu by 1 - beta^n, as Adam does.
        eps_mode: "absolute" adds `eps`; "relative" adds kappa mean_j sqrt(mu_j) and needs bias correction.
        kappa: the factor of `eps_mode="relative"`.
        mu_update: "after" a round, or "before" the first step: mu then holds the first estimate already.

    >>> matrix = Diagonal(beta=0.5, eps_mode="relative", bias_correction=True)
    >>> mu = matrix.update(torch.zeros(1, 2), torch.tensor([[3.0, 1.0]]))
    >>> matrix.diagonal(mu, torch.tensor(1.0))
    tensor([[5., 3.]])
    """

    beta: float = 0.999
    eps: float = 0.01
    mu0: str = "zero"
    beta_mode: str = "decay"
    h0: str = "from_mu"
    bias_correction: bool = False
    eps_mode: str = "absolute"
    kappa: float = 1.0
    mu_update: str = "after"

    def __post_init__(self) -> None:
        name = type(self).__name__
        check(name, beta=self.beta, eps=self.eps, kappa=self.kappa)
        one_of(name, "mu0", self.mu0, ("zero", "nu0"))
        one_of(name, "beta_mode", self.beta_mode, ("decay", "weight"))
        one_of(name, "h0", self.h0, ("from_mu", "one"))
        one_of(name, "eps_mode", self.eps_mode, ("absolute", "relative"))
        if self.measures_first and not self.bias_correction:
            raise ValueError(f"{name}: bias_correction must be True with eps_mode='relative', got False")
        one_of(name, "mu_update", self.mu_update, ("after", "before"))
        before = self.mu_update == "before"
        if self.bias_correction and self.mu0 == "nu0" and not before:
            raise ValueError(f"{name}: bias_correction must be False with mu0='nu0', which has no bias, got True")
        if before and self.measures_first:
            raise ValueError(f"{name}: mu_update must be 'after' with eps_mode='relative', got 'before'")

    @property
    def measures_first(self) -> bool:
        return self.eps_mode == "relative"

    def moment(self, s: Tensor) -> Tensor:
        """What mu is the mean of.

        Args:
            s: the sum of the gradient estimates of a round.
        """
        return s**2

    def root(self, mu: Tensor) -> Tensor:
        """The part of h that adapts.

        Args:
            mu: the state, after bias correction.
        """
        return mu.sqrt()

    def start(self, s0: Tensor) -> Tensor:
        moment = self.moment(s0)
        mu = moment if self.mu0 == "nu0" else torch.zeros_like(moment)
        return self.update(mu, s0) if self.mu_update == "before" else mu

    def diagonal(self, mu: Tensor, n: Tensor) -> Tensor:
        if self.bias_correction:
            updates = n + 1 if self.mu_update == "before" else n
            mu = mu / torch.where(updates > 0, 1 - self.decay**updates, 1.0).to(mu.dtype)
        root = self.root(mu)
        eps = self.kappa * root.mean(-1, keepdim=True) if self.measures_first else self.eps
        h = (root + eps).clamp(min=FLOOR)
        return torch.where(n == 0, torch.ones_like(h), h) if self.measures_first or self.h0 == "one" else h

    def update(self, mu: Tensor, s: Tensor) -> Tensor:
        return self.decay * mu + (1 - self.decay) * self.moment(s)

    @property
    def decay(self) -> float:
        return self.beta if self.beta_mode == "decay" else 1 - self.beta


@dataclass(frozen=True)
class Scalar(Diagonal):
    """mu = beta mu + (1 - beta) ||s||,  h = mu + eps, one number for all coordinates  (equation mu-case2).

    The norm itself, not its square, and no root. Started at zero, the tuned rate of FedDA-1-2 diverges in the
    first round, hence ``mu0="nu0"``.

    Args:
        beta: the decay of mu: nearer to 1 remembers longer.
        eps: added to mu: it limits the step where gradients are small.
        mu0: the start of mu: "nu0" for the first estimate, or "zero" as in the paper.
        beta_mode: "decay", or "weight": `beta` is then the weight of the new term, as the equation prints it.
        h0: "from_mu", or "one": the H of the first round is the identity.
        bias_correction: divide mu by 1 - beta^n, as Adam does.
        eps_mode: "absolute" adds `eps`; "relative" adds kappa mu and needs bias correction.
        kappa: the factor of `eps_mode="relative"`.
        mu_update: "after" a round, or "before" the first step: mu then holds the first estimate already.
    """

    mu0: str = "nu0"

    def moment(self, s: Tensor) -> Tensor:
        norm: Tensor = s.double().norm(dim=-1, keepdim=True)
        return norm.to(s.dtype)

    def root(self, mu: Tensor) -> Tensor:
        return mu


class Units(Protocol):
    """What FedDA asks of the units of its rate: h is divided by them."""

    def start(self, x: Tensor) -> Tensor:
        """The units, which the server keeps for the whole run.

        Args:
            x: the first model, [..., 1, d].
        """

    def spread(self, units: Tensor) -> Any:
        """The unit of every coordinate, [..., 1, d], or 1.

        Args:
            units: what `start` gave.
        """

    def accepts(self, units: Tensor) -> bool:
        """Whether `start` can have given these.

        Args:
            units: those of a state.
        """


@dataclass(frozen=True)
class AbsoluteUnits(Units):
    """The rate is in the units of the model's numbers. The server keeps a 0 for them."""

    def start(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x[..., :1])

    def spread(self, units: Tensor) -> float:
        return 1.0

    def accepts(self, units: Tensor) -> bool:
        return not units.any()


@dataclass(frozen=True)
class ParameterUnits(Units):
    """The rate is in units of the size that each parameter (a matrix of weights, a bias) has at the start: the root of
    the mean of its squares, but at least 0.01. Layers of different widths then move by the same share of their size.
    If the whole model starts at zero, the units are 1.

    Args:
        lengths: how many numbers each parameter has; a run fills it in. Without it, the model is one parameter.

    >>> units = ParameterUnits((2, 1))
    >>> units.spread(units.start(torch.tensor([[3.0, 4.0, 0.0]])))
    tensor([[3.5355, 3.5355, 0.0100]])
    """

    lengths: tuple[int, ...] = ()

    def bind(self, layout: Layout) -> "ParameterUnits":
        """The same units for the parameters of a model.

        Args:
            layout: names and shapes, in the order of the flat vector.
        """
        return replace(self, lengths=tuple(math.prod(shape) for _, shape in layout))

    def start(self, x: Tensor) -> Tensor:
        lengths = self.lengths or (x.shape[-1],)
        squares = torch.cat([(part.double() ** 2).sum(-1, keepdim=True) for part in x.split(lengths, -1)], -1)
        count = torch.tensor(lengths, dtype=torch.float64, device=x.device).clamp(min=1)
        sizes = (squares / count).sqrt().clamp(min=SMALLEST_SIZE)
        return torch.where(squares.sum(-1, keepdim=True) > 0, sizes, 1.0).to(x.dtype)

    def spread(self, units: Tensor) -> Tensor:
        if not self.lengths:
            return units
        parts = zip(units.split(1, -1), self.lengths, strict=True)
        return torch.cat([unit.expand(*unit.shape[:-1], n) for unit, n in parts], -1)

    def accepts(self, units: Tensor) -> bool:
        return units.shape[-1] == max(1, len(self.lengths)) and bool((units > 0).all())


def __dir__() -> list[str]:
    return sorted(__all__)
