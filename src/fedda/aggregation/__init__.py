"""Robust, private and compressed aggregation: wrappers round a cohort, independent of algorithms and engines.

>>> import fedda
>>> from fedda.aggregation import Clip, Trimmed
>>> problem = fedda.Quadratic(A=[[1.0]] * 5, b=[[0.0], [1.0], [2.0], [3.0], [1e9]])  # one client is far off
>>> algorithm = fedda.make("fedavg", lr=0.5, steps=1)
>>> fedda.train(algorithm, problem, rounds=60, aggregation=[Trimmed(0.2)]).x  # drops the largest and the smallest
tensor([2.0000], dtype=torch.float64)
"""

from typing import Any

from .accounting import Budget
from .clip import Clip
from .compression import Compression, Float16, TopK
from .means import Median, Trimmed
from .noise import Noise
from .wrapper import Exchange, Wrapper, aggregations

__all__ = [
    "Budget", "Clip", "Compression", "Exchange", "Float16", "Median", "Noise", "TopK", "Trimmed", "Wrapper", "make",
]  # fmt: skip


def make(name: str, **params: Any) -> Wrapper:
    """A wrapper by its name, with its parameters, as in the settings of a federation.

    Args:
        name: its name (`fedda list aggregation`).
        params: its parameters (`fedda list aggregation NAME`).

    >>> make("clip", norm=2.0)
    Clip(norm=2.0, where='server')
    >>> make("clip", radius=2.0)
    Traceback (most recent call last):
    ValueError: clip: no parameter 'radius'; known: norm, where
    """
    wrapper: Wrapper = aggregations.find(name)(**params)
    return wrapper


def completed(name: str, **params: Any) -> dict[str, Any]:
    """The arguments of `make` with all defaults.

    >>> completed("clip", norm=2.0)
    {'name': 'clip', 'norm': 2.0, 'where': 'server'}
    """
    return {"name": name} | aggregations.find(name).complete(params)


def __dir__() -> list[str]:
    return sorted(__all__)
