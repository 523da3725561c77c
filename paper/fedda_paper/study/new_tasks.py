"""What the methods come to on new tasks, where every method has the setting that was chosen on other tasks."""

import math
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .methods import FINALS
from .missing import PIECES, methods_of
from .protocol import key, read, state
from .setting import in_units
from .studied import StudyTask, t_interval
from .summary import best, out

SMALL = "5 local steps, on a CPU in float32"
TASKS = {
    "femnist-small": StudyTask(
        "Handwriting, a small CNN",
        "FEMNIST, 20 of 400 writers per round",
        f"four convolutions of 16 filters, 400 rounds, {SMALL}",
    ),
    "femnist-linear": StudyTask(
        "Handwriting, a linear model",
        "FEMNIST, 20 of 400 writers per round",
        f"multinomial logistic regression, 400 rounds, {SMALL}",
    ),
    "colon-batchnorm": StudyTask(
        "Histology, a CNN with BatchNorm",
        "patches of colon nuclei, 8 clients, 80 % of a client's patches are of one class",
        f"four convolutions of 8 filters with BatchNorm, 120 rounds, {SMALL}. The statistics of BatchNorm are those of "
        "mini-batches of almost one class, and no method learns much",
    ),
    "shakespeare-deep": StudyTask(
        "Text, a transformer of two layers",
        "the next character of Shakespeare's plays, 10 of 99 speaking roles per round",
        f"a transformer with two layers of width 16, 160 rounds, {SMALL}",
    ),
}
Scores = dict[str, list[float] | None]  # by method: the test scores of all seeds; none if a seed diverged


def read_scores(study: Path) -> dict[str, Scores]:
    """By task and method; nothing until all new tasks are whole."""
    found: dict[str, Scores] = {}
    reader = cache(read)
    for task in TASKS:
        piece = next(piece for piece in PIECES if piece.folder == task)
        kept, methods = reader(study / task), methods_of(piece, study, reader)
        if not methods or any(state(method, kept, 0).jobs for method in methods.values()):
            return {}
        found[task] = {}
        for name, method in methods.items():
            records = [kept[name, "finals", key(method.grid[0]), seed] for seed in FINALS]
            over = any(map(out, records))
            found[task][name] = None if over else [best(record, "test")[1] for record in records]
    return found


@dataclass(frozen=True)
class OnNewTasks:
    """What a method came to."""

    name: str
    scores: dict[str, list[float] | None]  # by task
    good: dict[str, bool]  # by task: not clearly worse than the best
    average: float  # of the shortfalls behind the best of each task, in units

    def against(self, other: "OnNewTasks", task: str) -> tuple[float, float] | None:
        """The difference on a task, paired by seed, and its t interval; none if a seed of either diverged."""
        return paired(self.scores[task], other.scores[task])


def paired(one: list[float] | None, other: list[float] | None) -> tuple[float, float] | None:
    return t_interval([a - b for a, b in zip(one, other, strict=True)]) if one and other else None


def compared(scores: dict[str, Scores]) -> list[OnNewTasks]:
    """All methods, the one with the smallest shortfalls first."""
    found = []
    for name in next(iter(scores.values()), {}):
        units, good = [], {}
        for task, own in scores.items():
            top = max((values for values in own.values() if values), key=statistics.fmean)
            values = own[name]
            behind = statistics.fmean(top) - statistics.fmean(values) if values else math.inf
            units.append(in_units(behind, top[0] < 0))
            difference = paired(values, top)
            good[task] = difference is not None and sum(difference) >= 0
        found.append(OnNewTasks(name, {t: own[name] for t, own in scores.items()}, good, statistics.fmean(units)))
    return sorted(found, key=lambda each: each.average)
