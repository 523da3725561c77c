"""Robust, private and frugal aggregation: wrappers round a cohort, of which no algorithm and no engine knows.

>>> import fedda
>>> from fedda.aggregation import Clip, Trimmed
>>> problem = fedda.Quadratic(A=[[1.0]] * 5, b=[[0.0], [1.0], [2.0], [3.0], [1e9]])  # one client is far off
>>> algorithm = fedda.make("fedavg", lr=0.5, steps=1)
>>> fedda.train(algorithm, problem, rounds=60, aggregation=[Trimmed(0.2)]).x  # without the largest and the smallest
tensor([2.0000], dtype=torch.float64)
"""

from typing import Any

from .accounting import Accountant, Budget, Privacy
from .clip import Clip
from .cohort import Aggregated, checked, client_side, refuse_unfit, residuals, server_side
from .compression import Compression, Float16, TopK, packed, unpacked
from .noise import Noise, privacy
from .registered import aggregations
from .robust import Median, Trimmed
from .wrapper import Exchange, Wrapper

__all__ = [
    "Accountant", "Aggregated", "Budget", "Clip", "Compression", "Exchange", "Float16", "Median", "Noise", "Privacy",
    "TopK", "Trimmed", "Wrapper", "aggregations", "checked", "client_side", "completed", "make", "packed",
    "privacy", "refuse_unfit", "residuals", "server_side", "unpacked",
]  # fmt: skip


def make(name: str, **words: Any) -> Wrapper:
    """A wrapper by its name, with its hyper-parameters as flat words: as a federation's settings give it.

    >>> make("clip", norm=2.0)
    Clip(norm=2.0, where='server')
    >>> make("clip", radius=2.0)
    Traceback (most recent call last):
    ValueError: clip: no parameter 'radius'; known: norm, where
    """
    made: Wrapper = aggregations.find(name)(**words)
    return made


def completed(name: str, **words: Any) -> dict[str, Any]:
    """What `make` takes, with every default.

    >>> completed("clip", norm=2.0)
    {'name': 'clip', 'norm': 2.0, 'where': 'server'}
    """
    return {"name": name} | aggregations.find(name).complete(words)
