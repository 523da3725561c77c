"""What the last bits of a run depend on besides its experiment: how gradients are computed, and with how many threads.

Both are measured when a run begins, written to its `environment.json`, and taken from there when it goes on: a resumed
run ends with the bytes of an uninterrupted one whatever the machine says now.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..engines import Distributed, Engine, SingleProcess, Vectorised
from ..problems.gradients.tuning import autotune, threads

STACK = 2_000_000  # numbers in the stack that threads are measured on: a larger one is more of the same
# How much faster all threads must be than one: on a busy machine they wait for each other, and take many times longer.
THREADS_MARGIN = 1.3


@dataclass(frozen=True)
class Choices:
    """`path` and `precision` are None where the engine has none."""

    path: str | None
    precision: str | None
    threads: int

    def engine(self, name: str) -> str | Engine:
        """The engine of this name, on the path that was chosen."""
        if self.path is None or self.precision is None:
            return name
        return (Distributed if name == "distributed" else Vectorised)(path=self.path, precision=self.precision)


def agreed(world: SingleProcess, problem: Any, engine: str, clients: int, *more: Any) -> Choices:
    """The first rank's choices, for its part of the clients: the others would measure something else."""
    if world.rank:
        return Choices(**json.loads(world.share(b"")))
    choices = chosen(problem, engine, -(-clients // world.size) if engine == "distributed" else clients, *more)
    world.share(json.dumps(asdict(choices)).encode())
    return choices


def chosen(
    problem: Any, engine: str, clients: int, replicas: int, asked: int | None, rounded: str, begun: Path | None
) -> Choices:
    """The choices for cohorts of so many clients: threads `asked` for, gradients `rounded` so, what the run in a folder
    was `begun` with, else what is measured."""
    before = _recorded(begun)
    path, precision = None, None
    if engine in ("auto", "vectorised", "distributed") and problem.gradient_paths is not None:
        problem = _on_its_path(problem, clients, rounded, before)
        path, precision = problem.gradient_paths.chosen, problem.gradient_paths.precision
    number = _threads(before) if asked is None else asked
    if number is None:
        number = measured_threads(problem, clients * replicas if path else 1)
    return Choices(path, precision, number)


def _recorded(folder: Path | None) -> dict[str, Any]:
    """The environment in which a run was begun; nothing where there is none, or of an older version."""
    try:
        found = json.loads((folder / "environment.json").read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _on_its_path(problem: Any, clients: int, rounded: str, before: dict[str, Any]) -> Any:
    if before.get("path") is None:
        return problem.with_path("auto", rounded, clients)
    begun = before["path"], before.get("precision")
    try:
        return problem.with_path(*begun, clients)
    except ValueError:
        other = problem.with_path("auto", "auto", clients)
        now = other.gradient_paths.chosen, other.gradient_paths.precision
        words = "the run was begun on the path {} in {}, which does not fit here: {} in {} from now on"
        warnings.warn(words.format(*begun, *now), stacklevel=2)
        return other


def _threads(before: dict[str, Any]) -> int | None:
    number = before.get("threads")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        return None
    if number > processors():
        words = f"the run was begun with {number} threads, and here are {processors()} processors"
        warnings.warn(f"{words}: its last bits may differ from now on", stacklevel=2)
        return None
    return number


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measured_threads(problem: Any, stack: int) -> int:
    """One thread or all there are, by the gradients of a stack of models."""
    most = torch.get_num_threads()
    if most == 1 or problem.device.type != "cpu" or problem.gradient_paths is None:
        return most
    n = max(1, min(stack, STACK // problem.d))
    x, batch = problem.example(n)

    def gradients(number: int) -> None:
        with threads(number):
            problem.gradients(x[None], batch)

    ways = {str(number): lambda number=number: gradients(number) for number in (1, most)}
    about = (
        problem.model,
        n,
        problem.data.x.shape[1:],
        problem.batch_size,
        problem.dtype,
        problem.gradient_paths.chosen,
    )
    return int(autotune(ways, problem.device, "threads", *about, margin=THREADS_MARGIN))
