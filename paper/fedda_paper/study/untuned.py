"""The part of docs/choosing.md for people who do not tune: one setting of each method for all tasks."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from ..tables import markdown
from .methods import StudyMethod, untuned_methods
from .missing import UNTUNED
from .picture import FAR
from .protocol import TUNING, Records, key, read, state
from .studied import TASKS, call, linked
from .summary import best, out

MOST = 2.0  # units that a shortfall counts at most, and that a divergence counts
LEAST = 5  # tasks that must be whole
POINTS = 100 * FAR["accuracy"]  # of a unit
Values = dict[float, float | None]  # by rate: the mean score on validation data; none if a seed diverged

TEXT = f"""\
## Without tuning

What does a method come to if nobody tunes it? The study gave each method the same 8 rates on every task, and one value
for everything else ([rule 12](study.md#the-rules)). *Setting*: with the rate that does best on all tasks of this table
together. Start with it on a network or data of another kind. The cells are points of validation accuracy (text: loss)
behind the best result on that task, of all methods and rates. *On average*: {POINTS:g} points count as much as a loss
of {FAR["loss"]:g}, and at most {POINTS * MOST:g} points count. *On a new task*: the same average, if the rate of each
task is chosen on the others; the table is in this order."""


@dataclass(frozen=True)
class OneSetting:
    """A method with one setting for all tasks."""

    method: StudyMethod
    rate: float  # that does best on all tasks
    behind: dict[str, float]  # by task: its shortfall; infinite if it diverged
    average: float  # of the shortfalls, in units
    unseen: float  # the same, if the rate of each task is chosen on the others

    @property
    def call(self) -> str:
        return call(self.method.name, self.method.words | {self.method.rate: self.rate, "schedule": "cosine"})


def part(results: Path) -> str:
    """The section, if enough tasks are whole."""
    scores = read_values(results)
    found, tasks = one_setting(scores), list(scores)
    if not found:
        return ""
    rows = [
        [linked(each.method.name), f"`{each.call}`", *(cell(each.behind[t], is_loss(scores[t])) for t in tasks),
         f"{POINTS * each.average:.1f}", f"{POINTS * each.unseen:.1f}"]
        for each in found
    ]  # fmt: skip
    kinds = (TASKS[task].short.replace("\n", " ") for task in tasks)
    heads = ["method", "setting", *kinds, "on average", "on a new task"]
    return f"{TEXT}\n\n{markdown(heads, rows)}\n\n"


def in_short(results: Path, docs: str = "") -> str:
    """What to take without tuning, in a sentence."""
    found = one_setting(read_values(results))
    if not found:
        return ""
    best = found[0]
    return (
        f" If you cannot tune at all, begin with {linked(best.method.name, docs)}, `{best.call}`: see "
        f"[without tuning]({docs}choosing.md#without-tuning)."
    )


def cell(behind: float, loss: bool) -> str:
    if math.isinf(behind):
        return "diverged"
    return f"{behind:.2f}" if loss else f"{100 * behind:.1f}"


def is_loss(methods: dict[str, Values]) -> bool:
    return any(value is not None and value < 0 for own in methods.values() for value in own.values())


def read_values(results: Path) -> dict[str, dict[str, Values]]:
    """By task and method; the tasks that were run as a whole."""
    methods = untuned_methods()
    found = {}
    for task in TASKS:
        folder = results / "study" / f"{task}{UNTUNED}"
        kept = read(folder) if folder.is_dir() else {}
        if kept and not any(state(method, kept, 0).jobs for method in methods.values()):
            found[task] = {name: values(method, kept) for name, method in methods.items()}
    return found


def values(method: StudyMethod, kept: Records) -> Values:
    found: Values = {}
    for point in method.grid:
        records = [kept[method.name, "stage2", key(point), seed] for seed in TUNING]
        over = any(map(out, records))
        found[point[method.rate]] = None if over else statistics.fmean(best(r)[1] for r in records)
    return found


def one_setting(scores: dict[str, dict[str, Values]]) -> list[OneSetting]:
    """All methods, the one that loses least on new tasks first."""
    if len(scores) < LEAST:
        return []
    top = {task: max(v for of in own.values() for v in of.values() if v is not None) for task, own in scores.items()}

    def behind(name: str, task: str, rate: float) -> float:
        value = scores[task][name][rate]
        return math.inf if value is None else top[task] - value

    def units(name: str, task: str, rate: float) -> float:
        return min(MOST, behind(name, task, rate) / FAR["loss" if is_loss(scores[task]) else "accuracy"])

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
