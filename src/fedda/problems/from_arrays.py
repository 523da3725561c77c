"""A federated problem from a user's model, loss and arrays, with checks that they fit together."""

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..checks import POSITIVE, Bound, check, number, one_line
from ..data.holdout import validation_mask
from .augment import named as named_augmentation
from .batchnorm import refuse_synchronised
from .metrics import Function, Metric, find_metrics, gives_each, of_sequences
from .neural import Batch, Loss, Neural, Scale, cast, freeze_others, matching
from .neural import trainable as trained_parameters
from .randomness import CounterRandom
from .trees import at, call, first_tensor, map_tensors, tensors_of

WHOLE = (torch.int16, torch.int32, torch.int64)  # tokens and classes; images are bytes
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
    augment: Any = None,
    trainable: str | Sequence[str] | None = None,
    personal: str | Sequence[str] | None = None,
    personal_lr: Any = None,
    metrics: Mapping[str, Function] | Sequence[str] | None = None,
) -> Neural:
    """A federated problem from your own model, loss and arrays.

    Args:
        model: an nn.Module; its parameters are the first ones of a run.
        loss: a function of the model's output and y, as they are: a mean over the batch.
        x: an array of samples; a tuple of arrays becomes the positional arguments of the model, a dict its keyword
            arguments. A file that is mapped into memory (`np.load(..., mmap_mode="r")`) stays on disk.
        y: the targets: an array, or a tuple or dict of arrays.
        client: the owner of each sample: whole numbers or names; clients may have unequal sizes.
        batch: samples in a mini-batch.
        test: held-out samples (x, y) for `test_loss` and so on; as (x, y, client), each client is also evaluated on its
            own.
        init: a function of the seed to the first parameters, a flat vector, instead of those of the model.
        scale: (mean, std), arrays that fit a sample (such as [channels, 1, 1]): x stays as it is (images as bytes) and
            is standardised when it is used.
        rows: the rows of x that y and client describe, if they are not all.
        validation: a share of each client's samples to hold out, such as 0.1, or other samples (x, y) or (x, y,
            client): for `validation_loss` and, for classes, `validation_accuracy`.
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

    >>> import torch, fedda
    >>> x, y = torch.randn(40, 3), torch.randint(0, 2, (40,))
    >>> owner = torch.arange(40) % 4
    >>> problem = fedda.problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, x=x, y=y, client=owner)
    >>> problem.clients, problem.d
    (4, 8)
    """
    check("problem", batch=batch)
    refuse_wrong_kinds(model, loss)
    model = copy.deepcopy(model)
    freeze_others("problem", model, trainable)
    parameters = [p for _, p in trained_parameters(model)]
    if not parameters:
        raise ValueError("problem: the model has no parameter to train: it has none, or requires_grad is False for all")
    kinds = {f"{p.dtype} on {p.device}" for p in model.parameters()}
    if len(kinds) > 1:
        raise ValueError(f"problem: all parameters must have one dtype on one device, got {', '.join(sorted(kinds))}")
    refuse_synchronised(model)
    device, dtype = parameters[0].device, parameters[0].dtype
    standard = None if scale is None else _scale(scale, device, dtype)
    rows = _rows(x, rows)
    data = _arrays("x and y", x, y, device, dtype, standard, rows)
    owner = np.zeros(data.samples, dtype=np.int64) if client is None else _array(client)
    if owner.dtype.kind == "O" and owner.size and all(isinstance(name, str) for name in owner.flat):
        owner = owner.astype(str)
    if owner.shape != (data.samples,) or owner.dtype.kind not in "iuUS":
        raise ValueError(
            f"problem: client must be {data.samples} whole numbers or names, one per sample, "
            f"got {owner.dtype} {list(owner.shape)}"
        )
    names, owner = np.unique(owner, return_inverse=True)
    chosen, owners = find_metrics(metrics), dict[str, Tensor]()

    def other_samples(name: str, pair: Any) -> Batch:
        client = None
        if isinstance(pair, tuple | list) and len(pair) == 3:
            pair, client = pair[:2], pair[2]
        samples = _arrays(name, *_pair(name, pair, "(x, y)"), device, dtype, standard)
        if client is not None:
            owners[name] = _owners(name, client, names, samples.samples).to(device)
        return samples

    tested = None if test is None else other_samples("test", test)
    validated = None
    if isinstance(validation, tuple | list):
        validated = other_samples("validation", validation)
    elif validation is not None:
        held = validation_samples(
            "problem", owner, first_tensor(data.y).cpu().numpy(), check_share("problem", validation)
        )
        owners["validation"] = torch.as_tensor(owner[held]).to(device)
        data, rows, owner, validated = _hold_out(data, rows, owner, held)
    stays = matching("problem", "personal", [n for n, _ in trained_parameters(model)], personal) if personal else set()
    if len(stays) == len(parameters):
        raise ValueError("problem: all parameters are personal, so clients have nothing to share")
    ids = torch.as_tensor(owner).to(device)
    neural = Neural(
        model, loss, data, ids, batch, tested, init, standard, rows, validated, sorted(stays), owners if stays else {}
    )
    if not stays:
        neural.owners = owners
    neural.client_names = names.tolist()
    if personal_lr is not None and not callable(personal_lr):
        number("problem", "personal_lr", personal_lr, POSITIVE)
    neural.personal_lr = personal_lr
    neural.augment = named_augmentation("problem", augment)
    norms = neural.batch_norms
    for name, part in {"": neural.data, **neural.held_out}.items():
        which = f" (the {name} samples)" if name else ""
        refuse_mismatch(norms.evaluation, loss, neural.standardised(neural.pick(part, slice(64))), which)
        rows = neural.rows if part is neural.data else None
        for v in (v for v in tree_leaves(part.x) if v.dtype in WHOLE):  # tokens that the model does not know
            few = neural.standardised(neural.pick(part, extreme_samples(v, rows)))
            refuse_mismatch(norms.evaluation, loss, few, which)
        neural.nan_alone |= refuse_targets(norms.evaluation, loss, neural, part)
    first = neural.standardised(neural.pick(neural.data, slice(2)))
    if norms.layers:  # these need a whole batch, even if there is only one sample
        first = neural.standardised(neural.pick(neural.data, torch.arange(batch, device=device) % data.samples))
        refuse_mismatch(norms.training, loss, first)
    if has_random_layers(norms.training, first.x):
        neural.random = True
        neural._rebuild_caches()
    if augment is not None:
        refuse_augmentation(neural)
    _add_metrics(neural, chosen)
    return neural


