"""Data set, partition and model by name, in one call."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import rng
from ..checks import check, nearest
from ..data import Dataset, open_dataset
from ..data.datasets import moments
from ..data.holdout import validation_mask
from ..data.partition import ARGUMENTS, split
from ..registry import Entry, models, partitions
from . import models as _models  # noqa: F401  registers the models
from .from_arrays import problem, refuse_nothing_held, refuse_share
from .neural import Loss, Neural, flatten

CLIENTS = 10  # where neither the user nor the data says
SHIFT = 0.5  # between the classes of the two parts; two random parts of LEAF's FEMNIST have 0.05


def load(
    name: str,
    clients: int | None = None,
    partition: str = "iid",
    model: str = "mlp",
    batch: int = 16,
    seed: int = 0,
    validation: bool | float | None = False,
    resplit: bool = False,
    dtype: torch.dtype = torch.float32,
    device: Any = None,
    **options: Any,
) -> Neural:
    """A data set (a name, a .npz file or a folder of images) over clients with a model; options go to the partition
    (rho, alpha) and the model (hidden, filters). There are 10 `clients` by default, with the partition `by_client` all
    that the data names. `seed` is the partition's; a run's own seed chooses the model's first parameters.
    With `resplit`, training and test samples are put together and divided anew, at random within each owner.
    With `validation=0.1`, that share of each client's training samples is held out, never trained on, and gives
    `validation_loss` and `validation_accuracy` beside those of the test set. With `validation=True`, a fifth of the
    training samples takes the place of the test set, as a sweep does it.

    >>> import fedda
    >>> fedda.load("digits", clients=10, partition="dominant_class", rho=0.8, model="mlp", hidden=32).d
    2410
    """
    check("load", batch=batch)
    sharing, building = partitions.find(partition), models.find(model)
    takes = [set(options_of(entry)) for entry in (sharing, building)]
    for word in options:
        if word not in takes[0] | takes[1]:
            owners = [e.name for e in (*partitions, *models) if word in e.defaults]
            hint = f"it belongs to {', '.join(owners)}" if owners else nearest(word, takes[0] | takes[1])
            raise ValueError(f"load: no option {word!r} with {partition} and {model}; {hint}")
    how, what = ({k: v for k, v in options.items() if k in taken} for taken in takes)
    data = open_dataset(name)
    if resplit:
        data = data.resplit()
    elif data.shift() > SHIFT:
        warnings.warn(
            f"{name}: its test part has other classes than its training part (a distance of {data.shift():.2f} from "
            "0 to 1): resplit = true divides both anew",
            stacklevel=2,
        )
    data = data.validation() if validation is True else data
    held_share = None if isinstance(validation, bool) or validation is None else refuse_share("load", validation)
    owned = names_owners(partition)
    if clients is None:
        clients = len(np.unique(data.client)) if owned and data.client is not None else CLIENTS
    check("load", clients=clients)
    owner = split(partition, data.y, clients, seed, data.client, **how)
    if owned and data.client_test is not None:
        data = _tested_on(data, np.unique(np.asarray(data.client)[owner >= 0]))

    def build(seed: int) -> tuple[nn.Module, Loss]:
        # PyTorch's own initialisation, from a stream of the run's seed, without touching the user's generator
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.key(seed, rng.MODEL)))
            made: tuple[nn.Module, Loss] = building(shape=tuple(data.x.shape[1:]), classes=data.classes, **what)
            return made

    network, loss = build(0)
    keep, mapped, validated = owner >= 0, isinstance(data.x, np.memmap), None
    if held_share is not None:
        held = validation_mask(owner, data.y, held_share)
        refuse_nothing_held("load", held, held_share)
        keep, validated = keep & ~held, (np.array(data.x[held]), np.array(data.y[held]))
        if data.mean is not None:  # what is held out is not looked at
            mean, std = moments(data.x, np.flatnonzero(~held))
            data = data._replace(mean=mean, std=std)
    made = problem(
        network,
        loss,
        x=data.x if mapped else data.x[keep],
        rows=np.flatnonzero(keep) if mapped else None,
        y=data.y[keep],
        client=owner[keep],
        batch=batch,
        test=(np.array(data.x_test), np.array(data.y_test)),  # what is read from a file may not be written to
        validation=validated,
        init=lambda s: flatten(build(s)[0]),
        scale=None if data.mean is None or data.std is None else (_sample(data.mean), _sample(data.std)),
    )
    return made.to(device, dtype)


def names_owners(partition: str) -> bool:
    """Whether a partition takes the owners that the data names."""
    return "client" in partitions.find(partition).defaults


def options_of(entry: Entry) -> dict[str, Any]:
    """The words of a partition or a model that a user gives, with their defaults: all but what `load` hands on."""
    return {k: v for k, v in entry.defaults.items() if k not in (*ARGUMENTS, "shape", "classes")}


def _tested_on(data: Dataset, clients: np.ndarray) -> Dataset:
    """The test samples of the clients that take part alone."""
    tested = np.isin(np.asarray(data.client_test), clients)
    return data._replace(x_test=data.x_test[tested], y_test=data.y_test[tested])


def _sample(channels: np.ndarray) -> np.ndarray:
    """A number for each channel, to go with [channels, height, width]."""
    return np.array(channels)[:, None, None]
