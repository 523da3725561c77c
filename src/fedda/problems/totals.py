"""Metrics as sums and weights, so that each of several processes can look at a part of the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

Totals = dict[str, tuple[Tensor, Tensor]]  # of each metric: a weighted sum [...], and the weight
Mine = Callable[[int], slice]  # which of n clients, or test samples, to look at
Add = Callable[[Sequence[Tensor]], list[Tensor]]  # sums over all processes


def all_of(n: int) -> slice:
    return slice(0, n)


def one_process(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(tensors)


def means(totals: Totals) -> dict[str, Tensor]:
    return {name: total / weight for name, (total, weight) in totals.items()}
