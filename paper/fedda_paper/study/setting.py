"""One setting of each method for all tasks: which rate it is, by the records of the pieces that try the same rates on
every task."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .methods import TUNING, StudyMethod, untuned_methods
from .protocol import Records, key, read, state
from .rules import FAR
from .summary import best, out

UNTUNED = "-untuned"  # the end of the folder of such a piece
# The tasks on which the settings for new tasks are chosen, with the seeds.
CHOSEN_ON = {
    **dict.fromkeys((
        "digits-heterogeneous", "digits-many", "breast-cancer", "femnist-perceptron", "shakespeare-gru",
        "shakespeare-small",
    ), TUNING),
    "cifar10-small": TUNING[:1],
}  # fmt: skip
MOST = 2.0  # units that a shortfall counts at most, and that a divergence counts
Reader = Callable[[Path], Records]  # `read`, or one that remembers what it has read
Values = dict[float, float | None]  # by rate: the mean score on validation data; none if a seed diverged


@dataclass(frozen=True)
class OneSetting:
    """A method with one setting for all tasks."""

    method: StudyMethod
    rate: float  # that does best on all tasks
    behind: dict[str, float]  # by task: its shortfall; infinite if it diverged
    average: float  # of the shortfalls, in units
    unseen: float  # the same, if the rate of each task is chosen on the others


def is_loss(methods: dict[str, Values]) -> bool:
    return any(value is not None and value < 0 for own in methods.values() for value in own.values())


def in_units(behind: float, loss: bool) -> float:
    """A shortfall in units that tasks share, at most `MOST`."""
    return min(MOST, behind / FAR["loss" if loss else "accuracy"])


def read_values(study: Path, tasks: dict[str, tuple[int, ...]], reader: Reader = read) -> dict[str, dict[str, Values]]:
    """By task and method; the tasks that were run as a whole."""
    found = {}
    for task, seeds in tasks.items():
        methods = untuned_methods(seeds)
        folder = study / f"{task}{UNTUNED}"
        kept = reader(folder) if folder.is_dir() else {}
        if kept and not any(state(method, kept, 0).jobs for method in methods.values()):
            found[task] = {name: values(method, kept, seeds) for name, method in methods.items()}
    return found


def values(method: StudyMethod, kept: Records, seeds: tuple[int, ...]) -> Values:
    found: Values = {}
    for point in method.grid:
        records = [kept[method.name, "stage2", key(point), seed] for seed in seeds]
        over = any(map(out, records))
        found[point[method.rate]] = None if over else statistics.fmean(best(r)[1] for r in records)
    return found


def one_setting(scores: dict[str, dict[str, Values]]) -> list[OneSetting]:
    """All methods, the one first that loses least if the rate of each task is chosen on the others."""
    top = {task: max(v for of in own.values() for v in of.values() if v is not None) for task, own in scores.items()}

    def behind(name: str, task: str, rate: float) -> float:
        value = scores[task][name][rate]
        return math.inf if value is None else top[task] - value

    def units(name: str, task: str, rate: float) -> float:
        return in_units(behind(name, task, rate), is_loss(scores[task]))

    def safest(name: str, tasks: list[str]) -> float:
        return min(next(iter(scores.values()))[name], key=lambda rate: sum(units(name, task, rate) for task in tasks))

    found = []
    for name, method in untuned_methods().items():
        rate = safest(name, list(scores))
        others = {task: safest(name, [other for other in scores if other != task]) for task in scores}
        found.append(OneSetting(
            method, rate, {task: behind(name, task, rate) for task in scores},
            statistics.fmean(units(name, task, rate) for task in scores),
            statistics.fmean(units(name, task, others[task]) for task in scores),
        ))  # fmt: skip
    return sorted(found, key=lambda each: each.unseen)


def chosen_settings(study: Path, reader: Reader = read) -> list[OneSetting]:
    """The settings for new tasks; none until the records that they are chosen from are whole."""
    scores = read_values(study, CHOSEN_ON, reader)
    return one_setting(scores) if len(scores) == len(CHOSEN_ON) else []
