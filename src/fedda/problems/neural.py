"""Any nn.Module with a loss and arrays, as a federated problem on one flat vector of parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .. import rng
from .evaluation import Evaluation
from .stacked import StackedGradient, gradient

Loss = Callable[[Tensor, Tensor], Tensor]


class Batch(NamedTuple):
    """Inputs and targets, with leading axes for replicas and clients."""

    x: Tensor
    y: Tensor


class Scale(NamedTuple):
    """What standardises a sample when it is used, (x - mean) / std: images stay bytes, a quarter of floats."""

    mean: Tensor
    std: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return (x.to(self.mean.dtype) - self.mean) / self.std


class Neural:
    """A model, a loss (a mean over the batch) and samples that belong to clients; made by `fedda.problem`."""

    max_rate = 1.0  # a first effective rate above it has blown up every network seen (docs/deviations.md)

    def __init__(
        self, model: nn.Module, loss: Loss, data: Batch, client: Tensor, batch: int, test: Batch | None,
        init: Callable[[int], Tensor] | None = None, scale: Scale | None = None,
    ):  # fmt: skip
        self.model, self.loss, self.batch_size, self.init, self.scale = model, loss, batch, init, scale
        order = torch.argsort(client, stable=True)
        self.names, self.sizes = torch.unique(client, return_counts=True)
        self.offsets = self.sizes.cumsum(0) - self.sizes
        self.data, self.test = Batch(data.x[order], data.y[order]), test
        self.clients = len(self.names)
        self.d = flatten(model).numel()
        self._stacked, self._evaluation = StackedGradient(self.objective), Evaluation(self)
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
        moved.scale = self.scale and Scale(*(v.to(device, moved.dtype) for v in self.scale))
        moved.data = cast(self.data, moved.dtype, moved.scale, device)
        moved.test = self.test and cast(self.test, moved.dtype, moved.scale, device)
        moved._stacked, moved._evaluation = StackedGradient(moved.objective), Evaluation(moved)
        moved._client_bytes = 0
        return moved

    @property
    def layout(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the parameters, in the order of the flat vector."""
        return [(name, tuple(p.shape)) for name, p in trainable(self.model)]

    def start(self, seed: int) -> Tensor:
        """The first point: the model's own parameters, or those that the seed gives."""
        x = self.init(seed) if self.init else self.point()
        return x.to(device=self.device, dtype=self.dtype)

    def point(self) -> Tensor:
        """The model's own parameters as one vector."""
        return flatten(self.model)

    # -- batches ------------------------------------------------------------------------------------------------
    def batch(self, ids: Tensor, key: Tensor) -> Batch:
        """Samples with replacement, uniform over each client's own."""
        key = rng.fold(key[..., None], torch.arange(self.batch_size, device=key.device))
        index = self.offsets[ids][..., None] + rng.integers(key, self.sizes[ids][..., None])
        return self.ready(self.data, index)

    def everything(self, client: int) -> Batch:
        return self.ready(self.data, self.span(client))

    def span(self, client: int) -> slice:
        """Where a client's samples stand."""
        first = int(self.offsets[client])
        return slice(first, first + int(self.sizes[client]))

    def ready(self, data: Batch, index: Any) -> Batch:
        """Some samples as the model takes them."""
        x = data.x[index]
        return Batch(x if self.scale is None else self.scale(x), data.y[index])

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

            few = self.ready(self.data, slice(self.batch_size))
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
                self.objective(self.point().requires_grad_(), *few)
            sizes = [v.numel() * v.element_size() for v in (*few, self.point())]
            self._client_bytes = 4 * sum(saved) + 2 * sum(sizes[:2]) + 16 * sizes[2]
        return self._client_bytes

    # -- evaluation ---------------------------------------------------------------------------------------------
    @torch.no_grad()
    def evaluate(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """The metrics at x [..., d]: [...] each, in float64."""
        metrics = self._evaluation(x.reshape(-1, self.d), weights)
        return {name: value.view(x.shape[:-1]) for name, value in metrics.items()}


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are learned; frozen ones (`requires_grad_(False)`) are constants of the model."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def flatten(model: nn.Module) -> Tensor:
    """The parameters as one vector, in the order of `named_parameters`."""
    return torch.cat([p.detach().flatten() for _, p in trainable(model)])


def cast(data: Batch, dtype: torch.dtype, scale: Scale | None = None, device: Any = None) -> Batch:
    """Floating-point data in the model's dtype, whole numbers (classes, tokens) in int64; a scaled x as it is."""

    def one(v: Tensor) -> Tensor:
        return v.to(device, dtype) if v.is_floating_point() else v.to(device, torch.int64)

    return Batch(one(data.x) if scale is None else data.x.to(device), one(data.y))
