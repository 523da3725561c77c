"""Differential privacy of each client's data: the Gaussian mechanism on the mean of replies of bounded length."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import rng
from ..checks import AT_LEAST_ZERO, number
from ..core import Algorithm, ClientTask, Problem, place
from .accounting import epsilon
from .clip import check_norm, clipped, norms
from .foreseen import foreseen
from .registered import aggregations
from .robust import one
from .wrapper import Exchange, Wrapper, followed


@aggregations.register("noise")
@dataclass(frozen=True)
class Noise(Wrapper):
    """Clips every client's change to `norm` and adds Gaussian noise to the mean over the r clients that were asked.

        (1 / r) (sum_k u_k min(1, norm / ||u_k||) + multiplier norm xi),   xi standard normal, u_k = 0 for who is silent

    `norm` is as `Clip` takes it. Changes are clipped on the client, so that nothing longer leaves it, and again on the
    server, so that the guarantee hangs on nothing that happens in between. The denominator is fixed and all clients
    weigh the same, since who is heard, and how many samples they have, are data too. The noise is a function of (seed,
    round, exchange, reply). What is guaranteed, and what is not: docs/aggregation.md.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0]] * 100, b=[[2.0]] * 100)
    >>> run = fedda.train(fedda.make("fedavg", lr=0.5), problem, rounds=30, aggregation=[Noise(1.0, norm=1.0)])
    >>> bool(abs(run.x - 2.0) < 0.1)  # noise of 0.01 a round
    True
    """

    reduces = True
    multiplier: Any
    norm: Any

    def __post_init__(self) -> None:
        number("Noise", "multiplier", self.multiplier, AT_LEAST_ZERO)
        check_norm("Noise", self.norm, most=sys.float_info.max)

    @property
    def combines(self) -> bool:
        return True

    def on_client(self, task: ClientTask) -> ClientTask:
        name = task.__name__
        return followed(task, lambda replies, *_: tuple(clipped("Noise", self.norm, name, replies)))

    def fits(self, task: str, replies: int) -> None:
        norms("Noise", self.norm, task, replies)

    def combine(self, replies: list[Tensor], weights: Tensor, exchange: Exchange) -> tuple[list[Tensor], Tensor]:
        task, size, key = exchange
        found = []
        for i, (reply, most) in enumerate(
            zip(
                clipped("Noise", self.norm, task, replies),
                norms("Noise", self.norm, task, len(replies)),
                strict=True,
            )
        ):
            total = torch.where(weights > 0, reply.double(), 0).sum(dim=-2, keepdim=True)
            coordinates = torch.arange(reply.shape[-1], device=reply.device)
            xi = rng.normal(rng.fold(rng.fold(key, i)[..., None], coordinates))  # [..., 1, m]
            found.append(((total + self.multiplier * most * xi) / size).to(reply.dtype))
        return found, one(weights)

    def epsilon(
        self,
        algorithm: Algorithm,
        problem: Problem,
        rounds: int,
        delta: float,
        cohort: int | None = None,
        aggregation: Sequence[Wrapper] = (),
    ) -> float:
        """The epsilon of (epsilon, delta)-differential privacy after so many rounds, by the package dp-accounting
        (``pip install "fedda[privacy]"``): for all replies, in all rounds, of one client whose data are replaced.
        `aggregation` are the wrappers of the run: where clients remember something between rounds (the algorithm's
        memory, or residuals of a compression), what they send says who took part before, and no credit is given for
        the cohort being a secret."""
        x = problem.start(0)[None]
        algorithm = place(algorithm, x, problem.layout)
        start, each = foreseen(algorithm, x)
        remembering = bool(algorithm.memory) or any(wrapper.remembers("local", 1) for wrapper in aggregation)
        return epsilon(
            self.multiplier,
            start=sum(len(asked.replies) for asked in start),
            each=sum(len(asked.replies) for asked in each),
            rounds=rounds,
            cohort=problem.clients if cohort is None else cohort,
            clients=problem.clients,
            delta=delta,
            secret=not remembering,
        )
