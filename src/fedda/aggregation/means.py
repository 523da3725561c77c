"""One row for all clients: mean, median and trimmed mean of replies [..., c, m] with weights [..., c, 1]."""

from __future__ import annotations

import torch
from torch import Tensor


def mean(replies: list[Tensor], weights: Tensor) -> tuple[Tensor, ...]:
    """The weighted mean over the clients, in float64, as the replies are."""
    total = weights.sum(dim=-2, keepdim=True)
    return tuple(((weights * reply).sum(dim=-2, keepdim=True) / total).to(reply.dtype) for reply in replies)


def median(reply: Tensor, heard: Tensor) -> Tensor:
    """Coordinate by coordinate over those who are heard [..., c, 1]; between the two in the middle of an even number.

    >>> median(torch.tensor([[1.0], [7.0], [3.0], [9e9]]), torch.tensor([[True], [True], [True], [False]]))
    tensor([[3.]])
    """
    order, n = ascending(reply, heard)
    low, high = (
        order.gather(-2, place.clamp(min=0).expand(*reply.shape[:-2], 1, reply.shape[-1]))
        for place in ((n - 1) // 2, n // 2)
    )
    return low + (high - low) / 2  # the sum of two may be too large


def trimmed(reply: Tensor, heard: Tensor, share: float) -> Tensor:
    """The mean, coordinate by coordinate, without the floor(share n) smallest and as many of the largest of n.

    >>> trimmed(torch.tensor([[1.0], [7.0], [3.0], [9e9]]), torch.ones(4, 1, dtype=torch.bool), 0.25)
    tensor([[5.]])
    """
    order, n = ascending(reply, heard)
    cut = (share * n + 1e-9).floor()  # 0.29 * 100 is below 29
    place = torch.arange(reply.shape[-2], device=reply.device)[:, None]
    kept = (place >= cut) & (place < n - cut)
    total = torch.where(kept, order.double(), 0).sum(dim=-2, keepdim=True)
    return (total / kept.sum(dim=-2, keepdim=True)).to(reply.dtype)


def ascending(reply: Tensor, heard: Tensor) -> tuple[Tensor, Tensor]:
    """Each coordinate's values in order, those of who is not heard behind; and how many are heard, [..., 1, 1]."""
    return torch.where(heard, reply, torch.inf).sort(dim=-2).values, heard.sum(dim=-2, keepdim=True)
