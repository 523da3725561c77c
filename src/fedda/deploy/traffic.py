"""The messages of an algorithm, known in advance: both sides refuse anything else."""

import json
from functools import lru_cache
from typing import Any

import torch

from .. import aggregation
from ..aggregation import Wrapper
from ..aggregation.cohort import check_wrappers
from ..aggregation.compression import compressions, forms
from ..aggregation.dry_run import Shapes, TaskShapes, dry_run
from ..core import Algorithm, bind_to_problem
from ..registry import make, rates_of_unknown_length

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def parsed(text: str) -> Any:
    """The value of a JSON text, or None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def algorithm(text: str) -> Algorithm:
    """The algorithm of a JSON table, `{"name": "fedavg", "lr": 0.1}`."""
    table = parsed(text)
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        raise ValueError("the algorithm must be a JSON table with a name")
    if "preset" in table:  # it may name a file, and a client opens no file for a server
        raise ValueError("the algorithm must have its values, not a preset")
    return make(table.pop("name"), **table)


def with_numbers_of_the_run(text: str, known: Algorithm, rounds: int) -> str:
    """The table with what a site cannot know: the number of steps that the server counts with, if clients work
    unequally, and the length of the run, if a rate depends on it."""
    table = json.loads(text)
    if known.epochs is not None or known.proportional:
        table |= {"steps": known.steps} | ({"proportional": True} if known.proportional else {})
    for name, rate in rates_of_unknown_length(table).items():
        table[name] = rate | {"horizon": rounds * known.steps}
    return json.dumps(table, sort_keys=True)


@lru_cache(maxsize=8)  # called for every reply
def wrappers(text: str) -> tuple[Wrapper, ...]:
    """The wrappers of a JSON list, `[{"name": "clip", "norm": 1.0}]`."""
    tables = parsed(text)
    if not isinstance(tables, list) or not all(isinstance(t, dict) and isinstance(t.get("name"), str) for t in tables):
        raise ValueError("aggregation must be a JSON list of tables with a name")
    return check_wrappers([aggregation.make(**table) for table in tables], "deploy")


def travelling(
    around: tuple[Wrapper, ...], shapes: Shapes, dtype: torch.dtype, d: int
) -> list[list[tuple[tuple[int, ...], torch.dtype]]]:
    """The tensors in which each reply travels, after compression."""
    return [forms(compressions(around), shape, dtype, d) for shape in shapes]


@lru_cache(maxsize=8)
def traffic(text: str, layout: tuple[tuple[str, tuple[int, ...]], ...], dtype: torch.dtype) -> dict[str, TaskShapes]:
    """The tasks of an algorithm on a model, and the shapes that each of them sends.

    >>> traffic('{"name": "fedavg"}', (("w", (3,)),), torch.float32)
    {'local': TaskShapes(task='local', down=((1, 3), (1, 1)), up=((1, 3),))}
    """
    d = sum(torch.Size(shape).numel() for _, shape in layout)
    made = bind_to_problem(algorithm(text), torch.empty((), dtype=dtype), list(layout))
    start, round = dry_run(made, torch.zeros(1, d, dtype=dtype))
    return {shapes.task: shapes for shapes in (*start, *round)}
