"""One client after the other, in plain PyTorch: the truth that every fast engine is tested against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import ClientTask
from ..registry import engines
from .simulated import Members, SimulatedCohort


@engines.register("sequential")
@dataclass(frozen=True)
class Sequential:
    """One client after the other; the mean is taken at the end, in client order and float64."""

    def average(self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        heard = []
        for k in range(cohort.size):
            client = Members(cohort, slice(k, k + 1), stacked=False)
            heard.append(cohort.settle(client, task(client, *down)))
        weights = torch.cat([weight for _, weight in heard], dim=-2)
        means = []
        for column in zip(*(replies for replies, _ in heard), strict=True):
            reply = torch.cat(column, dim=-2)
            mean = (weights * reply).sum(dim=-2, keepdim=True) / weights.sum(dim=-2, keepdim=True)
            means.append(mean.to(reply.dtype))
        return tuple(means)