def refuse_augmentation(neural: Neural) -> None:
    """Refuse an augmentation that cannot take the samples."""
    try:
        neural.example(1)
    except ValueError:
        raise
    except Exception as why:  # a user's function may raise anything
        raise ValueError(f"problem: the augmentation cannot take this data: {one_line(why)}") from why


def _add_metrics(neural: Neural, metrics: dict[str, Metric]) -> None:
    """Set the metrics of a problem; one that does not fit its outputs is refused."""
    samples = neural.standardised(neural.pick(neural.data, slice(64)))
    n = samples.samples
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        output = call(copy.deepcopy(neural.batch_norms.evaluation), samples.x)
        neural.metrics = of_sequences(output, samples.y) | metrics
        each = {name: m for name, m in neural.metrics.items() if gives_each(name, m, output, samples.y, n)}
    neural.sample_metrics = each


def _owners(name: str, client: Any, names: np.ndarray, samples: int) -> Tensor:
    """The number of the client of each held-out sample, from the names in `client`."""
    owner = np.asarray(client)
    if owner.shape != (samples,):
        raise ValueError(f"problem: {name} must have one client for each of its {samples} samples, got {owner.shape}")
    number = np.searchsorted(names, owner).clip(max=len(names) - 1)
    if (names[number] != owner).any():
        stranger = owner[names[number] != owner][0]
        raise ValueError(f"problem: {name}: the client {str(stranger)!r} has no training samples")
    return torch.as_tensor(number)


def refuse_wrong_kinds(model: Any, loss: Any) -> None:
    """Refuse a model that is not a module with its parameters, and a loss that is not a function."""
    if not isinstance(model, nn.Module):
        name = model.__name__ if isinstance(model, type) else None
        hint = f"the class {name}; make a module of it: {name}(...)" if name else f"a {type(model).__name__}"
        raise ValueError(f"problem: model must be a torch.nn.Module, got {hint}")
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise ValueError(f"problem: {lazy[0]!r} has no shape yet: call the model once with some samples before")
    if isinstance(loss, type) or not callable(loss):
        hint = f"the class {loss.__name__}; write {loss.__name__}()" if isinstance(loss, type) else repr(loss)
        raise ValueError(f"problem: loss must be a function of outputs and targets, got {hint}")


