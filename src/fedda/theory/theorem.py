"""Theorem 1 and its corollary: the parameters, the conditions of the proof, the bound; and a schedule of its form
with constants that can be run."""

import math
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from .. import checks
from ..algorithms.fedda import FedDA
from ..rules.estimators import Estimator, Mvr
from ..rules.preconditioners import Identity
from ..rules.schedules import CubeRoot

ROUNDING = 2.0**-52


@dataclass(frozen=True)
class Theorem1:
    """The parameters that the theorem prescribes for smoothness L, H >= rho, prox scale lambda, K clients, I steps.

        kappa = rho K^(2/3) / (lambda L)            c = 96 lambda^2 L^2 / (K rho^2) + rho / (72 kappa^3 lambda L I^2)
        eta_t = kappa / (w_t + t + I)^(1/3)         w_t = max(48^3 I^6 K^2 - t - I, 14^3 K^(1/2))
        alpha_{t+1} = c eta_t^2

    It is a schedule: `fedda.make("fedda-mvr", lr=theorem, c=theorem.c)` runs the analysed algorithm.

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
        """48^3 I^6 K^2: the value of w_t + t + I until t exceeds it."""
        return 48**3 * self.I**6 * self.K**2

    @property
    def floor(self) -> float:
        return 14**3 * math.sqrt(self.K)

    @property
    def constant_until(self) -> int:
        """The last step with the first step size. The paper's experiments have 20,000 steps."""
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
        """The largest eta that the proof allows: rho / (48 lambda L I^2)."""
        return self.rho / (48 * self.lam * self.L * self.I**2)

    def conditions(self, t: int, rate: Any = None, c: float | None = None) -> dict[str, float]:
        """The conditions of the proof at step t >= 1, as slacks that must not be negative (relative if possible). The
        default is the theorem's own schedule; `rate` (a function of t) and `c` give another."""
        eta, c = rate or self.eta, self.c if c is None else c
        now, before = float(eta(t)), float(eta(t - 1))
        first = 96 * self.lam**2 * self.L**2 / (self.K * self.rho**2)
        second = self.rho / (72 * self.kappa**3 * self.lam * self.L * self.I**2)
        growth = 1 / now - 1 / before
        if abs(growth) <= 8 * ROUNDING / now:  # the difference is rounding error
            growth = 0.0
        slacks = {
            "eta <= rho / (48 lambda L I^2)": 1 - now / self.largest_rate,
            "alpha < 1": 1 - c * now**2,
            "c <= 192 lambda^2 L^2 / (K rho^2)": 1 - c / (2 * first),
            "eta does not grow": 1 - now / before,
            "eta at most halves in a round": 2 - eta(max(0, t - self.I + 1)) / now,
            "1 / eta grows by at most (c - 96 lambda^2 L^2 / (K rho^2)) eta": (c - first - growth / now) / second,
        }
        if rate is None:
            slacks |= {"w >= 2": self.w(t) - 2, "w does not grow": 1 - self.w(t) / self.w(t - 1)}
        return {name: 0.0 if abs(slack) <= 8 * ROUNDING else float(slack) for name, slack in slacks.items()}

    def bound(self, T: int, gap: float, sigma: float, zeta: float, b: float = 1, b1: float = 1) -> float:
        """The right side of Theorem 1, for the mean of G_t over T steps: `gap` = f(x_0) - f*, the first batch of
        size b, later ones of size b1.
        """
        return sum(self.terms(T, gap, sigma, zeta, b, b1).values())

    def terms(self, T: int, gap: float, sigma: float, zeta: float, b: float = 1, b1: float = 1) -> dict[str, float]:
        """The three terms of the bound: of the start, of the first estimate, of noise and heterogeneity."""
        return bound_terms(T, self.K, self.I, self.L, gap, sigma, zeta, b, b1)


def bound_terms(
    T: float, K: int, I: float, L: float, gap: float, sigma: float, zeta: float, b: float, b1: float
) -> dict[str, float]:
    slow = 1 / (K * T) ** (2 / 3)
    noise = (sigma**2 / (4 * b1) + 2 * zeta**2 / 21) * math.log(T + 1)
    return {
        "start": (96 * L * I**2 / T + 2 * L * slow) * gap,
        "first estimate": (72 * I**4 / (b * T) + 3 * I**2 / (2 * b) * slow) * sigma**2,
        "noise and heterogeneity": 192**2 * (48 * I**2 / T + slow) * noise,
    }


def local_steps(T: float, K: int) -> float:
    """I = (T / K^2)^(1/6), the corollary's number of local steps (a rate: round it as you like).

    >>> local_steps(20_000, 10)  # the paper's experiments: 5 were taken
    2.418271175121957
    """
    return float((T / K**2) ** (1 / 6))


def rounds_of(T: float, K: int) -> float:
    """E = T / I = K^(1/3) T^(5/6), the rounds of the corollary if I > 1."""
    return T / local_steps(T, K)


def steps_to(eps: float, K: int, gap: float = 1.0, sigma: float = 1.0, zeta: float = 1.0, L: float = 1.0) -> float:
    """The T at which the bound, with the corollary's I and a first batch of I^2, has fallen to eps."""

    def bound(T: float) -> float:
        I = max(1.0, local_steps(T, K))
        return sum(bound_terms(T, K, I, L, gap, sigma, zeta, I**2, 1).values())

    low, high = 1.0, 2.0
    while bound(high) > eps:
        low, high = high, 2 * high
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if bound(middle) > eps else (low, middle)
    return high


KAPPA, FLOOR, CLIENTS, WEIGHT = 0.25, 8.0, 1.6, 10.0  # the theorem has 1, 14^3 sqrt K, 48^3 I^6 and 96


@dataclass(frozen=True)
class Practical:
    """eta_t = lr / (w + t)^(1/3), alpha = min(1, c eta^2) with the theorem's dependence on K, L, rho and lambda:

        lr = 0.25 rho K^(2/3) / (lambda L),    w = max(8, 1.6 K^2),    c = 10 (lambda L / rho)^2 / K

    It does not depend on the number of steps, so one long run shows the whole curve. `ratio` is lambda L / rho of f,
    which bounds a stable step. `batches` sets c; it is the same ratio with assumption 5's L of mini-batches (default:
    `ratio`). K may be a tensor with one number per replica.

    >>> schedule = Practical(K=4)
    >>> round(schedule.eta(0), 3), round(schedule.alpha(0), 3)
    (0.214, 0.114)
    """

    K: Any
    ratio: float = 1.0
    batches: float | None = None

    @property
    def lr(self) -> Any:
        return KAPPA * self.K ** (2 / 3) / self.ratio

    @property
    def w(self) -> Any:
        w = CLIENTS * self.K**2
        return w.clamp(min=FLOOR) if isinstance(w, Tensor) else max(FLOOR, w)

    @property
    def c(self) -> Any:
        ratio = self.ratio if self.batches is None else self.batches
        return WEIGHT * ratio**2 / self.K

    def eta(self, t: Any) -> Any:
        return self.lr / (self.w + t) ** (1 / 3)

    def alpha(self, t: Any) -> Any:
        return self.c * self.eta(t) ** 2

    def algorithm(self, steps: int = 5, estimator: Estimator | None = None) -> FedDA:
        """FedDA-MVR with this schedule and H = 1."""
        return FedDA(CubeRoot(self.lr, self.w), estimator or Mvr(self.c), Identity(), steps=steps)
