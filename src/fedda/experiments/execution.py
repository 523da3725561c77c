"""How gradients are computed and with how many threads: the last bits of a run depend on it.

Both are measured when a run starts, written to its `environment.json`, and read from there when it resumes: a resumed
run ends with the bytes of an uninterrupted one, even on a machine that is faster or slower now.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..checks import warn
from ..engines import Distributed, Engine, Vectorised
from ..engines.world import SingleProcess
from ..problems.gradients.tuning import measured_threads
from ..runs.names import ENVIRONMENT


@dataclass(frozen=True)
class Execution:
    """`path` and `precision` are None for an engine without paths. `choice` says how the path was chosen, if it was
    measured."""

    path: str | None
    precision: str | None
    threads: int
    choice: str = ""

    def engine(self, name: str) -> str | Engine:
        """The engine of this name, on the chosen path."""
        if self.path is None or self.precision is None:
            return name
        return (Distributed if name == "distributed" else Vectorised)(path=self.path, precision=self.precision)


def agree_on_execution(world: SingleProcess, problem: Any, engine: str, clients: int, *more: Any) -> Execution:
    """The first rank's choice, for its share of the clients: other ranks would measure something else."""
    if world.rank:
        return Execution(**json.loads(world.share(b"")))
    share = -(-clients // world.size) if engine == "distributed" else clients
    execution = choose_execution(problem, engine, share, *more)
    world.share(json.dumps(asdict(execution)).encode())
    return execution


def choose_execution(
    problem: Any, engine: str, clients: int, replicas: int, threads: int | None, precision: str, resumed: Path | None
) -> Execution:
    """The execution for cohorts of `clients`: as given, else as in the `resumed` folder, else as measured."""
    environment = read_environment(resumed)
    path = None
    if engine in ("auto", "vectorised", "distributed") and problem.gradient_paths is not None:
        problem = _with_path(problem, clients, precision, environment)
        path = problem.gradient_paths.chosen
    number = _recorded_threads(environment) if threads is None else threads
    if number is None:
        number = measured_threads(problem, clients * replicas if path else 1)
    if path is None:
        return Execution(None, None, number)
    return Execution(path, problem.gradient_paths.precision, number, problem.gradient_paths.choice)


def read_environment(folder: Path | None) -> dict[str, Any]:
    """The environment of a resumed run; empty if it is missing or unreadable."""
    try:
        content = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _with_path(problem: Any, clients: int, precision: str, environment: dict[str, Any]) -> Any:
    if environment.get("path") is None:
        return problem.with_path("auto", precision, clients)
    recorded = environment["path"], environment.get("precision")
    try:
        return problem.with_path(*recorded, clients)
    except ValueError:
        other = problem.with_path("auto", "auto", clients)
        now = other.gradient_paths.chosen, other.gradient_paths.precision
        text = "the run was begun on the path {} in {}, which does not fit here: {} in {} from now on"
        warn(text.format(*recorded, *now))
        return other


def _recorded_threads(environment: dict[str, Any]) -> int | None:
    number = environment.get("threads")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        return None
    if number > processors():
        text = f"the run was begun with {number} threads, but there are {processors()} processors here"
        warn(f"{text}: its last bits may differ from now on")
        return None
    return number


def processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
