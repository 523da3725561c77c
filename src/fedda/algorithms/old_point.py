"""The point at which a round's first variance-reduced step takes its old gradient.

A step of MVR compares two gradients of one batch: one at the new point, one at the point before it. In the first step
of a round the point before it can be read in two ways. With `old_point="own"` it is the last point of the client
itself, from before the average. With `old_point="server"` it is the average x that the server sends.
"""

import torch
from torch import Tensor

from ..core import Client, Number

CHOICES = ("own", "server")
MEMORY = ("X", Number("t"))  # the client's last point, and the step at which its last round ended


def own_point(client: Client, x: Tensor, t: Tensor) -> Tensor:
    """The client's last point if it took part in the round that made x, and x if it did not.

    That round ended at step t. A client that was away, or whose reply was lost, remembers an earlier step. A client
    that has never taken part remembers step 0, at which no round ends.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> run = fedda.Run(fedda.make("stem", steps=5), problem, cohort=1)
    >>> _ = run.step()
    >>> run.simulation.memory["t"].flatten().tolist()  # client 1 took part
    [0.0, 5.0]
    """
    took_part = (client.memory["t"] == t) & (t > 0)
    return torch.where(took_part, client.memory["X"], x)


def keep_point(client: Client, X: Tensor, t: Tensor) -> None:
    """Remember the last point of a round that ends at step t."""
    client.memory["X"], client.memory["t"] = X, t
