"""One client at a time, in plain PyTorch. Every faster engine is tested against this one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core import ClientTask
from ..registry import engines
from .simulated import ClientStack, Engine, Replies, SimulatedCohort, concatenate


@engines.register("sequential")
@dataclass(frozen=True)
class Sequential(Engine):
    """One client at a time; the mean is taken at the end, in client order and float64."""

    def replies(self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]) -> Replies:
        clients = (ClientStack(cohort, slice(k, k + 1), stacked=False) for k in range(cohort.size))
        return concatenate(cohort.accept_replies(client, task(client, *down)) for client in clients)
