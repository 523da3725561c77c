"""Any nn.Module with a loss and arrays, as a federated problem on one flat vector of parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .. import rng
from ..core import Problem
from .batchnorm import BatchNorms
from .evaluation import Evaluation
from .gradients.chain.stack import Chain
from .gradients.choose import Paths, tensor_cores
from .gradients.kernels import draw_kernel
from .gradients.vmap import gradient
from .totals import Add, Mine, Totals, all_of, means, one_process

Loss = Callable[[Tensor, Tensor], Tensor]
AT_ONCE = 8e6  # bytes of batches that are looked up together


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


class Neural(Problem):
    """A model, a loss (a mean over the batch) and samples that belong to clients; made by `fedda.problem`."""

    max_rate = 1.0  # a first effective rate above it has blown up every network seen (docs/deviations.md)

    def __init__(
        self, model: nn.Module, loss: Loss, data: Batch, client: Tensor, batch: int, test: Batch | None,
        init: Callable[[int], Tensor] | None = None, scale: Scale | None = None, rows: Tensor | None = None,
        validation: Batch | None = None,
    ):  # fmt: skip
        self.model, self.loss, self.batch_size, self.init, self.scale = model, loss, batch, init, scale
        order = torch.argsort(client, stable=True)
        self.names, self.sizes = torch.unique(client, return_counts=True)
        self.offsets = self.sizes.cumsum(0) - self.sizes
        # Where x is a file mapped into memory, `rows` says where samples stand in it: what nobody asks for is not read.
        self.rows = None if rows is None else rows[order]
        self.data = Batch(data.x[order] if rows is None else data.x, data.y[order])
        self.test, self.validation = test, validation
        self.clients = len(self.names)
        self.held = slice(0, self.clients)  # whose samples are here
        self.d = flatten(model).numel()
        self.chain = Chain.of(model, loss, tuple(data.x.shape[1:]))
        if self.chain is not None and not all(self.chain.takes(part.y) for part in (data, *self.held_out.values())):
            self.chain = None
        self._settle()

    def _settle(self) -> None:
        """What depends on device and dtype, made anew."""
        self.norms = BatchNorms(self.model)
        self._evaluation, self._client_bytes = Evaluation(self), 0
        self.draw_kernel = draw_kernel(self.device)
        self._known = {("auto", "auto"): Paths(self, "auto", "auto")}
        self.paths = self._known["auto", "auto"]

    def with_path(self, path: str, precision: str, clients: int) -> Neural:
        """The same problem with its gradients computed by a path, in a precision, for stacks of so many clients."""
        other = copy.copy(self)
        if (path, precision) not in self._known:
            self._known[path, precision] = Paths(self, path, precision)
        other.paths = self._known[path, precision].of(clients)
        other._evaluation = copy.copy(self._evaluation)  # with what it has found out about the loss
        other._evaluation.problem = other
        return other

    def arithmetic(self) -> AbstractContextManager[None]:
        """The settings under which operations recorded from a gradient must run."""
        return tensor_cores(self.paths.precision != "float32")

    @property
    def held_out(self) -> dict[str, Batch]:
        """The samples that nobody trains on, by their names in the metrics."""
        parts = {"validation": self.validation, "test": self.test}
        return {name: part for name, part in parts.items() if part is not None}

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
        data, x = self.data, self.data.x
        stays = moved.sizes.device.type == "cpu" and not (x.is_floating_point() and x.dtype != moved.dtype)
        if self.rows is not None and not stays:
            data, moved.rows = self.pick(data, slice(None)), None  # a copy all the same: of these samples alone
        moved.data = cast(data, moved.dtype, moved.scale, device)
        for name, part in self.held_out.items():
            setattr(moved, name, cast(part, moved.dtype, moved.scale, device))
        moved._settle()
        return moved

    def only(self, clients: slice) -> Neural:
        """The same problem with the samples of some clients in a row: the others' are with other processes."""
        part, span = copy.copy(self), self.spans(clients)
        x = self.data.x if self.rows is not None else self.data.x[span].clone()
        part.rows = self.rows if self.rows is None else self.rows[span].clone()
        part.data, part.held, part.offsets = Batch(x, self.data.y[span].clone()), clients, self.offsets - span.start
        part._settle()
        return part

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
        return self.pick(self.data, self.draw(ids, key))

    def batches(self, ids: Tensor, keys: Tensor) -> Iterator[Batch]:
        """A batch for each of keys [draws, ..., c], drawn in one go, and where they are small looked up in one go."""
        index = self.draw(ids, keys)
        if index.numel() * self.data.x[0].nbytes > AT_ONCE:
            return (self.pick(self.data, one) for one in index)
        return map(Batch, *self.pick(self.data, index))

    def draw(self, ids: Tensor, key: Tensor) -> Tensor:
        """Where the samples of batches stand, [..., c, batch]."""
        if self.draw_kernel is not None:
            index: Tensor = self.draw_kernel(key, ids, self.offsets, self.sizes, self.batch_size)
            return index
        key = rng.fold(key[..., None], torch.arange(self.batch_size, device=key.device))
        return self.offsets[ids][..., None] + rng.integers(key, self.sizes[ids][..., None])

    def example(self, n: int) -> tuple[Tensor, Batch]:
        """A stack of n points and batches, such as gradients are taken of: to measure with."""
        ids = self.held.start + torch.arange(n, device=self.device) % (self.held.stop - self.held.start)
        return self.point().expand(n, self.d).contiguous(), self.batch(ids, ids)

    def everything(self, client: int) -> Batch:
        batch = self.pick(self.data, self.spans(slice(client, client + 1)))
        if self.norms.layers and len(batch.y) == 1:  # torch refuses a variance over one: twice the sample has the same
            batch = Batch(*(torch.cat([v, v]) for v in batch))
        return batch

    def subset(self, client: int, index: Tensor) -> Batch:
        return self.pick(self.data, int(self.offsets[client]) + index.to(self.device))

    def spans(self, clients: slice) -> slice:
        """Where the samples of some clients in a row stand."""
        last = clients.stop - 1
        return slice(int(self.offsets[clients.start]), int(self.offsets[last] + self.sizes[last]))

    def pick(self, data: Batch, index: Any) -> Batch:
        """Some samples, or some clients' batches, as they are stored."""
        if data is self.data and self.rows is not None:
            index = index if isinstance(index, Tensor) else torch.arange(len(data.y))[index]
            rows = self.rows[index.flatten()]
            return Batch(data.x.index_select(0, rows).view(*index.shape, *data.x.shape[1:]), data.y[index])
        if not isinstance(index, Tensor):
            return Batch(data.x[index], data.y[index])
        rows = index.flatten()  # index_select copies whole rows, which indexing does not
        x, y = (v.index_select(0, rows).view(*index.shape, *v.shape[1:]) for v in data)
        return Batch(x, y)

    def ready(self, batch: Batch) -> Batch:
        """Samples as the model takes them."""
        return batch if self.scale is None else Batch(self.scale(batch.x), batch.y)

    # -- gradients ----------------------------------------------------------------------------------------------
    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        """The model's output at the flat parameters x [d], in training."""
        model = self.norms.training
        output: Tensor = functional_call(model, placed(model, x), (inputs,), tie_weights=False)
        return output

    def inference(self, point: Tensor, inputs: Tensor) -> Tensor:
        """The model's output in evaluation, at parameters followed by BatchNorm's statistics, where it has any."""
        if not self.norms.layers:
            return self.forward(point, inputs)
        x, statistics = point.split([self.d, self.norms.size])
        model = self.norms.evaluation
        named = placed(model, x) | self.norms.named(statistics)
        output: Tensor = functional_call(model, named, (inputs,), tie_weights=False)
        return output

    def objective(self, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.forward(x, inputs), targets)

    def batch_loss(self, x: Tensor, batch: Batch) -> Tensor:
        return self.objective(x, *self.ready(batch))

    def gradient(self, x: Tensor, batch: Batch) -> Tensor:
        with tensor_cores(False):
            return gradient(self.objective, x, *self.ready(batch))

    def gradients(self, x: Tensor, batch: Batch) -> Tensor:
        """All at once; x [points, ..., c, d] has one leading axis more than the batch, which all points share."""
        lead = x.dim() - 2
        if lead > 1:
            batch = Batch(*(v.flatten(0, lead - 1) for v in batch))
        return self.paths(x.reshape(-1, self.d), batch).view(x.shape)

    def bytes_per_client(self) -> int:
        """Vectors, batch and saved activations of one client with two points (measured once, in one forward pass)."""
        if not self._client_bytes:
            saved: list[int] = []

            def pack(v: Tensor) -> Tensor:
                saved.append(v.numel() * v.element_size())
                return v

            few = self.ready(self.pick(self.data, slice(self.batch_size)))
            if self.norms.layers:  # which want a whole batch
                few = self.ready(Batch(*(v[0] for v in self.example(1)[1])))
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
                self.objective(self.point().requires_grad_(), *few)
            sizes = [v.numel() * v.element_size() for v in (*few, self.point())]
            self._client_bytes = 4 * sum(saved) + 2 * sum(sizes[:2]) + 16 * sizes[2]
        return self._client_bytes

    # -- evaluation ---------------------------------------------------------------------------------------------
    @torch.no_grad()
    def evaluate(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """The metrics at x [..., d]: [...] each, in float64."""
        return means(self.totals(x, weights))

    @torch.no_grad()
    def totals(self, x: Tensor, weights: Tensor, mine: Mine = all_of, add: Add = one_process) -> Totals:
        """What the metrics are means of, over some of the clients and of the test samples. `add` sums over those who
        look at the others: BatchNorm's statistics are everybody's."""
        points = x.reshape(-1, self.d)
        with self.arithmetic():
            if self.norms.layers:
                statistics = self.norms.estimated(self._evaluation, points, weights, mine, add)
                points = torch.cat([points, statistics.to(x.dtype)], dim=-1)
            found = self._evaluation(points, weights, mine)
        return {name: (total.view(x.shape[:-1]), weight) for name, (total, weight) in found.items()}

    @torch.no_grad()
    def statistics(self, x: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
        """The running mean and variance of every BatchNorm at x [..., d], by the names of the model's buffers: what a
        trained model is evaluated with. `weights` are the clients', equal by default."""
        weights = torch.ones_like(self.sizes, dtype=torch.float64) if weights is None else weights
        if not self.norms.layers:
            return {}
        with self.arithmetic():
            found = self.norms.estimated(self._evaluation, x.reshape(-1, self.d), weights, all_of, one_process)
        return self.norms.named(found.to(x.dtype).view(*x.shape[:-1], -1))


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are learned; frozen ones (`requires_grad_(False)`) are constants of the model."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def placed(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The numbers of a flat vector by the names of the parameters."""
    parameters = [p for _, p in trainable(model)]
    parts = x.split([p.numel() for p in parameters])
    values = {id(p): part.view(p.shape) for p, part in zip(parameters, parts, strict=True)}
    # Every place of a tied parameter, but a module that is used twice once: torch's own ties would put it in twice
    # and take it out once, and leave the values in the model.
    return {
        name: values[id(p)]
        for prefix, module in model.named_modules()
        for name, p in module.named_parameters(prefix, recurse=False)
        if id(p) in values
    }


def flatten(model: nn.Module) -> Tensor:
    """The parameters as one vector, in the order of `named_parameters`."""
    return torch.cat([p.detach().flatten() for _, p in trainable(model)])


def cast(data: Batch, dtype: torch.dtype, scale: Scale | None = None, device: Any = None) -> Batch:
    """Floating-point data in the model's dtype, whole numbers (classes, tokens) in int64; a scaled x as it is."""

    def one(v: Tensor) -> Tensor:
        return v.to(device, dtype) if v.is_floating_point() else v.to(device, torch.int64)

    return Batch(one(data.x) if scale is None else data.x.to(device), one(data.y))
