"""A federated problem from a user's model, loss and arrays, with checks that they fit together."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..checks import Bound, check, number, one_line
from ..data.holdout import validation_mask
from .augment import Augmentation
from .batchnorm import refuse_synchronised
from .metrics import Function, Metric, find_metrics, gives_each, of_sequences
from .neural import Batch, Loss, Neural, Scale, cast, trainable
from .randomness import CounterRandom

SHARE = Bound("in (0, 1)", lambda v: (v > 0) & (v < 1))  # of samples to hold out


def problem(
    model: nn.Module,
    loss: Loss,
    *,
    x: Any,
    y: Any,
    client: Any = None,
    batch: int = 16,
    test: tuple[Any, Any] | None = None,
    init: Callable[[int], Tensor] | None = None,
    scale: tuple[Any, Any] | None = None,
    rows: Any = None,
    validation: Any = None,
    augment: Augmentation | None = None,
    metrics: Mapping[str, Function] | Sequence[str] | None = None,
) -> Neural:
    """A federated problem from a model, a loss (a mean over the batch) and arrays.

    `client` is the owner of each sample (whole numbers or names; clients may have unequal sizes). Runs start at the
    parameters of the model, or at `init(seed)`, a flat vector. With `scale=(mean, std)`, arrays that fit a sample (such
    as [channels, 1, 1]), x stays as it is (images as bytes) and is standardised when it is used. A file that is mapped
    into memory (`np.load(..., mmap_mode="r")`) stays on disk; `rows` are the rows of it that y and client describe.
    `validation` is a share, such as 0.1, of each client's samples to hold out, or a pair (x, y) of other samples; the
    rows of metrics get `validation_loss` and, for classes, `validation_accuracy`. `test` and `validation` may be
    triples (x, y, client): then each client is also evaluated on its own held-out samples.

    `metrics` are functions f(output, target) by name, each to one number for a whole set of samples or to a tensor with
    a number for each sample, which is averaged as the loss is; or a list of names, such as ["f1"]. Higher is better,
    unless it is `fedda.Metric(f, higher_is_better=False)`. Rows get `train_NAME`, `validation_NAME` and `test_NAME`.

    `augment` changes training samples at random, as they are drawn: see `fedda.augment`.

    >>> import torch, fedda
    >>> x, y = torch.randn(40, 3), torch.randint(0, 2, (40,))
    >>> owner = torch.arange(40) % 4
    >>> problem = fedda.problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, x=x, y=y, client=owner)
    >>> problem.clients, problem.d
    (4, 8)
    """
    check("problem", batch=batch)
    parameters = [p for _, p in trainable(model)]
    if not parameters or len({(p.dtype, p.device) for p in model.parameters()}) > 1:
        raise ValueError("problem: the model must have parameters to train, all of one dtype on one device")
    refuse_synchronised(model)
    model = copy.deepcopy(model)
    device, dtype = parameters[0].device, parameters[0].dtype
    standard = None if scale is None else _scale(scale, device, dtype)
    rows = _rows(x, rows)
    data = _arrays("x and y", x, y, device, dtype, standard, rows)
    owner = np.zeros(len(data.y), dtype=np.int64) if client is None else np.asarray(client)
    if owner.shape != (len(data.y),) or owner.dtype.kind not in "iuUS":
        raise ValueError(
            f"problem: client must be {len(data.y)} whole numbers or names, one per sample, "
            f"got {owner.dtype} {list(owner.shape)}"
        )
    named, chosen, owners = owner, find_metrics(metrics), {}
    owner = np.unique(owner, return_inverse=True)[1]

    def other_samples(name: str, pair: Any) -> Batch:
        if isinstance(pair, tuple | list) and len(pair) == 3:
            owners[name] = _owners(name, pair[2], named, len(pair[1])).to(device)
            pair = pair[:2]
        return _arrays(name, *_pair(name, pair, "(x, y)"), device, dtype, standard)

    tested = None if test is None else other_samples("test", test)
    validated = None
    if isinstance(validation, tuple | list):
        validated = other_samples("validation", validation)
    elif validation is not None:
        held = validation_samples("problem", owner, data.y.cpu().numpy(), check_share("problem", validation))
        owners["validation"] = torch.as_tensor(owner[held]).to(device)
        data, rows, owner, validated = _hold_out(data, rows, owner, held)
    ids = torch.as_tensor(owner).to(device)
    neural = Neural(model, loss, data, ids, batch, tested, init, standard, rows, validated)
    if augment is not None and not callable(augment):
        raise ValueError(f"problem: augment must be a function of samples, as fedda.augment gives it, got {augment!r}")
    neural.augment = augment
    neural.owners, neural.client_names = owners, np.unique(named).tolist()
    norms = neural.batch_norms
    for part in (neural.data, *neural.held_out.values()):
        refuse_mismatch(norms.evaluation, loss, neural.standardised(neural.pick(part, slice(64))))
    first = neural.standardised(neural.pick(neural.data, slice(2)))
    if norms.layers:  # these need a whole batch, even if there is only one sample
        first = neural.standardised(neural.pick(neural.data, torch.arange(batch, device=device) % len(data.y)))
        refuse_mismatch(norms.training, loss, first)
    if has_random_layers(norms.training, first.x):
        neural.random = True
        neural._rebuild_caches()
    if augment is not None:
        neural.example(1)  # one that does not fit is refused here
    _add_metrics(neural, chosen)
    return neural


def _add_metrics(neural: Neural, metrics: dict[str, Metric]) -> None:
    """Set the metrics of a problem; one that does not fit its outputs is refused."""
    samples = neural.standardised(neural.pick(neural.data, slice(64)))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        output = copy.deepcopy(neural.batch_norms.evaluation)(samples.x)
        neural.metrics = of_sequences(output, samples.y) | metrics
        each = {name: m for name, m in neural.metrics.items() if gives_each(name, m, output, samples.y)}
    neural.sample_metrics = each


def _owners(name: str, client: Any, named: np.ndarray, samples: int) -> Tensor:
    """The number of the client of each held-out sample, from the names in `client`."""
    owner, names = np.asarray(client), np.unique(named)
    if owner.shape != (samples,):
        raise ValueError(f"problem: {name} must have one client for each of its {samples} samples, got {owner.shape}")
    number = np.searchsorted(names, owner).clip(max=len(names) - 1)
    if (names[number] != owner).any():
        stranger = owner[names[number] != owner][0]
        raise ValueError(f"problem: {name}: the client {str(stranger)!r} has no training samples")
    return torch.as_tensor(number)


def refuse_mismatch(model: nn.Module, loss: Loss, samples: Batch) -> None:
    """Refuse a model and a loss that do not fit the data."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            value: Any = loss(copy.deepcopy(model)(samples.x), samples.y)
    except Exception as why:
        raise ValueError(f"problem: the model and the loss cannot take this data: {one_line(why)}") from why
    if not isinstance(value, Tensor) or value.dim() != 0:
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"problem: the loss must be a function to one number, the mean over the batch, got {got}")


