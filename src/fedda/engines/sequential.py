"""One client at a time, in plain PyTorch. Every faster engine is tested against this one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Algorithm, ClientTask, Problem
from ..registry import engines
from .simulated import ClientStack, Engine, Replies, SimulatedCohort, Simulation, concatenate


@engines.register("sequential")
@dataclass(frozen=True)
class Sequential(Engine):
    """One client at a time; the mean is taken at the end, in client order and float64."""

    def replies(self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]) -> Replies:
        clients = (ClientStack(cohort, slice(k, k + 1), stacked=False) for k in range(cohort.size))
        return concatenate(cohort.accept_replies(client, task(client, *down)) for client in clients)


def single_client(
    problem: Problem, memory: dict[str, Tensor], key: int, drawn_before: int, algorithm: Algorithm | None = None
) -> ClientStack:
    """The only client of a problem, outside a run: its memory [1, d], its random key, and the batches drawn before.
    `remember` writes into `memory`."""
    simulation = Simulation(problem, Sequential(), torch.tensor([0]), "uniform", (), algorithm=algorithm)
    simulation.memory = memory
    cohort = SimulatedCohort(simulation, torch.tensor([0]), torch.tensor([key]))
    cohort.drawn_before = drawn_before
    return ClientStack(cohort, slice(0, 1), stacked=False)
