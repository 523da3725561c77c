"""Adaptive matrices: the paper's rule V, from the averaged dual state of a round to the diagonal of H.

``mu = start(s0)``; each round ``H = diagonal(mu, n)`` after n updates, and ``mu = update(mu, s)`` with
s = z / eta, the round's sum of gradient estimates up to sign.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..checks import POSITIVE, check, number, one_of

__all__ = ["Diagonal", "Fixed", "Identity", "Preconditioner", "Scalar"]

FLOOR = 1e-12  # the smallest h, whatever eps is


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


def __dir__() -> list[str]:
    return sorted(__all__)
