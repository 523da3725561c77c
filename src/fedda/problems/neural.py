"""Any nn.Module with a loss and arrays, as a federated problem on one flat vector of parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from .. import rng
from ..checks import check
from .stacked import StackedGradient, gradient

Loss = Callable[[Tensor, Tensor], Tensor]


class Batch(NamedTuple):
    """Inputs and targets, with leading axes for replicas and clients."""

    x: Tensor
    y: Tensor


class Neural:
    """A model, a loss (a mean over the batch) and samples that belong to clients; made by `fedda.problem`."""

    max_rate = 1.0  # a first effective rate above it has blown up every network seen (algorithms.md, 7.6)

    def __init__(
        self, model: nn.Module, loss: Loss, data: Batch, client: Tensor, batch: int, test: Batch | None,
        init: Callable[[int], Tensor] | None = None,
    ):  # fmt: skip
        self.model, self.loss, self.batch_size, self.init = model, loss, batch, init
        order = torch.argsort(client, stable=True)
        self.names, self.sizes = torch.unique(client, return_counts=True)
        self.offsets = self.sizes.cumsum(0) - self.sizes
        self.data, self.test = Batch(data.x[order], data.y[order]), test
        self.clients = len(self.names)
        self.d = sum(p.numel() for p in model.parameters())
        self._stacked = StackedGradient(self.objective)
        self._client_bytes = 0

    # -- where it lives -----------------------------------------------------------------------------------------
    @property
    def device(self) -> torch.device:
        return self.data.x.device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Neural:
        moved = copy.copy(self)
        moved.model = copy.deepcopy(self.model).to(device=device, dtype=dtype)
        for name in ("sizes", "offsets"):
            setattr(moved, name, getattr(self, name).to(device))
        moved.data = Batch(*(_cast(v.to(device), moved.dtype) for v in self.data))
        moved.test = self.test and Batch(*(_cast(v.to(device), moved.dtype) for v in self.test))
        moved._stacked = StackedGradient(moved.objective)
        return moved

    def start(self, seed: int) -> Tensor:
        """The first point: the model's own parameters, or those that the seed gives."""
        x = self.init(seed) if self.init else flatten(self.model)
        return x.to(device=self.device, dtype=self.dtype)

    # -- batches ------------------------------------------------------------------------------------------------
    def batch(self, ids: Tensor, key: Tensor) -> Batch:
        """Samples with replacement, uniform over each client's own."""
        key = rng.fold(key[..., None], torch.arange(self.batch_size, device=key.device))
        index = self.offsets[ids][..., None] + rng.integers(key, self.sizes[ids][..., None])
        return Batch(self.data.x[index], self.data.y[index])

    def everything(self, client: int) -> Batch:
        first, n = int(self.offsets[client]), int(self.sizes[client])
        return Batch(self.data.x[first : first + n], self.data.y[first : first + n])

    def pick(self, batch: Batch, index: tuple[int, ...]) -> Batch:
        return Batch(batch.x[index], batch.y[index])

    # -- gradients ----------------------------------------------------------------------------------------------
    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        """The model's output at the flat parameters x [d]."""
        parts = x.split([p.numel() for p in self.model.parameters()])
        named = {name: part.view(p.shape) for part, (name, p) in zip(parts, self.model.named_parameters(), strict=True)}
        output: Tensor = functional_call(self.model, named, (inputs,))
        return output

    def objective(self, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.forward(x, inputs), targets)

    def gradient(self, x: Tensor, batch: Batch) -> Tensor:
        return gradient(self.objective, x, *batch)

    def gradients(self, x: Tensor, batch: Batch) -> Tensor:
        """All at once; x [points, ..., c, d] has one leading axis more than the batch, which all points share."""
        lead = x.dim() - 2
        data = [v.expand(len(x), *v.shape).flatten(0, lead) for v in batch]
        return self._stacked(x.flatten(0, lead), *data).view(x.shape)

    def bytes_per_client(self) -> int:
        """Vectors, batch and saved activations of one client with two points (measured once, in one forward pass)."""
        if not self._client_bytes:
            saved: list[int] = []

            def pack(v: Tensor) -> Tensor:
                saved.append(v.numel() * v.element_size())
                return v

            few = Batch(*(v[: self.batch_size] for v in self.data))
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
                self.objective(flatten(self.model).requires_grad_(), *few)
            sizes = [v.numel() * v.element_size() for v in (*few, flatten(self.model))]
            self._client_bytes = 4 * sum(saved) + 2 * sum(sizes[:2]) + 16 * sizes[2]
        return self._client_bytes

    # -- evaluation ---------------------------------------------------------------------------------------------
    def evaluate(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """train_loss and, for classes, train_accuracy: means over each client's samples, then over clients; the same
        on the test set, over its samples. In float64."""
        rows = [self._evaluate(one, weights) for one in x.reshape(-1, self.d)]
        return {name: torch.stack([row[name] for row in rows]).view(x.shape[:-1]) for name in rows[0]}

    @torch.no_grad()
    def _evaluate(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        metrics = {}
        for name, values in self._samples(x, self.data).items():
            means = torch.segment_reduce(values, "sum", lengths=self.sizes) / self.sizes
            metrics[f"train_{name}"] = (means * weights).sum() / weights.sum()
        if self.test is not None:
            for name, values in self._samples(x, self.test).items():
                metrics[f"test_{name}"] = values.mean()
        return metrics

    def _samples(self, x: Tensor, data: Batch, size: int = 2000) -> dict[str, Tensor]:
        """The loss (and whether the class is right) of every sample."""
        each = vmap(lambda output, target: self.loss(output[None], target[None]))
        columns: dict[str, list[Tensor]] = {}
        for inputs, targets in zip(data.x.split(size), data.y.split(size), strict=True):
            output = self.forward(x, inputs)
            columns.setdefault("loss", []).append(each(output, targets).double())
            right = correct(output, targets)
            if right is not None:
                columns.setdefault("accuracy", []).append(right.double())
        return {name: torch.cat(parts) for name, parts in columns.items()}


def correct(output: Tensor, target: Tensor) -> Tensor | None:
    """Whether each sample's class is right; None where the targets are no classes."""
    if target.is_floating_point() or target.dim() != 1:
        return None
    if output.dim() == 2 and output.shape[1] > 1:
        return output.argmax(dim=1) == target
    return (output.flatten() > 0) == (target > 0)


def flatten(model: nn.Module) -> Tensor:
    """The parameters as one vector, in the order of `named_parameters`."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


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
) -> Neural:
    """A federated problem from a model, a loss (a mean over the batch) and arrays.

    `client` gives the owner of each sample (any integers; clients may have unequal sizes). Runs start at the model's
    own parameters, or at `init(seed)`, a flat vector.

    >>> import torch, fedda
    >>> x, y = torch.randn(40, 3), torch.randint(0, 2, (40,))
    >>> owner = torch.arange(40) % 4
    >>> problem = fedda.problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, x=x, y=y, client=owner)
    >>> problem.clients, problem.d
    (4, 8)
    """
    check("problem", batch=batch)
    parameters = list(model.parameters())
    if not parameters or len({(p.dtype, p.device) for p in parameters}) > 1:
        raise ValueError("problem: the model must have parameters, all of one dtype on one device")
    model = copy.deepcopy(model)
    device, dtype = parameters[0].device, parameters[0].dtype
    data = _arrays("x and y", x, y, device, dtype)
    owner = torch.zeros(len(data.x), dtype=torch.int64) if client is None else torch.as_tensor(np.asarray(client))
    if owner.shape != (len(data.x),) or owner.is_floating_point() or owner.dtype == torch.bool:
        raise ValueError(f"problem: client must be {len(data.x)} whole numbers, one a sample, got {list(owner.shape)}")
    held = None if test is None else _arrays("test", *test, device, dtype)
    refuse_state(model, data.x[:2])
    return Neural(model, loss, data, owner.to(device), batch, held, init)


def refuse_state(model: nn.Module, x: Tensor) -> None:
    """Refuse a module whose forward pass is no function of parameters and inputs alone."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        outputs = [copy.deepcopy(model)(x) for _ in range(2)]
        probe = copy.deepcopy(model)
        probe(x)
    changed = [name for name, buffer in probe.named_buffers() if not torch.equal(buffer, before[name])]
    if changed:
        raise ValueError(
            f"problem: a forward pass changes the buffer {changed[0]!r} (BatchNorm?): running statistics are no "
            "parameters, and no method here says how to average them; use GroupNorm, or model.eval() to freeze them"
        )
    if not torch.equal(*outputs):
        raise ValueError(
            "problem: two forward passes on the same input differ (dropout?): batches are a function of (seed, round, "
            "client, draw) alone, so that runs can be repeated; remove the random layer or call model.eval()"
        )


def _arrays(name: str, x: Any, y: Any, device: torch.device, dtype: torch.dtype) -> Batch:
    x, y = (v if isinstance(v, Tensor) else torch.as_tensor(np.asarray(v)) for v in (x, y))
    if x.dim() < 1 or y.dim() < 1 or len(x) != len(y) or len(x) == 0:
        raise ValueError(
            f"problem: {name} must hold as many samples each, at least 1, got {list(x.shape)}, {list(y.shape)}"
        )
    return Batch(_cast(x.to(device), dtype), _cast(y.to(device), dtype))


def _cast(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating-point data in the model's dtype; whole numbers (classes, tokens) in int64."""
    return v.to(dtype) if v.is_floating_point() else v.to(torch.int64)
