"""The part of docs/choosing.md for people who do not tune: one setting of each method for all tasks."""

import math
from pathlib import Path

from ..tables import markdown
from .rules import FAR
from .setting import MOST, OneSetting, Values, is_loss, one_setting, read_values
from .studied import TASKS, call, linked

LEAST = 5  # tasks that must be whole
POINTS = 100 * FAR["accuracy"]  # of a unit

TEXT = f"""\
## Without tuning

What does a method come to if nobody tunes it? The study gave each method the same 8 rates on every task, and one value
for everything else ([rule 12](study.md#the-rules)). *Setting*: with the rate that does best on all tasks of this table
together. Start with it on a network or data of another kind. The cells are points of validation accuracy (text: loss)
behind the best result on that task, of all methods and rates. *On average*: {POINTS:g} points count as much as a loss
of {FAR["loss"]:g}, and at most {POINTS * MOST:g} points count. *On a new task*: the same average, if the rate of each
task is chosen on the others; the table is in this order."""


def settings_of(results: Path) -> tuple[list[OneSetting], dict[str, dict[str, Values]]]:
    """The settings of all methods, and what they were chosen from; nothing if too few tasks are whole."""
    scores = read_values(results / "study", TASKS)
    return (one_setting(scores) if len(scores) >= LEAST else []), scores


def call_of(each: OneSetting) -> str:
    return call(each.method.name, each.method.words | {each.method.rate: each.rate, "schedule": "cosine"})


def part(results: Path) -> str:
    """The section, if enough tasks are whole."""
    found, scores = settings_of(results)
    tasks = list(scores)
    if not found:
        return ""
    rows = [
        [linked(each.method.name), f"`{call_of(each)}`", *(cell(each.behind[t], is_loss(scores[t])) for t in tasks),
         f"{POINTS * each.average:.1f}", f"{POINTS * each.unseen:.1f}"]
        for each in found
    ]  # fmt: skip
    kinds = (TASKS[task].short.replace("\n", " ") for task in tasks)
    heads = ["method", "setting", *kinds, "on average", "on a new task"]
    return f"{TEXT}\n\n{markdown(heads, rows)}\n\n"


def in_short(results: Path, docs: str = "") -> str:
    """What to take without tuning, in a sentence."""
    found, _ = settings_of(results)
    if not found:
        return ""
    best = found[0]
    return (
        f" If you cannot tune at all, begin with {linked(best.method.name, docs)}, `{call_of(best)}`: see "
        f"[without tuning]({docs}choosing.md#without-tuning)."
    )


def cell(behind: float, loss: bool) -> str:
    if math.isinf(behind):
        return "diverged"
    return f"{behind:.2f}" if loss else f"{100 * behind:.1f}"
