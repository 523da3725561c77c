"""The parts as numbers: runs, local steps and, by the kept times of the same methods, the seconds that are left."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .parts import Part, PartList
from .pool import experiments, pool_runs, winners


@dataclass
class Estimate:
    """A part of the plan; `seconds` is for the runs that are left, `untimed` counts those without a kept time."""

    part: str
    runs: int = 0
    done: int = 0
    steps: int = 0
    seconds: float = 0.0
    untimed: int = 0


def estimate(plan: PartList, parts: list[Part], work: Path, times: list[dict[str, Any]]) -> list[Estimate]:
    """Every part with what is left of it. A run that several parts share counts in the first."""
    rates, counted = seconds_per_step(times), set[Any]()
    estimates = []
    for part in parts:
        runs = [
            (run, run.name if known else (part.setting, run.name), known and run.done, len(experiment.seeds))
            for experiment, known in experiments(plan, part, work)
            for run in pool_runs(experiment, work)
        ]
        for name in part.sweeps:
            replicas = len(plan.sweeps[name]["rates"]) * len(plan.sweeps[name]["seeds"])
            done = winners(work, name) is not None
            runs += [(run, (name, run.name), done, replicas) for run in pool_runs(plan.searched(name), work)]
        row = Estimate(part.name)
        for run, key, done, replicas in runs:
            if key in counted:
                continue
            counted.add(key)
            rate = rates.get((run.experiment.problem.data, run.algorithm))
            row.runs, row.done, row.steps = row.runs + 1, row.done + done, row.steps + run.steps
            if not done:
                row.seconds += (rate or 0.0) * run.steps * replicas
                row.untimed += rate is None
        estimates.append(row)
    return estimates


def seconds_per_step(times: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """Seconds per local step and replica by data and algorithm, evaluations included, from the rows of `times.json`.

    If several processes shared the device, their times are scaled to the clock.
    """
    spans = [(began, wall) for row in times for began, wall in row["spans"]]
    share = covered(spans) / (math.fsum(wall for _, wall in spans) or 1.0)
    finished = [row for row in times if row.get("done")]
    return {
        (row["data"], row["algorithm"]): share * sum(wall for _, wall in row["spans"]) / (row["steps"] * row["seeds"])
        for row in finished
    }


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The seconds in the union of spans (beginning, seconds).

    >>> covered([(0.0, 10.0), (5.0, 10.0), (20.0, 1.0)])
    16.0
    """
    total, until = 0.0, -math.inf
    for began, seconds in sorted(spans):
        total += max(0.0, began + seconds - max(began, until))
        until = max(until, began + seconds)
    return total
