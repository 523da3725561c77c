"""What an algorithm sends and expects, as foreseen: both sides refuse anything else."""

from __future__ import annotations

import json
from functools import lru_cache

import torch

from .. import aggregation
from ..aggregation import Wrapper
from ..aggregation.compression import compressions, forms
from ..aggregation.dry_run import Shapes, TaskShapes, dry_run
from ..core import Algorithm, bind_to_problem
from ..registry import make

DTYPES = {"float32": torch.float32, "float64": torch.float64}


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


@lru_cache(maxsize=8)  # asked for with every reply
def wrappers(words: str) -> tuple[Wrapper, ...]:
    """The wrappers of a JSON list, `[{"name": "clip", "norm": 1.0}]`."""
    try:
        tables = json.loads(words)
    except ValueError:
        raise ValueError("aggregation must be a JSON list of tables with a name") from None
    if not isinstance(tables, list) or not all(isinstance(t, dict) and isinstance(t.get("name"), str) for t in tables):
        raise ValueError("aggregation must be a JSON list of tables with a name")
    return aggregation.check_wrappers([aggregation.make(**table) for table in tables], "deploy")


def travelling(
    around: tuple[Wrapper, ...], shapes: Shapes, dtype: torch.dtype, d: int
) -> list[list[tuple[tuple[int, ...], torch.dtype]]]:
    """The tensors that each reply travels as, packed by whatever compressions there are."""
    return [forms(compressions(around), shape, dtype, d) for shape in shapes]


@lru_cache(maxsize=8)
def traffic(words: str, layout: tuple[tuple[str, tuple[int, ...]], ...], dtype: torch.dtype) -> dict[str, TaskShapes]:
    """The tasks of an algorithm on a model, and what each of them sends.

    >>> traffic('{"name": "fedavg"}', (("w", (3,)),), torch.float32)
    {'local': TaskShapes(task='local', down=((1, 3), (1, 1)), up=((1, 3),))}
    """
    d = sum(torch.Size(shape).numel() for _, shape in layout)
    made = bind_to_problem(algorithm(words), torch.empty((), dtype=dtype), list(layout))
    start, round = dry_run(made, torch.zeros(1, d, dtype=dtype))
    return {asked.task: asked for asked in (*start, *round)}
