"""What an algorithm sends and expects, found out by running it once on zeros: both sides refuse anything else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import aggregation
from ..aggregation import Wrapper
from ..aggregation.compression import compressions, forms
from ..core import Algorithm, ClientTask, place
from ..engines import Sequential, Simulation
from ..problems import Quadratic
from ..registry import make

DTYPES = {"float32": torch.float32, "float64": torch.float64}
SHAPES = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Exchange:
    """The shapes of the tensors that go down with a task, and of those that come up."""

    down: SHAPES
    up: SHAPES


class Recording:
    """A cohort of one client that notes what passes."""

    size = population = 1

    def __init__(self, cohort: Any):
        self.cohort = cohort
        self.exchanges: dict[str, Exchange] = {}

    @property
    def share(self) -> Tensor:
        share: Tensor = self.cohort.share
        return share

    def average(self, task: ClientTask, *down: Tensor) -> tuple[Tensor, ...]:
        up: tuple[Tensor, ...] = self.cohort.average(task, *down)
        self.exchanges[task.__name__] = Exchange(*(tuple(tuple(v.shape) for v in side) for side in (down, up)))
        return up

    def replies(self, task: ClientTask, *down: Tensor) -> tuple[list[Tensor], Tensor]:
        raise NotImplementedError("an algorithm asks for means")


def algorithm(words: str) -> Algorithm:
    """The algorithm of a JSON table, `{"name": "fedavg", "lr": 0.1}`; what is unknown is refused by name."""
    try:
        table = json.loads(words)
    except ValueError:
        raise ValueError("the algorithm must be a JSON table with a name") from None
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        raise ValueError("the algorithm must be a JSON table with a name")
    if "preset" in table:  # it may be a file, and a client opens none for anybody
        raise ValueError("the algorithm must have its values themselves, not a preset")
    return make(table.pop("name"), **table)


def wrappers(words: str) -> tuple[Wrapper, ...]:
    """The wrappers of a JSON list, `[{"name": "clip", "norm": 1.0}]`."""
    try:
        tables = json.loads(words)
    except ValueError:
        raise ValueError("aggregation must be a JSON list of tables with a name") from None
    if not isinstance(tables, list) or not all(isinstance(t, dict) and isinstance(t.get("name"), str) for t in tables):
        raise ValueError("aggregation must be a JSON list of tables with a name")
    return aggregation.checked([aggregation.make(**table) for table in tables], "deploy")


def travelling(
    around: tuple[Wrapper, ...], shapes: SHAPES, dtype: torch.dtype, d: int
) -> list[list[tuple[tuple[int, ...], torch.dtype]]]:
    """The tensors that each reply travels as, packed by whatever compressions there are."""
    return [forms(compressions(around), shape, dtype, d) for shape in shapes]


@lru_cache(maxsize=8)
def traffic(words: str, layout: tuple[tuple[str, tuple[int, ...]], ...], dtype: torch.dtype) -> dict[str, Exchange]:
    """The tasks of an algorithm on a model, and what each of them sends.

    >>> traffic('{"name": "fedavg"}', (("w", (3,)),), torch.float32)
    {'local': Exchange(down=((1, 3), (1, 1)), up=((1, 3),))}
    """
    d = sum(torch.Size(shape).numel() for _, shape in layout)
    problem = Quadratic(torch.ones(1, d), torch.zeros(1, d)).to(dtype=dtype)
    made = place(algorithm(words), torch.empty((), dtype=dtype), list(layout))
    simulation = Simulation(problem, Sequential(), torch.tensor([0]), "uniform", made.memory)
    start, cohort = Recording(simulation.everyone()), Recording(simulation.cohort(0, 1))
    with torch.no_grad():
        server = made.init(torch.zeros(1, d, dtype=dtype), start)
        made.round(server, cohort)
    return start.exchanges | cohort.exchanges
