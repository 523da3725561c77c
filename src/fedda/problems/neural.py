"""A federated problem from an nn.Module, a loss and arrays; the parameters are one flat vector."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from .. import rng
from ..core import Evaluated, Layout, Problem
from ..data.tables import Columns
from ..user_code import has_user_code, of_fedda
from . import personal
from .augment import Augmentation
from .augment import apply as augment
from .batchnorm import SAMPLES as STATISTICS_SAMPLES
from .batchnorm import BatchNorms
from .evaluation import Evaluation, Shard, Sum, Totals, finished, means, non_empty, unchanged, whole_range
from .fingerprint import fingerprint
from .gradients.chain import Chain
from .gradients.choose import GradientPaths, allow_tf32
from .gradients.kernels import draw_kernel
from .gradients.vmap import gradient
from .metrics import Metric
from .randomness import CounterRandom
from .trees import arguments, at, first_tensor, map_tensors

Loss = Callable[[Any, Any], Tensor]
Device = torch.device | str | None
NAMES = 20  # of parameters, in an error message
MOST_CLASSES, MOST_COUNTS = 1000, 20_000  # that a report shows by client
GATHER_BYTES = 8e6  # up to this size, several batches are gathered together


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs and targets, with leading axes for replicas and clients: `x, y = batch`. Each of them is a tensor, or a
    tuple or dict of tensors.

    If the model has random layers, a third tensor, `key`, decides their numbers.
    """

    x: Any
    y: Any
    key: Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.x, self.y) if self.key is None else (self.x, self.y, self.key))

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(*(map_tensors(function, v) for v in self))

    def leaves(self) -> list[Tensor]:
        """All tensors: those of x, those of y, the key."""
        return tree_leaves(tuple(self))

    @property
    def samples(self) -> int:
        """The length of the first axis."""
        return len(first_tensor(self.y))


class Scale(NamedTuple):
    """Standardises samples when they are used, (x - mean) / std: images stay bytes, a quarter of the size of floats."""

    mean: Tensor
    std: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return (x.to(self.mean.dtype) - self.mean) / self.std


