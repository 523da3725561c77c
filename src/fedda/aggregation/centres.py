"""From where a reply has moved: FedAvg's clients reply a model, FedDA's a z that begins at zero.

A bound on a length, or a few large coordinates, make sense for a change alone. So before anything is done to a reply
that is a moved copy of the model that was sent (the task's first tensor), that model is taken off, on the client, and
the server, which sent it, adds it again. A task names these replies: `@on_client(model_replies=(0,))`. The rule: a
reply is a moved copy of the model if, with all gradients zero, it is moved by as much as the model is.
`fedda.testing.check_algorithm` finds these replies by moving the model, and compares them with the task's mark.
"""

from __future__ import annotations

from torch import Tensor

from ..core import ClientTask
from .wrapper import followed


def model_replies(task: ClientTask) -> tuple[int, ...]:
    """Which replies of a task are moved copies of the model that was sent."""
    which: tuple[int, ...] = getattr(task, "model_replies", ())
    return which


def refuse_unmarked(task: ClientTask, down: tuple[Tensor, ...], replies: tuple[Tensor, ...]) -> None:
    """Refuse a task that, with all gradients zero, replies the model that was sent and does not say so."""
    for i, reply in enumerate(replies):
        copied = reply.shape == down[0].shape and bool((reply == down[0]).all())
        if copied and bool(reply.any()) and i not in model_replies(task):
            raise ValueError(
                f"aggregation: reply {i} of {task.__qualname__} is a moved copy of the model that was sent: mark the "
                f"task with @on_client(model_replies=({i},))"
            )


def changes(task: ClientTask) -> ClientTask:
    """The task, replying how far models have moved."""
    which = model_replies(task)
    if not which:
        return task
    return followed(
        task, lambda replies, _, down: tuple(r - down[0] if i in which else r for i, r in enumerate(replies))
    )


def models(task: ClientTask, found: list[Tensor], down: tuple[Tensor, ...]) -> list[Tensor]:
    """What `changes` has taken off, added again."""
    which = model_replies(task)
    return [down[0] + r if i in which else r for i, r in enumerate(found)]
