"""Any nn.Module with a loss and arrays, as a federated problem on one flat vector of parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from .. import rng
from .stacked import StackedGradient, gradient

Loss = Callable[[Tensor, Tensor], Tensor]


class Batch(NamedTuple):
    """Inputs and targets, with leading axes for replicas and clients."""

    x: Tensor
    y: Tensor


class Neural:
    """A model, a loss (a mean over the batch) and samples that belong to clients; made by `fedda.problem`."""

    max_rate = 1.0  # a first effective rate above it has blown up every network seen (docs/deviations.md)

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
        self.d = flatten(model).numel()
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
        moved.data = Batch(*(cast(v.to(device), moved.dtype) for v in self.data))
        moved.test = self.test and Batch(*(cast(v.to(device), moved.dtype) for v in self.test))
        moved._stacked = StackedGradient(moved.objective)
        moved._client_bytes = 0
        moved.__dict__.pop("_by_sample", None)
        return moved

    @property
    def layout(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the parameters, in the order of the flat vector."""
        return [(name, tuple(p.shape)) for name, p in trainable(self.model)]

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
        parameters = trainable(self.model)
        parts = x.split([p.numel() for _, p in parameters])
        named = {name: part.view(p.shape) for part, (name, p) in zip(parts, parameters, strict=True)}
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
        for name, values in self._client_means(x).items():
            metrics[f"train_{name}"] = (values * weights).sum() / weights.sum()
        if self.test is not None:
            for name, values in (self._samples if self._by_sample else self._whole)(x, self.test).items():
                metrics[f"test_{name}"] = values.mean()
        return metrics

    def _client_means(self, x: Tensor) -> dict[str, Tensor]:
        if self._by_sample:
            sums = {
                k: torch.segment_reduce(v, "sum", lengths=self.sizes) for k, v in self._samples(x, self.data).items()
            }
            return {name: total / self.sizes for name, total in sums.items()}
        rows = [self._whole(x, self.everything(k)) for k in range(self.clients)]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    @cached_property
    def _by_sample(self) -> bool:
        """Whether the loss of a batch is the mean of its samples' losses: true of most, but not of a cross-entropy with
        class weights, nor of one that vmap cannot take. Such a loss is evaluated client by client."""
        x, few = flatten(self.model), Batch(*(v[:16] for v in self.data))
        try:
            each = self._samples(x, few)["loss"].mean()
        except Exception:  # whatever the user's loss raises under vmap
            return False
        return bool(torch.isclose(each, self.objective(x, *few).double(), rtol=1e-3))

    def _whole(self, x: Tensor, data: Batch) -> dict[str, Tensor]:
        output = self.forward(x, data.x)
        right = correct(output, data.y)
        metrics = {"loss": self.loss(output, data.y).double()}
        return metrics if right is None else metrics | {"accuracy": right.double().mean()}

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


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are learned; frozen ones (`requires_grad_(False)`) are constants of the model."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def flatten(model: nn.Module) -> Tensor:
    """The parameters as one vector, in the order of `named_parameters`."""
    return torch.cat([p.detach().flatten() for _, p in trainable(model)])


def cast(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating-point data in the model's dtype; whole numbers (classes, tokens) in int64."""
    return v.to(dtype) if v.is_floating_point() else v.to(torch.int64)
