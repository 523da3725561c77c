"""Data set, partition and model by name, in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import rng
from ..checks import check, nearest
from ..data.partition import GIVEN, split
from ..registry import Entry, datasets, models, partitions
from . import models as _models  # noqa: F401  registers the models
from .neural import Loss, Neural, flatten
from .own import problem


def load(
    name: str,
    clients: int = 10,
    partition: str = "iid",
    model: str = "mlp",
    batch: int = 16,
    seed: int = 0,
    validation: bool = False,
    dtype: torch.dtype = torch.float32,
    device: Any = None,
    **options: Any,
) -> Neural:
    """A data set over clients with a model, all by name; options go to the partition (rho, alpha) and the model
    (hidden, filters). `seed` is the partition's; a run's own seed chooses the model's first parameters.
    With `validation`, a fifth of the training samples takes the place of the test set: for choosing hyper-parameters.

    >>> import fedda
    >>> fedda.load("digits", clients=10, partition="dominant_class", rho=0.8, model="mlp", hidden=32).d
    2410
    """
    check("load", clients=clients, batch=batch)
    data = datasets.find(name)()
    data = data.validation() if validation else data
    sharing, building = partitions.find(partition), models.find(model)
    takes = [set(options_of(entry)) for entry in (sharing, building)]
    for word in options:
        if word not in takes[0] | takes[1]:
            owners = [e.name for e in (*partitions, *models) if word in e.defaults]
            hint = f"it belongs to {', '.join(owners)}" if owners else nearest(word, takes[0] | takes[1])
            raise ValueError(f"load: no option {word!r} with {partition} and {model}; {hint}")
    how, what = ({k: v for k, v in options.items() if k in taken} for taken in takes)
    owner = torch.as_tensor(split(partition, data.y, clients, seed, data.client, **how))
    keep = owner >= 0

    def build(seed: int) -> tuple[nn.Module, Loss]:
        # PyTorch's own initialisation, from a stream of the run's seed, without touching the user's generator
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.key(seed, rng.MODEL)))
            made: tuple[nn.Module, Loss] = building(shape=tuple(data.x.shape[1:]), classes=data.classes, **what)
            return made

    network, loss = build(0)
    arrays = {"x": torch.as_tensor(data.x)[keep], "y": torch.as_tensor(data.y)[keep], "client": owner[keep]}
    made = problem(
        network,
        loss,
        **arrays,
        batch=batch,
        test=(data.x_test, data.y_test),
        init=lambda s: flatten(build(s)[0]),
    )
    return made.to(device, dtype)


def options_of(entry: Entry) -> dict[str, Any]:
    """The words of a partition or a model that a user gives, with their defaults: all but what `load` hands on."""
    return {k: v for k, v in entry.defaults.items() if k not in (*GIVEN, "shape", "classes")}