def refuse_mismatch(model: nn.Module, loss: Loss, samples: Batch, which: str = "") -> None:
    """Refuse a model and a loss that do not fit the data."""
    output: Any = None
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch about shapes; what is wrong with them is refused below
            output = call(copy.deepcopy(model), samples.x)
            value: Any = loss(output, samples.y)
    except Exception as why:
        if output is None:
            which += f"; the model gets {described(samples.x)}"
            if first_tensor(samples.x).dtype == torch.uint8:
                which += "; images of bytes need scale=(mean, std), or a model that begins with x.float()"
        elif isinstance(output, Tensor):
            which += f"; the model returns {described(output)}, and the targets are {described(samples.y)}"
        else:
            which += f"; the model returns a {type(output).__name__}, of which the loss must take its part"
        raise ValueError(
            f"problem: the model and the loss cannot take this data: {one_line(why).rstrip('.')}{which}"
        ) from why
    if not isinstance(value, Tensor) or value.dim() != 0:
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"problem: the loss must be a function to one number, the mean over the batch, got {got}")
    if not isinstance(output, Tensor) or not isinstance(samples.y, Tensor):
        return
    if compares_all_pairs(loss, output, samples.y, value):
        fit = "end the model with nn.Flatten(0)" if output.dim() > samples.y.dim() else "give y[:, 0]"
        raise ValueError(
            f"problem: the model gives {list(output.shape)} and the targets are {list(samples.y.shape)}, so the loss "
            f"compares every output with every target: {fit}"
        )
    if ignores_the_output(loss, output, samples.y, value):
        raise ValueError(
            "problem: the loss does not depend on the model's single output: cross_entropy needs an output for each "
            "class, binary_cross_entropy_with_logits takes a single one"
        )


def described(values: Any) -> str:
    """The type and the shape of samples, and the range of whole numbers.

    >>> described({"ids": torch.tensor([[3, 7]]), "weight": torch.ones(1)})
    "{'ids': int64 [1, 2] from 3 to 7, 'weight': float32 [1]}"
    """
    if isinstance(values, Tensor):
        span = f" from {int(values.min())} to {int(values.max())}" if values.dtype in WHOLE else ""
        return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}{span}"
    if isinstance(values, Mapping):
        return "{" + ", ".join(f"{name!r}: {described(value)}" for name, value in values.items()) + "}"
    return "(" + ", ".join(map(described, values)) + ")"


def compares_all_pairs(loss: Loss, output: Tensor, y: Tensor, value: Tensor) -> bool:
    """Whether outputs [n, 1] and targets [n], or the other way round, are broadcast to [n, n]: without the last axis
    the loss is another."""
    one_axis_more = output.shape == (*y.shape, 1) or y.shape == (*output.shape, 1)
    if not y.is_floating_point() or len(y) < 2 or not one_axis_more:
        return False
    without = min(output.shape, y.shape, key=len)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = loss(output.reshape(without), y.reshape(without))
    except Exception:  # the loss wants this axis
        return False
    return not torch.allclose(other, value)


def ignores_the_output(loss: Loss, output: Tensor, y: Tensor, value: Tensor) -> bool:
    """Whether a loss of classes is 0 for any single output [n, 1], as the cross-entropy of one class is."""
    if y.is_floating_point() or output.shape != (len(y), 1) or float(value) != 0:
        return False
    return float(loss(output + torch.arange(len(y), device=y.device)[:, None], y)) == 0


def refuse_targets(model: nn.Module, loss: Loss, neural: Neural, part: Batch) -> bool:
    """Refuse targets that the loss cannot take, wherever they are, and a loss that is a sum over the batch. Returns
    whether the loss of some sample alone is NaN, as that of a class with the weight 0."""
    y = first_tensor(part.y)
    index = torch.arange(min(8, part.samples), device=y.device)
    if not y.is_floating_point():  # also the samples with the smallest and the largest targets
        index = extreme_samples(y)
        refuse_mismatch(model, loss, neural.standardised(neural.pick(part, index)))
    x, y = neural.standardised(neural.pick(part, index))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        output = call(copy.deepcopy(model), x)

        def of(rows: list[int]) -> float:
            return float(loss(at(output, rows), at(y, rows)))

        try:
            rows = list(range(len(index)))
            each, once, twice = [of([i]) for i in rows], of(rows), of(rows + rows)
        except Exception:  # the loss cannot take one sample, or outputs have no axis of samples
            return False
    for i, value in enumerate(each):
        target = first_tensor(y)[i]
        if math.isnan(value) and not target.is_floating_point() and int(target.max()) < 0:
            raise ValueError(
                f"problem: the loss of a sample with the target {int(target.max())} is NaN, because the loss ignores "
                "this target; leave such samples out"
            )
    if math.isclose(twice, 2 * once, rel_tol=1e-4) and abs(once) > 1e-6:
        raise ValueError(
            "problem: the loss must be the mean over the batch, and this one is the sum: it is twice as large for "
            "the same samples twice; take reduction='mean'"
        )
    return any(map(math.isnan, each))


