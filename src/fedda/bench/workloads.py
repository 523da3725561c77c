"""The two workloads: one is limited by dispatch, the other by arithmetic."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..problems import load, problem
from ..problems.models import cnn, mlp
from ..problems.neural import Neural

DIGITS, CIFAR = (64,), (3, 32, 32)  # shapes of a sample


@dataclass(frozen=True)
class Workload:
    """A task, its clients, how many of them take part in a round, and their steps."""

    name: str
    about: str
    clients: int
    cohort: int
    steps: int = 5
    batch: int = 16
    random: bool = False  # whether the samples are noise, which does not change the time
    build: Callable[[], Neural] | None = None  # the problem of an experiment

    def problem(self) -> Neural:
        if self.build is not None:
            return self.build()
        if self.random:
            return noise(CIFAR, self.clients, self.batch, samples=1000)
        return load("digits", clients=self.clients, partition="iid", model="mlp", hidden=32, batch=self.batch)


SMALL = Workload("small", "digits, MLP 64-32-10", clients=100, cohort=10)
CNN = Workload("cnn", "the paper's CNN, 4 x 64 filters, on 3x32x32 images", clients=10, cohort=10, random=True)
WORKLOADS = {workload.name: workload for workload in (SMALL, CNN)}


def noise(shape: tuple[int, ...], clients: int, batch: int, samples: int, **model: Any) -> Neural:
    """Random samples of ten classes and a model for them: images as bytes for the CNN, vectors for the MLP."""
    generator = torch.Generator().manual_seed(0)
    n, images = clients * samples, len(shape) == 3
    x = torch.randint(256, (n, *shape), generator=generator, dtype=torch.uint8)
    y = torch.randint(10, (n,), generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network, loss = cnn(shape, 10, **model) if images else mlp(shape, 10, **model)
    scale = (torch.full((shape[0], 1, 1), 127.5), torch.full((shape[0], 1, 1), 73.9)) if images else None
    values = x if images else x / 255.0
    return problem(network, loss, x=values, y=y, client=torch.arange(n) // samples, batch=batch, scale=scale)