def has_random_layers(model: nn.Module, x: Tensor) -> bool:
    """Whether a forward pass draws random numbers; one that depends on more than parameters and inputs is refused."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    outputs = []
    for _ in range(2):
        probe, random = copy.deepcopy(model), CounterRandom(torch.zeros((), dtype=torch.int64, device=x.device))
        with torch.no_grad(), random:
            outputs.append(probe(x))
    changed = [name for name, buffer in probe.named_buffers() if not torch.equal(buffer, before[name])]
    if changed:
        raise ValueError(
            f"problem: a forward pass changes the buffer {changed[0]!r}: running statistics are not parameters, and no "
            "method here says how to average them; use BatchNorm or GroupNorm, or model.eval() to freeze them"
        )
    if not torch.equal(*outputs):
        raise ValueError(
            "problem: two forward passes on the same input differ: the model draws random numbers outside of PyTorch, "
            "so a run could not be repeated; use dropout, torch.rand or torch.randn"
        )
    return random.calls > 0


def check_share(owner: str, share: Any) -> float:
    """The share of samples to hold out, if it is one."""
    number(owner, "validation", share, SHARE)
    return float(share)


def validation_samples(name: str, owner: np.ndarray, y: np.ndarray, share: float) -> np.ndarray:
    """True for the samples to hold out, of which there must be some."""
    held = validation_mask(owner, y, share)
    if not held.any():
        raise ValueError(f"{name}: validation = {share:g} holds out no sample: the clients are too small for the share")
    return held


def _hold_out(
    data: Batch, rows: Tensor | None, owner: np.ndarray, held: np.ndarray
) -> tuple[Batch, Tensor | None, np.ndarray, Batch]:
    """The training samples, their rows, their owners, and the samples that are held out."""
    train, out = (torch.as_tensor(np.flatnonzero(which)).to(data.y.device) for which in (~held, held))
    if rows is None:
        return Batch(data.x[train], data.y[train]), None, owner[~held], Batch(data.x[out], data.y[out])
    held_x = data.x.index_select(0, rows[out])  # a copy in memory, like the test samples
    return Batch(data.x, data.y[train]), rows[train], owner[~held], Batch(held_x, data.y[out])


def _rows(x: Any, rows: Any) -> Tensor | None:
    """The rows of the samples in a file that is mapped into memory; None for other arrays."""
    if not isinstance(x, np.memmap):
        if rows is not None:
            raise ValueError("problem: rows need an x that is mapped into memory, by np.load(mmap_mode='r')")
        return None
    index = torch.arange(len(x)) if rows is None else torch.as_tensor(np.array(rows))
    if index.dim() != 1 or index.dtype != torch.int64 or not bool(((index >= 0) & (index < len(x))).all()):
        raise ValueError(f"problem: rows must be whole numbers from 0 to {len(x) - 1}, got {list(index.shape)}")
    return index


def _arrays(
    name: str, x: Any, y: Any, device: torch.device, dtype: torch.dtype, scale: Scale | None, rows: Tensor | None = None
) -> Batch:  # fmt: skip
    with warnings.catch_warnings():  # a mapped file is read-only, and we never write to it
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        x, y = (v if isinstance(v, Tensor) else torch.as_tensor(np.asarray(v)) for v in (x, y))
    samples = len(x) if rows is None else len(rows)
    if x.dim() < 1 or y.dim() < 1 or samples != len(y) or samples == 0:
        shapes = f"{list(x.shape)}, {list(y.shape)}"
        raise ValueError(f"problem: {name} must hold the same number of samples, at least 1, got {shapes}")
    if not all(bool(v.isfinite().all()) for v in (x, y) if v.is_floating_point()):
        raise ValueError(f"problem: {name} must be finite numbers; some are NaN or infinite")
    return cast(Batch(x, y), dtype, scale, device)


def _scale(scale: Any, device: torch.device, dtype: torch.dtype) -> Scale:
    mean, std = (torch.as_tensor(v).to(device, dtype) for v in _pair("scale", scale, "(mean, std)"))
    if not (bool(mean.isfinite().all()) and bool((std > 0).all()) and bool(std.isfinite().all())):
        raise ValueError("problem: scale must be finite numbers (mean, std), the deviations > 0")
    return Scale(mean, std)


def _pair(name: str, pair: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"problem: {name} must be a pair {what}, got {type(pair).__name__}")
    return pair[0], pair[1]
