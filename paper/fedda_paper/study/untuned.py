"""The part of docs/choosing.md for people who do not tune: one setting of each method for all tasks."""

import math
from dataclasses import dataclass
from pathlib import Path

from ..tables import folded, markdown
from .new_tasks import TASKS as NEW
from .new_tasks import OnNewTasks, compared, read_scores
from .rules import FAR
from .setting import CHOSEN_ON, MOST, OneSetting, chosen_settings
from .studied import TASKS, call, difference, linked, score, t_interval

POINTS = 100 * FAR["accuracy"]  # of a unit

NETWORKS = {"cifar10-small": "Images, small CNN"}
TEXT = """\
## Without tuning

How good is a method without tuning? We tried each method on {old} tasks with the same 8 rates and one value for
everything else, and kept the rate that is best on all of them together ([rule 12](study.md#the-rules)). With this one
setting, each method then ran on {new} new tasks, where nothing was tuned (rule 13). Their networks are new; the data of
three of them are not. `fedda` was designed with the first {old} tasks in view and when the results of the other methods
were known, so only the new tasks are a fair test. {first}"""
ON_NEW = f"""\
Test accuracy (text: test loss) of five seeds; **bold**: not clearly worse than the best of the column. *Behind*: the
shortfall behind the best of each task, in points, on average. A loss of {FAR["loss"] / POINTS:g} counts as a point, and
a shortfall of more than {POINTS * MOST:g} points as {POINTS * MOST:g}."""
ON_OLD = """\
The cells are points of validation accuracy (text: loss) behind the best result on that task, of all methods and rates.
*On average* is as above. *Unseen*: the same average, if the rate of each task is chosen on the others."""


@dataclass(frozen=True)
class Untuned:
    """The setting of every method, and what it came to on new tasks, the best method first."""

    settings: list[OneSetting]
    new: list[OnNewTasks]

    @property
    def calls(self) -> dict[str, str]:
        return {
            each.method.name: call(
                each.method.name, each.method.words | {each.method.rate: each.rate, "schedule": "cosine"}
            )
            for each in self.settings
        }


def read(results: Path) -> Untuned | None:
    """Nothing until all tasks are whole, the new ones and those on which settings are chosen."""
    found, new = chosen_settings(results / "study"), compared(read_scores(results / "study"))
    return Untuned(found, new) if found and new else None


def part(untuned: Untuned | None) -> str:
    """The section."""
    if untuned is None:
        return ""
    first, second = untuned.new[:2]
    intro = TEXT.format(old=len(CHOSEN_ON), new=len(first.scores), first=(
        f"{linked(first.name)} loses least: {POINTS * first.average:.1f} points on average, the next method, "
        f"{linked(second.name)}, {POINTS * second.average:.1f}. {apart(first, second)}"
    ))  # fmt: skip
    about = "\n".join(f"- *{NEW[task].kind}*: {NEW[task].data}; {NEW[task].network}." for task in first.scores)
    details = folded("The tasks on which the settings were chosen", ON_OLD, on_old_tasks(untuned.settings))
    return f"{intro}\n\n{on_new_tasks(untuned.new, untuned.calls)}\n\n{ON_NEW}\n\n{about}\n\n{details}\n\n"


def apart(first: OnNewTasks, second: OnNewTasks) -> str:
    """The differences of two methods on each task, paired by seed."""
    found = []
    for task, values in first.scores.items():
        if (pair := first.against(second, task)) and values:
            loss = values[0] < 0
            found.append(f"*{NEW[task].kind}* {difference(*pair, loss)}{' in the loss' if loss else ' points'}")
    return f"Between these two, paired by seed: {'; '.join(found)}."


def on_new_tasks(found: list[OnNewTasks], calls: dict[str, str]) -> str:
    heads = ["method", "setting", *(NEW[task].kind for task in found[0].scores), "behind"]
    rows = [
        [linked(each.name), f"`{calls[each.name]}`",
         *(reached(values, each.good[task]) for task, values in each.scores.items()), f"{POINTS * each.average:.1f}"]
        for each in found
    ]  # fmt: skip
    return markdown(heads, rows)


def on_old_tasks(found: list[OneSetting]) -> str:
    kinds = (NETWORKS.get(task) or TASKS[task].short.replace("\n", " ") for task in CHOSEN_ON)
    rows = [
        [linked(each.method.name), f"{each.rate:g}",
         *(shortfall(each.behind[task], task.startswith("shakespeare")) for task in CHOSEN_ON),
         f"{POINTS * each.average:.1f}", f"{POINTS * each.unseen:.1f}"]
        for each in found
    ]  # fmt: skip
    return markdown(["method", "rate", *kinds, "on average", "unseen"], rows)


def in_short(untuned: Untuned | None, docs: str = "") -> str:
    """What to take without tuning, in a sentence."""
    if untuned is None:
        return ""
    first, second = untuned.new[:2]
    pairs = [pair for task in first.scores if (pair := first.against(second, task))]
    clear, worse = (sum(sign * mean > half for mean, half in pairs) for sign in (1, -1))
    return (
        f"**If you do not tune, take {linked(first.name, docs)}**, `{untuned.calls[first.name]}`. Of "
        f"{len(untuned.new)} methods with one setting each it loses least on {len(first.scores)} new tasks. It is "
        f"clearly better than {linked(second.name, docs)}, the next, on {clear} of them and clearly worse on {worse} "
        f"([table]({docs}choosing.md#without-tuning))."
    )


def reached(values: list[float] | None, good: bool) -> str:
    if values is None:
        return "diverged"
    return f"**{score(*t_interval(values))}**" if good else score(*t_interval(values))


def shortfall(behind: float, loss: bool) -> str:
    if math.isinf(behind):
        return "diverged"
    return f"{behind:.2f}" if loss else f"{100 * behind:.1f}"
