"""A problem from the names of a data set, a partition and a model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import rng
from ..checks import check, nearest, warn
from ..data import open_dataset
from ..data.datasets import moments
from ..data.partition import ARGUMENTS, split
from ..registry import Entry, models, partitions
from . import models as _models  # noqa: F401  registers the models
from . import sequences as _sequences  # noqa: F401  as above
from .from_arrays import check_share, problem, validation_samples
from .metrics import Function
from .neural import Device, Loss, Neural, flatten, freeze_others

CLIENTS = 10  # if neither the user nor the data gives their number
LARGE = 100.0  # a deviation of the targets for which the usual rates diverge
SHIFT = 0.5  # between the classes of the training and the test part; two random parts of LEAF's FEMNIST have 0.05


def load(
    name: str,
    clients: int | None = None,
    partition: str = "iid",
    model: str | nn.Module = "mlp",
    batch: int = 16,
    seed: int = 0,
    validation: bool | float | None = False,
    resplit: bool = False,
    dtype: torch.dtype = torch.float32,
    device: Device = None,
    loss: Loss | None = None,
    target: str | None = None,
    client: str | None = None,
    ignore: str | Sequence[str] = (),
    missing: str = "refuse",
    task: str | None = None,
    augment: Any = None,
    trainable: str | Sequence[str] | None = None,
    personal: str | Sequence[str] | None = None,
    personal_lr: Any = None,
    metrics: Mapping[str, Function] | Sequence[str] | None = None,
    **options: Any,
) -> Neural:
    """A problem from a data set, a partition over clients, and a model.

    Args:
        name: a data set (`fedda list data`), a .npz, .csv or .parquet file, or a folder of images by class.
        clients: how many; 10 by default, and with the partition `by_client` all that the data names.
        partition: how the samples are divided (`fedda list partitions`).
        model: a name (`fedda list models`), or an nn.Module with its `loss`.
        batch: samples in a mini-batch.
        seed: the seed of the partition. The seed of a run gives the first parameters of the model.
        validation: a share of each client's training samples to hold out, such as 0.1, next to the test set; True
            replaces the test set by a fifth of the training samples, as in a sweep.
        resplit: join training and test samples and divide them again, at random within each owner.
        dtype: the dtype of the model.
        device: where the problem is, such as "cuda".
        loss: with an nn.Module: a function of its output and the target, a mean over the batch. Models by name have
            their own.
        target: in a table, the column to predict.
        client: in a table, the column that says who owns a row.
        ignore: in a table, the columns that are not features.
        missing: in a table, "drop" leaves out rows with gaps, with a warning; "refuse" (the default) names the gaps.
        task: in a table, what the target is: "regression" or "classes". By default decimal points mean regression.
        augment: changes training samples at random, as they are drawn: a function as in `fedda.augment`, a name such as
            "crop_flip", a table such as {"kind": "crop", "pad": 2}, or a list of these.
        trainable: the parameters to train, by a pattern such as "head.*" or a list of patterns; all by default. All
            others are frozen, like those with `requires_grad=False`: they are shared by all clients and never sent.
        personal: patterns of parameters that stay on their clients and are never sent (FedPer, FedBN). Each of a
            client's mini-batches moves them by one gradient step. Samples are evaluated with the parameters of their
            client; without owners, with the mean over clients.
        personal_lr: the rate of the personal parameters, a number or a schedule; by default the algorithm's `lr`.
        metrics: functions f(output, target) by name, or a list of names such as ["f1"] (`fedda list metrics`). Higher
            is better, unless it is `fedda.Metric(f, higher_is_better=False)`. Rows get `train_NAME`, `validation_NAME`
            and `test_NAME`.
        options: of the partition (rho, alpha) and of the model (hidden, filters).

    >>> import fedda
    >>> fedda.load("digits", clients=10, partition="dominant_class", rho=0.8, model="mlp", hidden=32).d
    2410
    """
    check("load", batch=batch)
    partition = partition_of(partition, client)
    if (loss is None) == isinstance(model, nn.Module):
        raise ValueError("load: a module needs its loss, model=module and loss=function; a model by name has its own")
    by_name = None if isinstance(model, nn.Module) else models.find(model)
    sharing = partitions.find(partition)
    known = [set(options_of(sharing)), set(options_of(by_name)) if by_name else set()]
    for option in options:
        if option not in known[0] | known[1]:
            owners = [e.name for e in (*partitions, *models) if option in e.defaults]
            hint = f"it belongs to {', '.join(owners)}" if owners else nearest(option, known[0] | known[1])
            called = by_name.name if by_name else "a module of your own"
            raise ValueError(f"load: no option {option!r} with {partition} and {called}; {hint}")
    partition_options, model_options = ({k: v for k, v in options.items() if k in names} for names in known)
    data = open_dataset(name, target=target, client=client, ignore=ignore, missing=missing, task=task)
    if resplit:
        data = data.resplit()
    elif data.shift() > SHIFT:
        warn(
            f"{name}: its test part has other classes than its training part (a distance of {data.shift():.2f} from "
            "0 to 1): resplit = true divides both again"
        )
    if by_name is not None and data.y.dtype.kind == "f" and data.y.std() > LARGE:
        warn(
            f"{name}: the targets have a deviation of {data.y.std():.2g}, so the loss is large and rates must be tiny: "
            "divide them, for example write prices in thousands"
        )
    data = data.validation() if validation is True else data
    share = None if isinstance(validation, bool) or validation is None else check_share("load", validation)
    owned = names_owners(partition)
    if clients is None:
        clients = len(np.unique(data.client)) if owned and data.client is not None else CLIENTS
    check("load", clients=clients)
    owner = split(partition, data.y, clients, seed, data.client, **partition_options)
    test_owner: list[Any] = []
    if owned and data.client is not None and data.client_test is not None:
        only_tested = np.setdiff1d(np.asarray(data.client_test), np.asarray(data.client))
        if len(only_tested) and clients == len(np.unique(data.client)):
            some = ", ".join(map(str, only_tested[:5])) + (", ..." if len(only_tested) > 5 else "")
            warn(f"{name}: {len(only_tested)} clients have test samples only and do not take part: {some}")
        # test only on the clients that take part
        tested = np.isin(np.asarray(data.client_test), np.unique(np.asarray(data.client)[owner >= 0]))
        data = data._replace(x_test=data.x_test[tested], y_test=data.y_test[tested])
        number = dict(zip(np.asarray(data.client).tolist(), owner.tolist(), strict=True))
        test_owner = [np.array([number[name] for name in np.asarray(data.client_test)[tested].tolist()])]

    def build(seed: int) -> tuple[nn.Module, Loss]:
        if by_name is None:
            return model, loss  # type: ignore[return-value]
        # PyTorch's initialisation, from a random stream of the run's seed; the user's generator is not touched
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.key(seed, rng.MODEL)))
            shape = tuple(data.x.shape[1:])
            pair = by_name(shape=shape, classes=data.classes, **model_options)
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(
                    f"the model {by_name.name!r} must return a module and its loss, got a {type(pair).__name__}"
                )
            network, of_batch = pair
        freeze_others("load", network, trainable)
        return network, of_batch

    network, of_batch = build(0)
    keep, mapped = owner >= 0, isinstance(data.x, np.memmap)
    validated: tuple[np.ndarray, ...] | None = None
    if share is not None:
        held = validation_samples("load", owner, data.y, share)
        keep, validated = keep & ~held, (np.array(data.x[held]), np.array(data.y[held]), owner[held])
        if data.mean is not None:  # without the samples that are held out
            mean, std = moments(data.x, np.flatnonzero(~held))
            data = data._replace(mean=mean, std=std)
    # [channels] to [channels, 1, 1], to fit an image
    fit = (slice(None), None, None) if data.x.ndim == 4 else ()
    scale = None if data.mean is None else (np.array(data.mean)[fit], np.array(data.std)[fit])
    loaded = problem(
        network,
        of_batch,
        x=data.x if mapped else data.x[keep],
        rows=np.flatnonzero(keep) if mapped else None,
        y=data.y[keep],
        client=owner[keep],
        batch=batch,
        test=(np.array(data.x_test), np.array(data.y_test), *test_owner),  # copies: arrays of a file are read-only
        validation=validated,
        init=None if by_name is None else lambda s: flatten(build(s)[0]),
        scale=scale,
        augment=augment,
        trainable=trainable,
        personal=personal,
        personal_lr=personal_lr,
        metrics=metrics,
    ).to(device, dtype)
    loaded.class_names, loaded.columns = data.names, data.columns
    if owned and data.client is not None:  # the names that the data gives its clients
        first = np.unique(owner[keep], return_index=True)[1]
        loaded.client_names = [str(name) for name in np.asarray(data.client)[np.flatnonzero(keep)[first]]]
    return loaded


def partition_of(partition: str, client: str | None) -> str:
    """The partition; with a column of clients, theirs."""
    return "by_client" if client is not None and partition == "iid" else partition


def names_owners(partition: str) -> bool:
    """Whether a partition uses the owners that the data names."""
    return "client" in partitions.find(partition).defaults


def options_of(entry: Entry) -> dict[str, Any]:
    """The options of a partition or a model that a user can set, with their defaults."""
    return {k: v for k, v in entry.defaults.items() if k not in (*ARGUMENTS, "shape", "classes")}
