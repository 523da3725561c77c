"""How much privacy a run costs, by the package dp-accounting; nothing of it is rebuilt here."""

from __future__ import annotations

import math
from typing import Any

from ..checks import Bound, check, count, number

DELTA = Bound("in (0, 1)", lambda v: (v > 0) & (v < 1))


def epsilon(
    multiplier: float, start: int, each: int, rounds: int, cohort: int, clients: int, delta: float, secret: bool = True
) -> float:
    """(epsilon, delta) of a run with `start` noisy replies of all clients at first and `each` of a cohort in a round.

    One client's data replaced by other data moves a sum of replies by 2 norm at most, and the q replies of a round
    together, each over its own norm, by 2 sqrt(q): one Gaussian mechanism with the multiplier m / (2 sqrt(q)), on a
    cohort drawn without replacement; where the cohort is no `secret`, as if everybody took part in every round.
    """
    check("epsilon", rounds=rounds)
    count("epsilon", "cohort", cohort, at_most=clients)
    number("epsilon", "delta", delta, DELTA)
    dp = accountant()
    if multiplier == 0:
        return math.inf

    def query(replies: int) -> Any:
        return dp.GaussianDpEvent(multiplier / (2 * math.sqrt(replies)))

    spent = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    if start:
        spent.compose(query(start))
    event = query(each)
    if secret and cohort < clients:
        event = dp.SampledWithoutReplacementDpEvent(clients, cohort, event)
    spent.compose(event, rounds)
    return float(spent.get_epsilon(delta))


def accountant() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise ValueError('Noise.epsilon needs the package dp-accounting: pip install "fedda[privacy]"') from None
    return dp_accounting
