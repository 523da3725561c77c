"""What takes the place of the mean where some clients may lie."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..checks import Bound, number
from .means import median, trimmed
from .registered import aggregations
from .wrapper import Exchange, Wrapper

BELOW_HALF = Bound("in [0, 0.5)", lambda v: (v >= 0) & (v < 0.5))


@aggregations.register("median")
@dataclass(frozen=True)
class Median(Wrapper):
    """The median of every coordinate over the clients that were heard; their weights play no other part.

    It lies between honest values as long as fewer than half of the clients lie. Where honest clients differ it is not
    their mean, and the run ends somewhere else: the more skewed their replies, the further.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0]] * 3, b=[[1.0], [2.0], [-1e9]])
    >>> fedda.train(fedda.make("fedavg", lr=0.5), problem, rounds=30, aggregation=[Median()]).x
    tensor([1.], dtype=torch.float64)
    """

    relative = False
    reduces = True

    @property
    def combines(self) -> bool:
        return True

    def combine(self, replies: list[Tensor], weights: Tensor, exchange: Exchange) -> tuple[list[Tensor], Tensor]:
        return [median(reply, weights > 0) for reply in replies], one(weights)


@aggregations.register("trimmed")
@dataclass(frozen=True)
class Trimmed(Wrapper):
    """The mean of every coordinate without the `share` smallest and the `share` largest values of the clients heard.

        n clients heard, f = floor(share n):  the mean of the values of rank f + 1 .. n - f; weights play no other part

    It holds against up to f liars. share = 0 is the plain mean, just under a half nearly the median.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0]] * 4, b=[[1.0], [2.0], [3.0], [-1e9]])
    >>> fedda.train(fedda.make("fedavg", lr=0.5), problem, rounds=30, aggregation=[Trimmed(0.25)]).x
    tensor([1.5000], dtype=torch.float64)
    """

    relative = False
    reduces = True
    share: float = 0.1

    def __post_init__(self) -> None:
        number("Trimmed", "share", self.share, BELOW_HALF)

    @property
    def combines(self) -> bool:
        return True

    def combine(self, replies: list[Tensor], weights: Tensor, exchange: Exchange) -> tuple[list[Tensor], Tensor]:
        return [trimmed(reply, weights > 0, self.share) for reply in replies], one(weights)


def one(weights: Tensor) -> Tensor:
    """The weight of the one row that is left."""
    return weights[..., :1, :] * 0 + 1
