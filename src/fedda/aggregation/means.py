"""Mean, median and trimmed mean over clients of replies [..., c, m] with weights [..., c, 1]."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import Bound, number
from .wrapper import Exchange, Wrapper, aggregations

BELOW_HALF = Bound("in [0, 0.5)", lambda v: (v >= 0) & (v < 0.5))


class Reducer(Wrapper):
    """A wrapper that replaces the mean."""

    reduces = True

    @property
    def combines(self) -> bool:
        return True


@aggregations.register("median")
@dataclass(frozen=True)
class Median(Reducer):
    """The median of each coordinate over the clients that replied. Their weights are ignored.

    It lies between honest values as long as fewer than half of the clients lie. If honest clients differ, it is not
    their mean, and the run ends elsewhere: the more skewed the replies, the further away.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0]] * 3, b=[[1.0], [2.0], [-1e9]])
    >>> fedda.train(fedda.make("fedavg", lr=0.5), problem, rounds=30, aggregation=[Median()]).x
    tensor([1.], dtype=torch.float64)
    """

    relative = False  # the median of models is that of changes, moved

    def combine(self, replies: list[Tensor], weights: Tensor, exchange: Exchange) -> tuple[list[Tensor], Tensor]:
        return [median(reply, weights > 0) for reply in replies], unit_weight(weights)


@aggregations.register("trimmed")
@dataclass(frozen=True)
class Trimmed(Reducer):
    """The mean of each coordinate over the clients that replied, without the `share` smallest and largest values.

        n clients replied, f = floor(share n):  the mean of the values of rank f + 1 .. n - f; weights are ignored

    It holds against up to f liars. share = 0 is the plain mean; just under a half is nearly the median.

    Args:
        share: the part of the clients that is cut off at each end, below a half.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0]] * 4, b=[[1.0], [2.0], [3.0], [-1e9]])
    >>> fedda.train(fedda.make("fedavg", lr=0.5), problem, rounds=30, aggregation=[Trimmed(0.25)]).x
    tensor([1.5000], dtype=torch.float64)
    """

    relative = False
    share: float = 0.1

    def __post_init__(self) -> None:
        number("Trimmed", "share", self.share, BELOW_HALF)

    def combine(self, replies: list[Tensor], weights: Tensor, exchange: Exchange) -> tuple[list[Tensor], Tensor]:
        return [trimmed_mean(reply, weights > 0, self.share) for reply in replies], unit_weight(weights)


def mean(replies: list[Tensor], weights: Tensor) -> tuple[Tensor, ...]:
    """The weighted mean over the clients: computed in float64, returned in the dtype of the replies."""
    total = weights.sum(dim=-2, keepdim=True)
    return tuple(((weights * reply).sum(dim=-2, keepdim=True) / total).to(reply.dtype) for reply in replies)


def median(reply: Tensor, replied: Tensor) -> Tensor:
    """The median of each coordinate over the clients that `replied` [..., c, 1]; of an even number, the middle of two.

    >>> median(torch.tensor([[1.0], [7.0], [3.0], [9e9]]), torch.tensor([[True], [True], [True], [False]]))
    tensor([[3.]])
    """
    values, n = sort_replies(reply, replied)
    low, high = (
        values.gather(-2, rank.clamp(min=0).expand(*reply.shape[:-2], 1, reply.shape[-1]))
        for rank in ((n - 1) // 2, n // 2)
    )
    return low + (high - low) / 2  # low + high could overflow


def trimmed_mean(reply: Tensor, replied: Tensor, share: float) -> Tensor:
    """The mean of each coordinate without the floor(share n) smallest and the floor(share n) largest of n values.

    >>> trimmed_mean(torch.tensor([[1.0], [7.0], [3.0], [9e9]]), torch.ones(4, 1, dtype=torch.bool), 0.25)
    tensor([[5.]])
    """
    values, n = sort_replies(reply, replied)
    cut = (share * n + 1e-9).floor()  # 0.29 * 100 is below 29
    rank = torch.arange(reply.shape[-2], device=reply.device)[:, None]
    kept = (rank >= cut) & (rank < n - cut)
    total = torch.where(kept, values.double(), 0).sum(dim=-2, keepdim=True)
    return (total / kept.sum(dim=-2, keepdim=True)).to(reply.dtype)


def sort_replies(reply: Tensor, replied: Tensor) -> tuple[Tensor, Tensor]:
    """Each coordinate's values in ascending order, with silent clients last; the number of replies [..., 1, 1]."""
    return torch.where(replied, reply, torch.inf).sort(dim=-2).values, replied.sum(dim=-2, keepdim=True)


def unit_weight(weights: Tensor) -> Tensor:
    """The weight [..., 1, 1] of the one row that is left."""
    return weights[..., :1, :] * 0 + 1
