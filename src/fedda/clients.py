"""How a trained model does on each client, and how it does after a few local steps of the client's own."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import checks, rng
from .engines import Vectorised
from .engines.simulated import ClientStack, SimulatedCohort, Simulation

if TYPE_CHECKING:
    from .run import Run


PERSONAL_ALREADY = "personalise: the problem has personal parameters already, which every round trains"


@dataclass(frozen=True)
class FineTuning:
    """`steps` steps of SGD with the rate `lr`, on mini-batches of a client's own samples.

    >>> FineTuning.of("fine-tune 5"), FineTuning.of("fine-tune 2 lr 0.1")
    (FineTuning(steps=5, lr=0.01), FineTuning(steps=2, lr=0.1))
    """

    steps: int
    lr: float = 0.01

    @classmethod
    def of(cls, text: str | None) -> FineTuning | None:
        if text is None:
            return None
        match = re.fullmatch(r"fine-tune (\d+)(?: lr ([0-9.eE+-]+))?", text) if isinstance(text, str) else None
        try:
            tuning = match and cls(int(match[1]), float(match[2] or cls.lr))
        except ValueError:
            tuning = None
        if tuning is None or tuning.steps < 1 or not 0 < tuning.lr < math.inf:
            raise ValueError(f"personalise must be text such as 'fine-tune 5' or 'fine-tune 5 lr 0.1', got {text!r}")
        checks.count("personalise", "steps", tuning.steps, at_most=10_000)
        return tuning


@torch.no_grad()
def client_rows(run: Run, tuning: FineTuning | None = None) -> list[dict[str, Any]]:
    """One row for each seed and client: its number of samples, and the metrics of the model on them. With `tuning`,
    `tuned_...` are those after local steps, on the client's held-out samples if their owners are known."""
    problem, world, x = run.simulation.personalised(), run.world, run.server.x
    mine = world.mine(problem.clients)
    values = problem.client_metrics(x.reshape(-1, problem.d), run.simulation.objective, world.mine, world.sum)
    if tuning is not None:
        if problem.d_personal:
            raise ValueError(PERSONAL_ALREADY)
        values |= {f"tuned_{name}": v for name, v in fine_tuned(run, tuning, mine).items()}
    columns = {name: _of_all_clients(run, v, mine) for name, v in values.items()}
    ended = run.ended.reshape(-1).tolist()
    names, sizes = problem.client_names or range(problem.clients), problem.sizes.tolist()
    return [
        {"seed": seed, "client": names[k], "samples": sizes[k]}
        | {name: math.nan if ended[i] else column[i][k] for name, column in columns.items()}
        for i, seed in enumerate(run.seeds)
        for k in range(problem.clients)
    ]


def fine_tuned(run: Run, tuning: FineTuning, mine: slice) -> dict[str, Tensor]:
    """The metrics of a slice of the clients after local steps: [replicas, clients]."""
    problem, engine, x = run.problem, run.simulation.engine, run.server.x
    seeds = torch.tensor(run.seeds, device=x.device).view(*run.lead, 1)
    ids = torch.arange(problem.clients, device=x.device).expand(*run.lead, problem.clients)
    simulation = Simulation(problem, engine, seeds, "uniform", ())
    cohort = SimulatedCohort(simulation, ids, rng.fold(rng.key(seeds, rng.PERSONAL), ids))
    stacked = isinstance(engine, Vectorised)
    chunk = engine.chunk or engine.chunk_size(cohort) if isinstance(engine, Vectorised) else 1
    if mine.stop <= mine.start:
        mine = slice(0, 1)  # a process without clients takes part in the exchange, with values that do not count
    parts = []
    for first in range(mine.start, mine.stop, chunk):
        part = slice(first, min(first + chunk, mine.stop))
        client = ClientStack(cohort, part, stacked)
        own = x.expand(*run.lead, client.count, problem.d)
        for _ in range(tuning.steps):
            own = own - tuning.lr * client.gradients(own)[0]
        parts.append(problem.personal_metrics(own.reshape(-1, client.count, problem.d), part))
    return {name: torch.cat([part[name] for part in parts], dim=-1) for name in parts[0]}


def _of_all_clients(run: Run, values: Tensor, mine: slice) -> list[list[float]]:
    full = torch.zeros(len(values), run.problem.clients, dtype=torch.float64, device=values.device)
    full[:, mine] = values[:, : mine.stop - mine.start]
    numbers: list[list[float]] = run.world.sum([full])[0].tolist()
    return numbers
