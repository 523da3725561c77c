"""One client after the other, in plain PyTorch: the truth that every fast engine is tested against."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..aggregation.means import mean
from ..core import ClientTask
from ..registry import engines
from .simulated import ClientStack, SimulatedCohort, joined


@engines.register("sequential")
@dataclass(frozen=True)
class Sequential:
    """One client after the other; the mean is taken at the end, in client order and float64."""

    def average(self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return mean(*self.replies(cohort, task, down))

    def replies(
        self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]
    ) -> tuple[list[Tensor], Tensor]:
        heard = []
        for k in range(cohort.size):
            client = ClientStack(cohort, slice(k, k + 1), stacked=False)
            heard.append(cohort.accept_replies(client, task(client, *down)))
        return joined(heard)