def extreme_samples(values: Tensor, rows: Tensor | None = None) -> Tensor:
    """The samples with the smallest and with the largest numbers; `rows` are those of the samples in a mapped file.

    >>> extreme_samples(torch.tensor([[1, 2], [0, 3], [2, 9]]))
    tensor([1, 2, 0, 2])
    """
    flat = values.flatten(1) if values.dim() > 1 else values[:, None]
    low, high = flat.amin(dim=1), flat.amax(dim=1)
    if rows is not None:
        low, high = low[rows], high[rows]
    return torch.stack([low.argmin(), high.argmax(), high.argmin(), low.argmax()])


def has_random_layers(model: nn.Module, x: Any) -> bool:
    """Whether a forward pass draws random numbers; one that depends on more than parameters and inputs is refused."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    outputs = []
    for _ in range(2):
        key = torch.zeros((), dtype=torch.int64, device=first_tensor(x).device)
        probe, random = copy.deepcopy(model), CounterRandom(key)
        with torch.no_grad(), random:
            outputs.append([v for v in tree_leaves(call(probe, x)) if isinstance(v, Tensor)])
    changed = [name for name, buffer in probe.named_buffers() if not torch.equal(buffer, before[name])]
    if changed:
        raise ValueError(
            f"problem: a forward pass changes the buffer {changed[0]!r}: running statistics are not parameters, and no "
            "method here says how to average them; use BatchNorm or GroupNorm, or model.eval() to freeze them"
        )
    if not all(map(torch.equal, *outputs)):
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
    y = first_tensor(data.y)
    train, out = (torch.as_tensor(np.flatnonzero(which)).to(y.device) for which in (~held, held))
    if rows is None:
        return data.map(lambda v: v[train]), None, owner[~held], data.map(lambda v: v[out])
    held_x = map_tensors(lambda v: v.index_select(0, rows[out]), data.x)  # a copy in memory, like the test samples
    train_y, held_y = (at(data.y, index) for index in (train, out))
    return Batch(data.x, train_y), rows[train], owner[~held], Batch(held_x, held_y)


def _array(values: Any) -> np.ndarray:
    """The values as an array; an empty one if they are ragged."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError):
        return np.empty((0,), dtype=object)


def _rows(x: Any, rows: Any) -> Tensor | None:
    """The rows of the samples in a file that is mapped into memory; None for other arrays."""
    leaves = tree_leaves(x) if isinstance(x, tuple | dict) else [x]
    if not leaves or not all(isinstance(v, np.memmap) for v in leaves):
        if rows is not None:
            raise ValueError("problem: rows need an x that is mapped into memory, by np.load(mmap_mode='r')")
        return None
    size = len(leaves[0])
    index = torch.arange(size) if rows is None else torch.as_tensor(np.array(rows))
    if index.dim() != 1 or index.dtype != torch.int64 or not bool(((index >= 0) & (index < size)).all()):
        raise ValueError(f"problem: rows must be whole numbers from 0 to {size - 1}, got {list(index.shape)}")
    return index


def _arrays(
    name: str, x: Any, y: Any, device: torch.device, dtype: torch.dtype, scale: Scale | None, rows: Tensor | None = None
) -> Batch:  # fmt: skip
    both = ("x", "y") if name == "x and y" else (f"the x of {name}", f"the y of {name}")
    x, y = (tensors_of(f"problem: {called}", v) for called, v in zip(both, (x, y), strict=True))
    if scale is not None and not isinstance(x, Tensor):
        raise ValueError("problem: scale needs an x that is one array; standardise the parts of a tuple or dict first")
    shapes, leaves = (map_tensors(lambda v: list(v.shape), (x, y)), tree_leaves((x, y)))
    sizes = {len(v) if v.dim() else 0 for v in tree_leaves(y)}
    sizes |= {len(v) if v.dim() else 0 for v in tree_leaves(x)} if rows is None else {len(rows)}
    if len(sizes) != 1 or 0 in sizes:
        got = ", ".join(map(str, shapes))
        raise ValueError(f"problem: {name} must hold the same number of samples, at least 1, got {got}")
    for value in scale or ():
        sample = x.shape[1:]
        try:
            fits = torch.broadcast_shapes(value.shape, sample) == sample
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(f"problem: scale must fit a sample of shape {list(sample)}, got {list(value.shape)}")
    if not all(bool(v.isfinite().all()) for v in leaves if v.is_floating_point()):
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