class Neural(Problem):
    """A model, a loss (a mean over the batch) and samples that belong to clients; made by `fedda.problem`.

    The samples are sorted by client: those of client k start at `offsets[k]`, and there are `sizes[k]` of them.
    """

    random = False  # whether the model has random layers, such as dropout
    nan_alone = False  # whether some sample alone has the loss NaN, as one of a class that the loss ignores
    augment: Augmentation | None = None  # changes training samples at random
    columns: Columns | None = None  # if the data is a table
    metrics: Mapping[str, Metric] = MappingProxyType({})  # besides the loss and the accuracy, by name
    sample_metrics: Mapping[str, Metric] = MappingProxyType({})  # those that give a number for each sample
    owners: Mapping[str, Tensor] = MappingProxyType({})  # the client of each held-out sample, by part, where known
    first_client = 0  # its number, where this is a part of a larger problem, for the random numbers of clients
    max_rate = 1.0  # a larger first effective rate made every network that we tried diverge (docs/deviations.md)

    def __init__(
        self, model: nn.Module, loss: Loss, data: Batch, client: Tensor, batch: int, test: Batch | None,
        init: Callable[[int], Tensor] | None = None, scale: Scale | None = None, rows: Tensor | None = None,
        validation: Batch | None = None, stays: Sequence[str] = (), owners: dict[str, Tensor] | None = None,
    ):  # fmt: skip
        self.model, self.loss, self.batch_size, self.init, self.scale = model, loss, batch, init, scale
        order = torch.argsort(client, stable=True)
        self.sizes = torch.unique(client, return_counts=True)[1]
        self.offsets = self.sizes.cumsum(0) - self.sizes
        # If x is a file mapped into memory, `rows` are the rows of the samples in it: other rows are never read.
        self.rows = None if rows is None else rows[order]
        x = at(data.x, order) if rows is None else data.x
        self.data = Batch(x, at(data.y, order))
        # How x and y are put together from their tensors; None if both are tensors.
        self.structure = None if all(isinstance(v, Tensor) for v in data) else tree_flatten((data.x, data.y))[1]
        self.test, self.validation, self.owners = test, validation, dict[str, Tensor]()
        for name, owner in (owners or {}).items():  # held-out samples with owners are sorted by them
            self.owners[name], order = torch.sort(owner, stable=True)
            part = self.held_out[name]
            setattr(self, name, Batch(at(part.x, order), at(part.y, order)))
        self.clients = len(self.sizes)
        self.local_clients = slice(0, self.clients)  # the clients whose samples this process has
        self.personal = tuple(stays)  # the names of the parameters that stay on their clients
        self.personal_values: Tensor | None = None  # those of each client, for evaluation
        self.d_personal = sum(p.numel() for name, p in trainable(model) if name in self.personal)
        self.d = flatten(model).numel() - self.d_personal
        self.chain = self.known_chain()
        self._rebuild_caches()

    def known_chain(self, norms: bool = False) -> Chain | None:
        """The model as a chain of known layers, if it is one and the chain's loss fits all targets."""
        names = [name for name, _ in trainable(self.model)]
        if self.structure is not None or names != [name for name, _ in trainable(self.model, self.personal)]:
            return None
        chain = Chain.of(self.model, self.loss, tuple(self.data.x.shape[1:]), norms)
        fits = chain is not None and all(chain.takes(part.y) for part in (self.data, *self.held_out.values()))
        return chain if fits else None

    def __repr__(self) -> str:
        held_out = "".join(f", {name}={part.samples:,}" for name, part in self.held_out.items())
        samples = f"samples={int(self.sizes.sum()):,}{held_out}"
        return f"{type(self.model).__name__} problem: clients={self.clients}, {samples}, parameters={self.d:,}"

    def _rebuild_caches(self) -> None:
        """Make everything that depends on the device, the dtype or the samples."""
        self.batch_norms = BatchNorms(self.model, self.random)
        self._evaluation, self._client_bytes = Evaluation(self), 0
        self.draw_kernel = draw_kernel(self.device)
        self._paths_by_name = {("auto", "auto"): GradientPaths(self, "auto", "auto")}
        self.gradient_paths = self._paths_by_name["auto", "auto"]

    def with_path(self, path: str, precision: str, clients: int) -> Neural:
        """The same problem with its gradients computed by this path, in this precision, for stacks of `clients`."""
        other = copy.copy(self)
        if (path, precision) not in self._paths_by_name:
            self._paths_by_name[path, precision] = GradientPaths(self, path, precision)
        other.gradient_paths = self._paths_by_name[path, precision].tuned(clients)
        other._evaluation = copy.copy(self._evaluation)  # keeps what it knows about the loss
        other._evaluation.problem = other
        return other

    @property
    def calls_user_code(self) -> bool:
        """Whether a step calls the model or an augmentation of the user. The paths record the model once, but for the
        loop and for a model that `traced` cannot record."""
        paths = self.gradient_paths
        called = paths.chosen == "loop" or (paths.chosen == "traced" and paths.stacked.calls_model)
        return not of_fedda(type(self)) or called or has_user_code(self.augment)

    def arithmetic(self) -> AbstractContextManager[None]:
        """The settings under which operations recorded from a gradient must run."""
        return allow_tf32(self.gradient_paths.precision != "float32")

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the samples, targets and owners; that of all clients if it is asked for before `only`."""
        return fingerprint(self)

    def class_counts(self) -> list[list[int]]:
        """How many samples of each class each client has; empty without classes, for very many of them, or if this
        process has only some of the clients."""
        y, mine = self.data.y, self.local_clients
        if not isinstance(y, Tensor) or y.ndim != 1 or y.is_floating_point() or mine.stop - mine.start != self.clients:
            return []
        classes = int(y.max()) + 1 if len(y) and int(y.min()) >= 0 else 0
        if not 1 < classes <= MOST_CLASSES or classes * self.clients > MOST_COUNTS:
            return []
        owner = torch.repeat_interleave(torch.arange(self.clients), self.sizes.cpu())
        counts = torch.bincount(owner * classes + y.cpu(), minlength=self.clients * classes)
        rows: list[list[int]] = counts.reshape(self.clients, classes).tolist()
        return rows

    @property
    def held_out(self) -> dict[str, Batch]:
        """The validation and test samples, by their names in the metrics."""
        parts = {"validation": self.validation, "test": self.test}
        return {name: part for name, part in parts.items() if part is not None}

    # -- device and dtype ---------------------------------------------------------------------------------------
    @property
    def device(self) -> torch.device:
        return first_tensor(self.data.x).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def to(self, device: Device = None, dtype: torch.dtype | None = None) -> Neural:
        moved = copy.copy(self)
        moved.model = copy.deepcopy(self.model).to(device=device, dtype=dtype)
        for name in ("sizes", "offsets"):
            setattr(moved, name, getattr(self, name).to(device))
        moved.scale = self.scale and Scale(*(v.to(device, moved.dtype) for v in self.scale))
        data = self.data
        stays_mapped = moved.sizes.device.type == "cpu" and not any(
            v.is_floating_point() and v.dtype != moved.dtype for v in tree_leaves(data.x)
        )
        if self.rows is not None and not stays_mapped:
            data, moved.rows = self.pick(data, slice(None)), None  # copy only the samples that are used
        moved.data = cast(data, moved.dtype, moved.scale, device)
        for name, part in self.held_out.items():
            setattr(moved, name, cast(part, moved.dtype, moved.scale, device))
        moved.owners = {name: owner.to(device) for name, owner in self.owners.items()}
        moved._rebuild_caches()
        return moved

    def only(self, clients: slice) -> Neural:
        """The same problem with the samples of a range of clients only: other processes have the rest."""
        part, span = copy.copy(self), self.spans(clients)
        own = self.data.map(lambda v: v[span].clone()) if self.rows is None else self.data
        if self.rows is not None:
            part.rows, own = self.rows[span].clone(), replace(own, y=map_tensors(torch.clone, at(own.y, span)))
        part.data, part.offsets = own, self.offsets - span.start
        part.local_clients = clients
        part._rebuild_caches()
        return part

    @property
    def layout(self) -> Layout:
        """Names and shapes of the parameters, in the order of the flat vector."""
        return [(name, tuple(p.shape)) for name, p in trainable(self.model) if name not in self.personal]

    @property
    def personal_layout(self) -> Layout:
        return [(name, tuple(p.shape)) for name, p in trainable(self.model) if name in self.personal]

    @property
    def frozen(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters() if not p.requires_grad}

    def start(self, seed: int) -> Tensor:
        """The first point: the parameters of the model, or those of `init(seed)`."""
        return self._first(seed)[: self.d]

    def personal_start(self, seed: int) -> Tensor:
        return self._first(seed)[self.d :]

    def _first(self, seed: int) -> Tensor:
        if self.init is None:
            return self.full_point()
        x = self.init(seed).to(device=self.device, dtype=self.dtype)
        if not self.personal:
            return x
        # `init` gives all parameters in the order of the module
        parameters = trainable(self.model)
        parts = dict(zip([name for name, _ in parameters], x.split([p.numel() for _, p in parameters]), strict=True))
        return torch.cat([parts[name] for name, _ in trainable(self.model, self.personal)])

    def point(self) -> Tensor:
        """The shared parameters of the model as one vector."""
        return self.full_point()[: self.d]

    def full_point(self) -> Tensor:
        """All parameters of the model that are trained: the shared ones, then the personal ones."""
        return flatten(self.model, self.personal)

    def number_of(self, client: Any) -> int:
        """The number of a client with personal parameters, from its name as the rows of clients show it."""
        if not self.personal:
            raise ValueError("model: without personal parameters all clients have the same model; leave out client")
        names = [str(name) for name in self.client_names or range(self.clients)]
        if str(client) not in names:
            shown = ", ".join(names[:NAMES]) + (", ..." if len(names) > NAMES else "")
            raise ValueError(f"model: there is no client {client!r}; there are {shown}")
        return names.index(str(client))

    def personalised(self, personal: Tensor) -> Neural:
        other = copy.copy(self)
        other.personal_values = personal.reshape(-1, *personal.shape[-2:])
        other._evaluation = copy.copy(self._evaluation)
        other._evaluation.problem = other
        return other

    @property
    def local_statistics(self) -> Tensor:
        """Which statistics of BatchNorm stay on their clients, [size]: those of layers with personal parameters."""
        norms = self.batch_norms
        flags = [any(name.startswith(f"{layer}.") for name in self.personal) for layer in norms.layers]
        widths = torch.tensor([2 * width for width in norms.widths])
        return torch.tensor(flags).repeat_interleave(widths).to(self.device)

    # -- batches ------------------------------------------------------------------------------------------------
    def batch(self, ids: Tensor, key: Tensor) -> Batch:
        """A batch for each client: samples of the client, uniform, with replacement."""
        return self._trained_on(self.pick(self.data, self.draw(ids, key)), key)

    def _trained_on(self, batch: Batch, key: Tensor) -> Batch:
        """A batch of the training samples, augmented, with the key of the random layers."""
        if self.augment is not None:
            batch = Batch(augment(self.augment, batch.x, key), batch.y)
        return self._keyed(batch, key)

    def _keyed(self, batch: Batch, key: Tensor) -> Batch:
        # A negative counter: the samples of the batch have the counters 0, 1, ...
        return replace(batch, key=rng.fold(key, -rng.LAYERS)) if self.random else batch

    def batches(self, ids: Tensor, keys: Tensor) -> Iterator[Batch]:
        """A batch for each of keys [draws, ..., c], drawn together."""
        return self._gathered(self.draw(ids, keys), keys)

    def _gathered(self, index: Tensor, keys: Tensor) -> Iterator[Batch]:
        """The batches of the samples [draws, ..., c, batch], gathered together if they are small."""
        if index.numel() * sum(v[0].nbytes for v in tree_leaves(self.data.x)) > GATHER_BYTES:
            return (self._trained_on(self.pick(self.data, one), key) for one, key in zip(index, keys, strict=True))
        together = self._trained_on(self.pick(self.data, index), keys)
        if self.structure is None:
            return map(Batch, *together)
        return (Batch(*(at(v, i) for v in together)) for i in range(len(keys)))

    def draw(self, ids: Tensor, key: Tensor) -> Tensor:
        """The indices of the samples of batches, [..., c, batch]."""
        if self.draw_kernel is not None:
            return self.draw_kernel(key, ids, self.offsets, self.sizes, self.batch_size)
        key = rng.fold(key[..., None], torch.arange(self.batch_size, device=key.device))
        index: Tensor = self.offsets[ids][..., None] + rng.integers(key, self.sizes[ids][..., None])
        return index

    def shuffled(self, ids: Tensor, key: Tensor, draws: Tensor) -> Iterator[Batch]:
        """The batches number `draws` of passes over each client's data. Every pass has a new random order, and a batch
        at the end of a pass is filled from the next one."""
        sizes = self.sizes[ids][..., None]
        lead = draws.view(-1, *[1] * (key.dim() + 1))
        place = lead * self.batch_size + torch.arange(self.batch_size, device=key.device)  # in an endless sequence
        order = rng.fold(rng.fold(key, -rng.SHUFFLE)[..., None], place // sizes)  # one key for each pass
        index = self.offsets[ids][..., None] + rng.shuffle(order, place % sizes, sizes)
        return self._gathered(index, rng.fold(key, lead[..., 0]))

    def example(self, n: int) -> tuple[Tensor, Batch]:
        """A stack of n points and their batches, for measurements."""
        clients = self.local_clients
        ids = clients.start + torch.arange(n, device=self.device) % (clients.stop - clients.start)
        return self.full_point().expand(n, -1).contiguous(), self.batch(ids, ids)

    def everything(self, client: int) -> Batch:
        """All samples of a client. Its random layers take the same numbers each time, those of the client."""
        batch = self.pick(self.data, self.spans(slice(client, client + 1)))
        if self.batch_norms.layers and batch.samples == 1:  # torch refuses one sample; twice the sample is the same
            batch = batch.map(lambda v: torch.cat([v, v]))
        return self._keyed(batch, torch.tensor(self.first_client + client, device=self.device))

    def subset(self, client: int, index: Tensor) -> Batch:
        batch = self.pick(self.data, int(self.offsets[client]) + index.to(self.device))
        return self._keyed(batch, torch.tensor(self.first_client + client, device=self.device))

    def spans(self, clients: slice) -> slice:
        """The range of the samples of a range of clients."""
        last = clients.stop - 1
        return slice(int(self.offsets[clients.start]), int(self.offsets[last] + self.sizes[last]))

    def pick(self, data: Batch, index: Tensor | slice | int | tuple[int, ...]) -> Batch:
        """Some samples, or the batches of some clients, as they are stored."""
        if data is self.data and self.rows is not None:
            index = index if isinstance(index, Tensor) else torch.arange(data.samples)[index]
            rows = self.rows[index.flatten()]
            x = map_tensors(lambda v: v.index_select(0, rows).view(*index.shape, *v.shape[1:]), data.x)
            return Batch(x, at(data.y, index))
        if not isinstance(index, Tensor):
            return data.map(lambda v: v[index])
        rows = index.flatten()  # index_select copies whole rows, unlike indexing
        return data.map(lambda v: v.index_select(0, rows).view(*index.shape, *v.shape[1:]))

    def standardised(self, batch: Batch) -> Batch:
        """Samples as the model gets them."""
        return batch if self.scale is None else replace(batch, x=self.scale(batch.x))

    # -- gradients ----------------------------------------------------------------------------------------------
    def forward(self, x: Tensor, inputs: Any, key: Tensor | None = None) -> Any:
        """The output of the model in training mode, at the parameters x [d]; `key` is that of its random layers."""
        model = self.batch_norms.training
        if self.random and key is None:
            key = torch.zeros((), dtype=torch.int64, device=x.device)
        with nullcontext() if key is None else CounterRandom(key):
            return functional_call(model, unflatten(model, x, self.personal), *arguments(inputs), tie_weights=False)

    def inference(self, point: Tensor, inputs: Any) -> Any:
        """The output of the model in evaluation mode; `point` is its parameters, then any BatchNorm statistics."""
        if not (self.batch_norms.layers or self.random):
            return self.forward(point, inputs)
        x, statistics = torch.split(point, [self.d + self.d_personal, self.batch_norms.size])
        model = self.batch_norms.evaluation
        named = unflatten(model, x, self.personal) | self.batch_norms.named(statistics)
        return functional_call(model, named, *arguments(inputs), tie_weights=False)

    def objective(self, x: Tensor, inputs: Any, targets: Any, key: Tensor | None = None) -> Tensor:
        return self.loss(self.forward(x, inputs, key), targets)

    def objective_of(self, x: Tensor, *leaves: Tensor) -> Tensor:
        """The same from the leaves of a batch: paths that record or stack gradients take tensors only."""
        if self.structure is None:
            return self.objective(x, *leaves)
        n = self.structure.num_leaves
        return self.objective(x, *tree_unflatten(leaves[:n], self.structure), *leaves[n:])

    def batch_loss(self, x: Tensor, batch: Batch) -> Tensor:
        return self.objective(x, *self.standardised(batch))

    def gradient(self, x: Tensor, batch: Batch) -> Tensor:
        """The gradient [d] of one client, by autograd in full precision: the reference for all other paths."""
        with allow_tf32(False):
            return gradient(self.objective, x, *self.standardised(batch))

    def gradients(self, x: Tensor, batch: Batch) -> Tensor:
        """The gradients of a stack. x [points, ..., c, d] has one leading axis more than the batch: points share it.
        Personal parameters follow the shared ones in x."""
        lead = x.dim() - 2
        if lead > 1:
            batch = batch.map(lambda v: v.flatten(0, lead - 1))
        gradients: Tensor = self.gradient_paths(x.reshape(-1, x.shape[-1]), batch)
        return gradients.view(x.shape)

    def bytes_per_client(self) -> int:
        """The memory of one client with two points: vectors, batch and saved activations, from one forward pass."""
        if not self._client_bytes:
            saved: list[int] = []

            def pack(v: Tensor) -> Tensor:
                saved.append(v.numel() * v.element_size())
                return v

            batch = self.standardised(self.pick(self.data, slice(self.batch_size)))
            if self.batch_norms.layers or self.random:  # these need a whole batch
                batch = self.standardised(self.example(1)[1].map(lambda v: v[0]))
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
                self.objective(self.full_point().requires_grad_(), *batch)
            samples = sum(v.nbytes for v in tree_leaves((batch.x, batch.y)))
            self._client_bytes = 4 * sum(saved) + 2 * samples + 16 * self.full_point().nbytes
        return self._client_bytes

    # -- evaluation ---------------------------------------------------------------------------------------------
    @torch.no_grad()
    def evaluate(self, x: Tensor, weights: Tensor, samples: int | None = None) -> dict[str, Tensor]:
        """The metrics at x [..., d], each [...] in float64; `weights` are those of the clients. With `samples`, those
        of the training samples are estimated from about so many, always the same ones."""
        return self.finished(means(self.totals(x, weights, samples=samples)))

    @torch.no_grad()
    def totals(
        self, x: Tensor, weights: Tensor, mine: Shard = whole_range, add: Sum = unchanged, samples: int | None = None,
        statistics: Tensor | None = None,
    ) -> Totals:  # fmt: skip
        """The metrics as sums and weights, over this process's share of the clients and of the test samples. `add` sums
        over all processes, for the statistics of BatchNorm and for metrics of whole sets. Without `statistics` [size],
        these are estimated."""
        with self.arithmetic():
            points = x.reshape(-1, self.d)
            if self.personal:
                totals = personal.totals(self, self._evaluation, points, weights, mine, add, samples)
            else:
                if statistics is None:
                    points = self.with_statistics(points, weights, mine, add)
                else:
                    points = torch.cat([points, statistics.expand(len(points), -1)], dim=-1)
                totals = self._evaluation(points, weights, mine, add, samples)
        return {name: (total.view(x.shape[:-1]), weight) for name, (total, weight) in totals.items()}

    def with_statistics(self, points: Tensor, weights: Tensor, mine: Shard, add: Sum) -> Tensor:
        """Points [replicas, d], followed by the statistics of BatchNorm at each, if the model has it."""
        if not self.batch_norms.layers:
            return points
        statistics = self.batch_norms.estimate(self._evaluation, points, weights, mine, add)
        return torch.cat([points, statistics.to(points.dtype)], dim=-1)

    @torch.no_grad()
    def moments(self, x: Tensor, draws: int) -> Tensor:
        """The means and second moments of the inputs of every BatchNorm at x [replicas, d], from `draws` mini-batches
        of each client: [replicas, size] in float64."""
        weights = torch.ones_like(self.sizes, dtype=torch.float64)
        with self.arithmetic():
            return self.batch_norms.total_moments(self._evaluation, x, weights, whole_range, draws)

    def finished(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        return finished(self.metrics, values)

    @property
    def set_metrics(self) -> dict[str, Metric]:
        """The metrics that give one number for a set of samples."""
        return {name: metric for name, metric in self.metrics.items() if name not in self.sample_metrics}

    @torch.no_grad()
    def client_metrics(self, x: Tensor, weights: Tensor, mine: Shard, add: Sum) -> dict[str, Tensor]:
        with self.arithmetic():
            if self.personal:
                return personal.client_metrics(self, self._evaluation, x, weights, mine, add)
            points = self.with_statistics(x, weights, mine, add)
            values = self._evaluation.client_values(points, mine)
            named = {f"train_{name}": v for name, v in values.items()}
            for part in self.owners:
                values = self._evaluation.held_out_values(points, part, non_empty(mine(self.clients))[0])
                named |= {f"{part}_{name}": v for name, v in values.items()}
        return named

    @torch.no_grad()
    def personal_metrics(self, x: Tensor, clients: slice) -> dict[str, Tensor]:
        """The metrics of a model for each client: on its held-out samples if their owners are known, else on its
        training samples. The statistics of BatchNorm are those of the client."""
        part = next(iter(self.owners), "train")
        columns = []
        with self.arithmetic():
            for i, k in enumerate(range(clients.start, clients.stop)):
                only = slice(k, k + 1)
                weights = torch.zeros_like(self.sizes, dtype=torch.float64)
                weights[k] = 1
                points = self.with_statistics(x[:, i], weights, partial(_always, only), unchanged)
                columns.append(self._evaluation.held_out_values(points, part, only))
        return {f"{part}_{name}": torch.cat([values[name] for values in columns], dim=-1) for name in columns[0]}

    def evaluated(self) -> Evaluated:
        train, held_out = int(self.sizes.sum()), sum(part.samples for part in self.held_out.values())
        statistics = min(STATISTICS_SAMPLES, train) if self.batch_norms.layers else 0
        return Evaluated(train, held_out + statistics, self.batch_size)

    def metric_names(self, part: str) -> list[str]:
        if part not in self.held_out:
            return []
        return self._evaluation.names(self.held_out[part])

    @property
    def directions(self) -> dict[str, str]:
        return {name: metric.better for name, metric in self.metrics.items()}

    def evaluated_samples(self, samples: int | None) -> int:
        """How many training samples an evaluation uses; all of them without `samples`."""
        return int((self.sizes if samples is None else self._evaluation.subset(samples)[1]).sum())

    @torch.no_grad()
    def named_values(self, x: Tensor, weights: Tensor | None = None, client: int | None = None) -> dict[str, Tensor]:
        """The trained parameters and the statistics of BatchNorm at x [d], by name. Personal parameters are those of
        `client`, or else the mean over clients."""
        if not self.personal:
            return unflatten(self.model, x) | self.statistics(x, weights)
        weights = torch.ones_like(self.sizes, dtype=torch.float64) if weights is None else weights
        points, mean = personal.client_points(self, self._evaluation, x[None], weights, whole_range)
        point = mean[0] if client is None else points[0, client]
        named = unflatten(self.model, point[: self.d + self.d_personal], self.personal)
        norms = self.batch_norms
        return named | (norms.named(point[self.d + self.d_personal :]) if norms.layers else {})

    @torch.no_grad()
    def statistics(self, x: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
        """The running mean and variance of every BatchNorm at x [..., d], by the names of the model's buffers, for the
        evaluation of a trained model. `weights` are those of the clients, equal by default."""
        if not self.batch_norms.layers:
            return {}
        weights = torch.ones_like(self.sizes, dtype=torch.float64) if weights is None else weights
        points = x.reshape(-1, self.d)
        with self.arithmetic():
            statistics = self.batch_norms.estimate(self._evaluation, points, weights, whole_range, unchanged)
        return self.batch_norms.named(statistics.to(x.dtype).view(*x.shape[:-1], -1))


def _always(part: slice, n: int) -> slice:
    return part


def matching(owner: str, option: str, names: Sequence[str], patterns: str | Sequence[str]) -> set[str]:
    """The names that fit a pattern such as "head.*", or one of several patterns."""
    matches = set[str]()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        fits = fnmatch.filter(names, pattern) if isinstance(pattern, str) else []
        if not fits:
            shown = ", ".join(names[:NAMES]) + (f" and {len(names) - NAMES} more" if len(names) > NAMES else "")
            raise ValueError(f"{owner}: {option} = {pattern!r} fits no parameter; there are {shown}")
        matches.update(fits)
    return matches


def freeze_others(owner: str, model: nn.Module, patterns: str | Sequence[str] | None) -> None:
    """Train the parameters that fit the patterns, and freeze all others."""
    if patterns is not None:
        kept = matching(owner, "trainable", [name for name, _ in model.named_parameters()], patterns)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in kept)


def trainable(model: nn.Module, last: Sequence[str] = ()) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are trained, those in `last` at the end; frozen ones (`requires_grad_(False)`) are
    constants."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return sorted(named, key=lambda entry: entry[0] in last) if last else named


def unflatten(model: nn.Module, x: Tensor, last: Sequence[str] = ()) -> dict[str, Tensor]:
    """The parameters by name, as views of the flat vector x [d]. Those in `last` are at its end."""
    parameters = [p for _, p in trainable(model, last)]
    parts = torch.split(x, [p.numel() for p in parameters])
    values = {id(p): part.view(p.shape) for p, part in zip(parameters, parts, strict=True)}
    # All names of a tied parameter, but only one name of a module that is used twice. With `tie_weights`,
    # functional_call would set such a parameter twice and restore it once, and leave the values in the model.
    return {
        name: values[id(p)]
        for prefix, module in model.named_modules()
        for name, p in module.named_parameters(prefix, recurse=False)
        if id(p) in values
    }


def flatten(model: nn.Module, last: Sequence[str] = ()) -> Tensor:
    """The parameters as one vector, in the order of `named_parameters`, those in `last` at the end."""
    return torch.cat([p.detach().flatten() for _, p in trainable(model, last)])


def cast(data: Batch, dtype: torch.dtype, scale: Scale | None = None, device: Device = None) -> Batch:
    """Floating-point data in this dtype, whole numbers (classes, tokens) in int64; x with a scale, and images of bytes,
    keep their dtype. In a tuple or dict, masks (booleans) stay as they are."""

    def one(v: Tensor) -> Tensor:
        return v.to(device, dtype) if v.is_floating_point() else v.to(device, torch.int64)

    def leaf(v: Tensor) -> Tensor:
        return v.to(device) if v.dtype == torch.bool else one(v)

    def sample(v: Tensor) -> Tensor:
        return v.to(device) if v.dtype == torch.uint8 and v.dim() > 2 else leaf(v) if in_tree else one(v)

    in_tree = not isinstance(data.x, Tensor)
    x = map_tensors(sample, data.x) if scale is None else data.x.to(device)
    return Batch(x, one(data.y) if isinstance(data.y, Tensor) else tree_map(leaf, data.y))
