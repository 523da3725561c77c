"""From where a reply has moved: FedAvg's clients reply a model, FedDA's a z that begins at zero.

A bound on a length, or a few large coordinates, make sense for a change alone. So before anything is done to a reply
that is a moved copy of the model that was sent (the task's first tensor), that model is taken off, on the client, and
the server, which sent it, adds it again. The rule, for every task: a reply is a moved copy of the model if, with all
gradients zero, it is moved by as much as the model is. tests/test_aggregation.py finds these replies by running every
task of every registered algorithm, and compares them with the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from ..core import ClientTask
from .wrapper import followed

A = TypeVar("A")

# Which replies of a task are moved copies of its first tensor. By the function, not the class: one that overrides
# another may reply something else.
MOVED: dict[str, tuple[int, ...]] = {
    "FedDA.first": (),
    "FedDA.local": (2,),  # z, nu, and for averaging = primal X
    "FedDA.local_and_squares": (3,),  # the squares, and then the same
    "FedDACV.local": (),  # z, nu, the change of c, and for v_input = gradients the squares
    "FedAvg.local": (0,),
    "FedAvgSubgradient.local": (0,),
    "FedProx.local": (0,),
    "FedMiD.local": (0,),
    "FedExP.change": (),
    "FedCM.local": (0,),
    "FedDualAvg.local": (),
    "FedDyn.local": (0,),
    "FedGlomo.local": (),
    "Fafed.first": (),
    "Fafed.local": (0,),  # X, m, v
    "LocalAdapt.local": (),
    "LocalAmsgrad.first": (),
    "LocalAmsgrad.local": (0,),  # X, and v, m
    "Mime.statistics": (),
    "Mime.local": (0,),  # y, and for MimeLite the full gradient
    "MimeMvr.statistics": (),
    "MimeMvr.local": (0,),
    "Scaffold.local": (),
    "Stem.first": (),
    "Stem.local": (0,),
}


def moved(*replies: int) -> Callable[[A], A]:
    """Say of a task of one's own which of its replies are moved copies of the first tensor that is sent.

    >>> from fedda import on_client
    >>> @moved(0)
    ... @on_client
    ... def local(self, client, x, t):
    ...     return x - 0.1 * client.gradients(x)[0], t
    >>> moved_replies(local)
    (0,)
    """

    def mark(task: A) -> A:
        task.moved = replies  # type: ignore[attr-defined]
        return task

    return mark


def moved_replies(task: ClientTask) -> tuple[int, ...]:
    """Which replies are moved copies of the model; a task that nobody has spoken of is refused."""
    name = getattr(task, "__qualname__", repr(task))
    if hasattr(task, "moved"):
        found: tuple[int, ...] = task.moved
        return found
    if getattr(task, "__module__", "").startswith("fedda.algorithms.") and name in MOVED:
        return MOVED[name]
    raise ValueError(
        f"aggregation: which replies of {name} are moved copies of the model that is sent? mark the task with "
        "@fedda.aggregation.moved(0) if the first is, with @fedda.aggregation.moved() if none is"
    )


def changes(task: ClientTask) -> ClientTask:
    """The task, replying how far models have moved."""
    which = moved_replies(task)
    if not which:
        return task
    return followed(
        task, lambda replies, _, down: tuple(r - down[0] if i in which else r for i, r in enumerate(replies))
    )


def models(task: ClientTask, found: list[Tensor], down: tuple[Tensor, ...]) -> list[Tensor]:
    """What `changes` has taken off, added again."""
    which = moved_replies(task)
    return [down[0] + r if i in which else r for i, r in enumerate(found)]
