"""How much privacy a run has spent, against whom, and how many rounds a budget allows; computed by dp-accounting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..checks import POSITIVE, Bound, count, nearest, number, one_of
from ..extras import MissingPackage, needed_for

DELTA = Bound("in (0, 1)", lambda v: (v > 0) & (v < 1))
DEFAULT_DELTA = 1e-5  # of runs without a budget
AGAINST = ("outside", "site")
COHORTS = ("secret", "known")
REPRODUCIBLE = "not private: reproducible noise"


@dataclass(frozen=True)
class Accountant:
    """The epsilon of (epsilon, delta)-differential privacy when all data of one client are replaced by other data.

    One client's replacement moves the sum of a reply by at most 2 norm. The q replies of a round come from the same
    client: each divided by its norm, they move by at most 2 sqrt(q) together. So a round is one Gaussian mechanism
    with the multiplier m / (2 sqrt(q)).

    `against="outside"` is somebody who sees the final model. `against="site"` is a client of the federation, which
    sees every broadcast and knows in which rounds it took part. Sampling of the cohorts is credited only if they are
    secret and clients keep no memory between rounds. A site knows about itself, so for it the secret is which r (at
    most) of the other K - 1 clients take part.
    """

    multiplier: float
    start: int  # noisy replies of all clients at the start of a run
    each: int  # noisy replies of a cohort in a round
    clients: int
    cohort: int
    sampling: bool  # whether sampling may be credited

    def __post_init__(self) -> None:
        count("epsilon", "cohort", self.cohort, at_most=self.clients)

    def epsilon(self, rounds: int, delta: float, against: str = "outside", starts: int = 1) -> float:
        """The epsilon spent after this number of rounds and starts. Failed attempts count as well."""
        one_of("epsilon", "against", against, AGAINST)
        number("epsilon", "delta", delta, DELTA)
        dp = dp_accounting()
        if self.multiplier == 0:
            return math.inf
        others = self.clients - (against == "site")
        population = others if self.sampling and self.cohort < others else self.cohort
        orders, of_start = renyi(self.multiplier, self.start, 1, 1)
        _, of_round = renyi(self.multiplier, self.each, population, self.cohort)
        spent = [starts * a + rounds * b for a, b in zip(of_start, of_round, strict=True)]
        return float(dp.rdp.compute_epsilon(orders, spent, delta)[0]) if any(spent) else 0.0


@lru_cache(maxsize=64)
def renyi(multiplier: float, replies: int, population: int, cohort: int) -> tuple[Any, tuple[float, ...]]:
    """The orders, and the Rényi divergence at each, of one exchange with this number of replies."""
    dp = dp_accounting()
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    if replies:
        event = dp.GaussianDpEvent(multiplier / (2 * math.sqrt(replies)))
        if cohort < population:
            event = dp.SampledWithoutReplacementDpEvent(population, cohort, event)
        accountant.compose(event)
    return tuple(accountant.orders), tuple(accountant.rdp)


@dataclass(frozen=True)
class Budget:
    """The privacy that a run may spend.

    A federation draws its cohorts from a secret. A simulation draws them from its seed, which is not secret, so "known"
    is the default of a simulation. With "secret" a simulation counts as a federation does.

    Args:
        epsilon: the largest epsilon; no limit by default.
        delta: the probability with which the guarantee may fail.
        against: "site" (a client that sees every broadcast, and the larger epsilon) or "outside".
        cohorts: whether sampling is credited: "secret" or "known".

    >>> Budget.of({"epsilon": 8.0, "delta": 1e-5})
    Budget(epsilon=8.0, delta=1e-05, against='site', cohorts=None)
    """

    epsilon: float = math.inf
    delta: float = DEFAULT_DELTA
    against: str = "site"
    cohorts: str | None = None

    def __post_init__(self) -> None:
        if self.epsilon != math.inf:  # infinity means that there is no limit
            number("budget", "epsilon", self.epsilon, POSITIVE)
        number("budget", "delta", self.delta, DELTA)
        one_of("budget", "against", self.against, AGAINST)
        if self.cohorts is not None:
            one_of("budget", "cohorts", self.cohorts, COHORTS)

    @classmethod
    def of(cls, table: Mapping[str, Any] | Budget) -> Budget:
        """From a table with the keys epsilon, delta, against and cohorts, as experiment files have it.

        Args:
            table: the keys epsilon, delta, against and cohorts, as experiment files have them.
        """
        if isinstance(table, Budget):
            return table
        if not isinstance(table, Mapping) or "epsilon" not in table:
            raise ValueError(f"budget must be a table such as {{'epsilon': 8.0, 'delta': 1e-5}}, got {table!r}")
        for key in table:
            if key not in cls.__dataclass_fields__:
                raise ValueError(f"budget: no key {key!r}; {nearest(key, cls.__dataclass_fields__)}")
        return cls(**table)


@dataclass
class Privacy:
    """What a run with noise has spent, and what it may spend.

    `starts` and `rounds` count attempts whose results were lost, in addition to those of the run.
    """

    accountant: Accountant
    budget: Budget
    limited: bool  # whether the user gave a budget
    reproducible: bool
    starts: int = 0
    rounds: int = 0

    def __post_init__(self) -> None:
        if self.limited and self.reproducible:
            raise ValueError(f"budget: {REPRODUCIBLE}: leave out the seed of Noise")
        if self.limited:
            dp_accounting("budget")
            if not self.within(1):
                least = self.epsilon(1, self.budget.against)
                raise ValueError(
                    f"budget: one round more would spend an epsilon of {least:.3g}, and the budget is "
                    f"{self.budget.epsilon:g}: raise the budget or the multiplier of Noise"
                )

    def epsilon(self, rounds: int, against: str) -> float:
        """The epsilon spent after this number of rounds of the run, and after all lost attempts."""
        return self.accountant.epsilon(self.rounds + rounds, self.budget.delta, against, 1 + self.starts)

    def within(self, rounds: int) -> bool:
        return self.epsilon(rounds, self.budget.against) <= self.budget.epsilon

    def last_round(self, rounds: int) -> int:
        """The last of `rounds` rounds that the budget allows."""
        if not self.limited or self.within(rounds):
            return rounds
        low, high = 0, rounds  # high exceeds the budget; low does not, or is 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.within(middle) else (low, middle)
        return low

    def stop_reason(self, done: int, rounds: int) -> str:
        """Why a run stops after `done` rounds."""
        if self.within(done):
            return f"the privacy budget is spent after round {done} of {rounds}"
        spent = self.epsilon(done, self.budget.against)
        return f"the privacy budget is exceeded: {spent:.3g} of {self.budget.epsilon:g} after round {done} of {rounds}"

    def row(self, rounds: int) -> dict[str, Any]:
        """The columns of a row of metrics."""
        if self.reproducible:
            return {"privacy": REPRODUCIBLE}
        try:
            spent = {f"epsilon_{who}": self.epsilon(rounds, who) for who in AGAINST}
        except MissingPackage as why:
            return {"privacy": str(why)}
        if self.accountant.multiplier == 0:
            return {"privacy": "not private: no noise"}
        everybody = self.accountant.cohort == self.accountant.clients
        sampling = "credited" if self.accountant.sampling and not everybody else "not credited"
        return {"privacy": f"delta {self.budget.delta:g}, sampling of cohorts {sampling}", **spent}


def dp_accounting(owner: str = "Noise.epsilon") -> Any:
    with needed_for(owner):
        import dp_accounting
    return dp_accounting
