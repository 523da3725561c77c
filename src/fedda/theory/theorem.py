"""Theorem 1 and its corollary: the parameters, the conditions that the proof uses, and the value of the bound."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from .. import checks

ROUNDING = 2.0**-52


@dataclass(frozen=True)
class Theorem1:
    """The parameters that the theorem prescribes for smoothness L, H >= rho, prox scale lambda, K clients, I steps.

        kappa = rho K^(2/3) / (lambda L)            c = 96 lambda^2 L^2 / (K rho^2) + rho / (72 kappa^3 lambda L I^2)
        eta_t = kappa / (w_t + t + I)^(1/3)         w_t = max(48^3 I^6 K^2 - t - I, 14^3 K^(1/2))
        alpha_{t+1} = c eta_t^2

    It is a schedule: `fedda.make("fedda-mvr", lr=theorem, c=theorem.c)` runs what is analysed.

    >>> theorem = Theorem1(L=1.0, rho=1.0, K=10, I=5)
    >>> round(theorem.eta(0) * 48 * 5**2, 12), theorem.constant_until
    (1.0, 172799991317)
    """

    L: float
    rho: float
    K: int
    I: int
    lam: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("K", "I"):
                checks.count("Theorem1", field.name, value)
            else:
                checks.number("Theorem1", field.name, value, checks.POSITIVE)

    @property
    def kappa(self) -> float:
        return self.rho * self.K ** (2 / 3) / (self.lam * self.L)

    @property
    def c(self) -> float:
        first = 96 * self.lam**2 * self.L**2 / (self.K * self.rho**2)
        return first + self.rho / (72 * self.kappa**3 * self.lam * self.L * self.I**2)

    @property
    def plateau(self) -> int:
        """48^3 I^6 K^2, what w_t + t + I is until t grows past it."""
        return 48**3 * self.I**6 * self.K**2

    @property
    def floor(self) -> float:
        return 14**3 * math.sqrt(self.K)

    @property
    def constant_until(self) -> int:
        """The last step with the first step size: the experiments of the paper have 20,000."""
        return max(0, self.plateau - self.I - math.ceil(self.floor))

    def w(self, t: Any) -> Any:
        if isinstance(t, Tensor):
            return (self.plateau - t - self.I).clamp(min=self.floor)
        return max(self.plateau - t - self.I, self.floor)

    def eta(self, t: Any) -> Any:
        return self.kappa / (self.w(t) + t + self.I) ** (1 / 3)

    __call__ = eta  # a schedule is a function of t

    def alpha(self, t: Any) -> Any:
        """The weight of the new gradient in the estimate after step t."""
        return self.c * self.eta(t) ** 2

    @property
    def largest_rate(self) -> float:
        """What eta may be at most: rho / (48 lambda L I^2)."""
        return self.rho / (48 * self.lam * self.L * self.I**2)

    def conditions(self, t: int, rate: Any = None, c: float | None = None) -> dict[str, float]:
        """What the proof asks for at step t >= 1, each as a slack that must not be negative (relative where it can be);
        for the theorem's own schedule, or for another `rate` (a function of t) and `c`."""
        eta, c = rate or self.eta, self.c if c is None else c
        now, before = float(eta(t)), float(eta(t - 1))
        first = 96 * self.lam**2 * self.L**2 / (self.K * self.rho**2)
        second = self.rho / (72 * self.kappa**3 * self.lam * self.L * self.I**2)
        growth = 1 / now - 1 / before
        if abs(growth) <= 8 * ROUNDING / now:  # of two numbers that are equal to the last digits nothing is left
            growth = 0.0
        found = {
            "eta <= rho / (48 lambda L I^2)": 1 - now / self.largest_rate,
            "alpha < 1": 1 - c * now**2,
            "c <= 192 lambda^2 L^2 / (K rho^2)": 1 - c / (2 * first),
            "eta does not grow": 1 - now / before,
            "eta at most halves in a round": 2 - eta(max(0, t - self.I + 1)) / now,
            "1 / eta grows by at most (c - 96 lambda^2 L^2 / (K rho^2)) eta": (c - first - growth / now) / second,
        }
        if rate is None:
            found |= {"w >= 2": self.w(t) - 2, "w does not grow": 1 - self.w(t) / self.w(t - 1)}
        return {name: 0.0 if abs(slack) <= 8 * ROUNDING else float(slack) for name, slack in found.items()}

    def bound(self, T: int, gap: float, sigma: float, zeta: float, b: float = 1, b1: float = 1) -> float:
        """The right side of Theorem 1, for the mean of G_t over T steps: `gap` = f(x_0) - f*, the first batch of
        size b, later ones of size b1.

        >>> round(Theorem1(L=1.0, rho=1.0, K=4, I=1).bound(10**4, gap=0.0, sigma=1.0, zeta=0.0))
        480
        """
        return sum(self.terms(T, gap, sigma, zeta, b, b1).values())

    def terms(self, T: int, gap: float, sigma: float, zeta: float, b: float = 1, b1: float = 1) -> dict[str, float]:
        """The three terms of the bound: of the start, of the first estimate, of noise and heterogeneity."""
        I, slow = self.I, 1 / (self.K * T) ** (2 / 3)
        noise = (sigma**2 / (4 * b1) + 2 * zeta**2 / 21) * math.log(T + 1)
        return {
            "start": (96 * self.L * I**2 / T + 2 * self.L * slow) * gap,
            "first estimate": (72 * I**4 / (b * T) + 3 * I**2 / (2 * b) * slow) * sigma**2,
            "noise and heterogeneity": 192**2 * (48 * I**2 / T + slow) * noise,
        }

    def before(self, T: int, gap: float, sigma: float, zeta: float, b: float = 1, b1: float = 1) -> float:
        """The line of the proof before its constants are put in (`Grad_Norm_Sum1` times (rho / lambda)^2), which is at
        most `bound`."""
        ratio, eta = self.rho / self.lam, self.eta(T)
        start = 2 * gap / ratio + sigma**2 / (32 * b * self.L**2 * self.eta(0))
        noise = self.c**2 / self.L**2 * (sigma**2 / (4 * b1) + 2 * zeta**2 / 21)
        return ratio**2 * (start + self.kappa**3 * noise * math.log(T + 1)) / (eta * T)


def local_steps(T: float, K: int) -> float:
    """I = (T / K^2)^(1/6), the corollary's number of local steps (a rate: round it as you like).

    >>> local_steps(20_000, 10)  # the paper's experiments: 5 were taken
    2.418271175121957
    """
    return float((T / K**2) ** (1 / 6))


def rounds_of(T: float, K: int) -> float:
    """E = T / I = K^(1/3) T^(5/6), the rounds of the corollary where there are local steps at all."""
    return T / local_steps(T, K)


def steps_to(eps: float, K: int, gap: float = 1.0, sigma: float = 1.0, zeta: float = 1.0, L: float = 1.0) -> float:
    """The T at which the bound, with the corollary's I and a first batch of I^2, has fallen to eps."""

    def bound(T: float) -> float:
        I, slow = max(1.0, local_steps(T, K)), 1 / (K * T) ** (2 / 3)
        shared = 48 * I**2 / T + slow
        return (
            2 * L * shared * gap
            + shared * 1.5 * sigma**2
            + 192**2 * shared * (sigma**2 / 4 + 2 * zeta**2 / 21) * math.log(T + 1)
        )

    low, high = 1.0, 2.0
    while bound(high) > eps:
        low, high = high, 2 * high
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if bound(middle) > eps else (low, middle)
    return high
