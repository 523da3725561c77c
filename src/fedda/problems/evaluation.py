"""Loss and accuracy of models on all the data, for several replicas at once.

Metrics are sums and weights first, so that each of several processes can evaluate a part of the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from .. import rng
from .gradients.stackable import stackable
from .trees import at, first_tensor, join, map_tensors

if TYPE_CHECKING:
    from .metrics import Metric
    from .neural import Batch, Neural

Totals = dict[str, tuple[Tensor, Tensor]]  # of each metric: a weighted sum [...], and the weight
Shard = Callable[[int], slice]  # which of n clients, or of n test samples, this process evaluates
Sum = Callable[[Sequence[Tensor]], list[Tensor]]  # sums over all processes
Outputs = tuple[Any, Any]  # outputs [replicas, samples, ...] and targets [samples, ...]: tensors, or tuples or dicts
SAMPLES = 10_000  # that the model takes at once, over all replicas
OUTPUTS = 2**24  # numbers whose losses are computed at once: vmap, which does it, is slow to start


def whole_range(n: int) -> slice:
    """The shard of a single process."""
    return slice(0, n)


def unchanged(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sum over a single process."""
    return list(tensors)


def means(totals: Totals) -> dict[str, Tensor]:
    return {name: total / weight for name, (total, weight) in totals.items()}


def finished(metrics: Mapping[str, Metric], values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values of the metrics, from their means over samples."""
    changed = {
        key: metric.of_mean(values[key])
        for name, metric in metrics.items()
        for key in (name, f"train_{name}", f"validation_{name}", f"test_{name}")
        if metric.of_mean is not None and key in values
    }
    return values | changed


def concatenated(parts: Sequence[Outputs]) -> Outputs | None:
    if not parts:
        return None
    outputs, targets = zip(*parts, strict=True)
    return join(partial(torch.cat, dim=1), outputs), join(torch.cat, targets)


def chosen_samples(sizes: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """About so many of the samples of clients with these sizes, and how many each client has among them.

    Every client gives the same number, or all that it has. If there are more clients than samples, as many clients
    give one each. The choice depends on the arguments only.

    >>> chosen_samples(torch.tensor([2, 5, 4]), 7)[1]
    tensor([2, 2, 2])
    """
    key, clients = rng.key(0, rng.EVALUATION), len(sizes)
    if samples < clients:
        give = torch.zeros_like(sizes)
        give[rng.choose(key.view(1), clients, samples)] = 1
    else:
        give = sizes.clamp(max=samples // clients)
    owner = torch.repeat_interleave(torch.arange(clients), sizes)
    order = torch.argsort(rng.fold(rng.fold(key, 1), torch.arange(len(owner))))
    order = order[torch.argsort(owner[order], stable=True)]  # by client, at random within each
    rank = torch.arange(len(owner)) - (sizes.cumsum(0) - sizes)[owner]
    return order[rank < give[owner]].sort().values, give


class Evaluation:
    """The metrics of a problem at points x [replicas, d], in float64. If the model has BatchNorm, its statistics
    follow the parameters in x."""

    def __init__(self, problem: Neural):
        self.problem = problem
        self.subsets: dict[int, tuple[Tensor, Tensor]] = {}  # by their size
        # Of the last evaluation on all training samples: its points, its clients, their values and outputs.
        self.latest: tuple[Tensor, slice, dict[str, Tensor], Outputs | None] | None = None

    def __call__(self, x: Tensor, weights: Tensor, mine: Shard, add: Sum, samples: int | None = None) -> Totals:
        """train_loss and, for classes, train_accuracy: means over the samples of each client, then over clients. The
        same metrics of the validation and of the test samples are means over all of these. With `samples`, about so
        many training samples are used, always the same ones."""
        problem, totals = self.problem, {}
        shard, share = non_empty(mine(problem.clients))
        data, index, sizes = self.training_samples(shard, samples)
        values_by_client, outputs = self.by_client(x, data, index, sizes)
        if samples is None:
            self.latest = x.clone(), shard, values_by_client, outputs
        # A client without a sample in the subset does not count.
        weight = weights[shard] * (sizes > 0)
        for name, values in values_by_client.items():
            totals[f"train_{name}"] = zero_unless(share, values @ weight), share * weight.sum()
        if outputs is not None:
            sizes = problem.sizes if samples is None else self.subset(samples)[1]
            place = int(sizes[: shard.start].sum()), int(sizes.sum())
            totals |= self.set_totals("train", outputs if share else None, outputs, place, mine, add)
        for part, data in problem.held_out.items():
            shard, share = non_empty(mine(data.samples))
            if self.loss_is_mean:
                tested, outputs = self.samples(x, data, shard)
            else:  # the process with the first sample evaluates all of them, as one batch
                share = float(shard.start == 0) * share
                tested, outputs = self.as_one_batch(x, data, slice(None) if share else slice(1))
            for name, values in tested.items():
                total, number = values.sum(dim=-1), share * values.shape[-1]
                totals[f"{part}_{name}"] = zero_unless(share, total), values.new_tensor(number)
            if outputs is not None:
                place = shard.start, data.samples
                totals |= self.set_totals(part, outputs if share else None, outputs, place, mine, add)
        return totals

    def names(self, data: Batch) -> list[str]:
        """The names of the metrics of some samples."""
        inputs, targets = self.problem.standardised(self.problem.pick(data, slice(2)))
        with torch.no_grad():
            output = self.outputs(self.with_statistics(self.problem.full_point())[None], inputs)
        classes = ["accuracy"] if correct(output, targets) is not None else []
        return ["loss", *classes, *self.problem.metrics]

    # -- the training samples of each client ----------------------------------------------------------------------
    def training_samples(self, clients: slice, samples: int | None) -> tuple[Batch, slice | Tensor, Tensor]:
        """The data, the positions of the samples of some clients in it, and how many samples each of them has."""
        problem = self.problem
        if samples is None:
            return problem.data, problem.spans(clients), problem.sizes[clients]
        index, sizes = self.subset(samples)
        first = int(sizes[: clients.start].sum())
        sizes = sizes[clients]
        # Positions among the samples of all clients, of which this process may have a part.
        return problem.data, index[first : first + int(sizes.sum())] + problem.offsets[0], sizes

    def subset(self, samples: int) -> tuple[Tensor, Tensor]:
        if samples not in self.subsets:
            index, sizes = chosen_samples(self.problem.sizes.cpu(), samples)
            self.subsets[samples] = index.to(self.problem.device), sizes.to(self.problem.device)
        return self.subsets[samples]

    def by_client(
        self, x: Tensor, data: Batch, index: slice | Tensor, sizes: Tensor
    ) -> tuple[dict[str, Tensor], Outputs | None]:
        """The means over the samples of each client, [replicas, clients], and the outputs if a metric needs them.
        `index` holds the samples of the first client, then those of the second one, ...; `sizes` are their numbers."""
        if isinstance(index, Tensor):
            data, index = self.problem.pick(data, index), slice(0, len(index))
        if not self.loss_is_mean:
            return self.client_by_client(x, data, index, sizes)
        values, outputs = self.samples(x, data, index)
        sums = {k: torch.segment_reduce(v.T.contiguous(), "sum", lengths=sizes, axis=0) for k, v in values.items()}
        return {name: (total / sizes.clamp(min=1)[:, None]).T for name, total in sums.items()}, outputs

    def client_by_client(
        self, x: Tensor, data: Batch, index: slice, sizes: Tensor
    ) -> tuple[dict[str, Tensor], Outputs | None]:
        """The same for a loss that is not the mean of the losses of its samples."""
        first, rows, all_outputs = index.start, [], []
        for size in sizes.tolist():
            row, outputs = self.as_one_batch(x, data, slice(first, first + size) if size else slice(0, 1))
            rows.append(row if size else {name: torch.zeros_like(value) for name, value in row.items()})
            all_outputs += [outputs] if size else []
            first += size
        values = {name: torch.cat([row[name] for row in rows], dim=-1) for name in rows[0]}
        return values, concatenated([outputs for outputs in all_outputs if outputs is not None])

    def client_values(self, x: Tensor, mine: Shard) -> dict[str, Tensor]:
        """All metrics of each client of this process, on all of its training samples: [replicas, clients]."""
        shard, _ = non_empty(mine(self.problem.clients))
        if self.latest is None or self.latest[1] != shard or not torch.equal(self.latest[0], x):
            self.latest = x.clone(), shard, *self.by_client(x, *self.training_samples(shard, None))
        values, outputs = self.latest[2:]
        values = values | self.set_values(outputs, self.problem.sizes[shard])
        return finished(self.problem.metrics, values)

    def held_out_values(self, x: Tensor, part: str, clients: slice) -> dict[str, Tensor]:
        """All metrics of some clients on their own samples of a part ("train", or one whose owners are known):
        [replicas, clients], NaN for a client without samples."""
        problem = self.problem
        if part == "train":
            data, index, sizes = self.training_samples(clients, None)
        else:
            owner = problem.owners[part].to(problem.device)
            all_sizes = torch.bincount(owner, minlength=problem.clients)
            first, sizes = int(all_sizes[: clients.start].sum()), all_sizes[clients]
            data, index = problem.held_out[part], torch.argsort(owner, stable=True)[first : first + int(sizes.sum())]
        if not bool(sizes.any()):
            nan = torch.full((len(x), len(sizes)), math.nan, dtype=torch.float64, device=x.device)
            return dict.fromkeys(self.names(data), nan)
        values, outputs = self.by_client(x, data, index, sizes)
        values = finished(problem.metrics, values | self.set_values(outputs, sizes))
        return {name: torch.where(sizes > 0, v, math.nan) for name, v in values.items()}

    # -- metrics of a whole set -----------------------------------------------------------------------------------
    def set_values(self, outputs: Outputs | None, sizes: Tensor) -> dict[str, Tensor]:
        """The metrics that need a whole set, of the samples of each client: [replicas, clients]."""
        if outputs is None:
            return {}
        first = first_tensor(outputs[0])
        nan = first.new_full((len(first),), math.nan, dtype=torch.float64)
        ends = sizes.cumsum(0).tolist()
        spans = [slice(end - size, end) for end, size in zip(ends, sizes.tolist(), strict=True)]
        parts = [(at(outputs[0], (slice(None), span)), at(outputs[1], span)) for span in spans]
        return {
            name: torch.stack(
                [metric.whole(*p) if s.stop > s.start else nan for p, s in zip(parts, spans, strict=True)], dim=-1
            )
            for name, metric in self.problem.set_metrics.items()
        }

    def set_totals(
        self, part: str, outputs: Outputs | None, like: Outputs, place: tuple[int, int], mine: Shard, add: Sum
    ) -> Totals:
        """The metrics of all samples of a part. All processes exchange their outputs, and the first one reports.
        `place` is the position of this process's outputs (None if it has none) and the number of all samples."""
        if add is not unchanged:
            by_sample = map_tensors(lambda v: v.movedim(1, 0), like[0]), like[1]
            leaves, form = tree_flatten(by_sample)
            rows = [v for v in leaves if isinstance(v, Tensor)]
            full = [v.new_zeros(place[1], *v.shape[1:], dtype=torch.float64) for v in rows]
            if outputs is not None:
                for v, own in zip(full, rows, strict=True):
                    v[place[0] : place[0] + len(own)] = own
            summed = iter([v.to(own.dtype) for v, own in zip(add(full), rows, strict=True)])
            of_all = tree_unflatten([next(summed) if isinstance(v, Tensor) else v for v in leaves], form)
            outputs = map_tensors(lambda v: v.movedim(0, 1), of_all[0]), of_all[1]
        first, like_first = mine(1), first_tensor(like[0])
        share = float(first.stop - first.start)
        zero = torch.zeros(len(like_first), dtype=torch.float64, device=like_first.device)
        if not share or outputs is None:  # the others, and a process that skips this part
            return {f"{part}_{name}": (zero, zero.new_tensor(0.0)) for name in self.problem.set_metrics}
        return {
            f"{part}_{name}": (metric.whole(*outputs), zero.new_tensor(share))
            for name, metric in self.problem.set_metrics.items()
        }

    @cached_property
    def loss_is_mean(self) -> bool:
        """Whether the loss of a batch is the mean of the losses of its samples. This is false for a cross-entropy with
        class weights and for a loss that fails under vmap. Such a loss is evaluated client by client."""
        problem = self.problem
        if problem.nan_alone:
            return False
        # Not at the start, where a model may be constant, and on samples of all clients: if all samples have the same
        # class or the same loss, every kind of mean is the same.
        x = problem.full_point()
        x = x + 0.1 * torch.sin(torch.arange(len(x), device=x.device, dtype=x.dtype) * 1.7)
        # In a distributed run each process may have the samples of its clients only, but all have the test set.
        source = next((part for part in (problem.test, problem.validation) if part is not None), problem.data)
        spread = torch.linspace(0, source.samples - 1, 32, device=x.device).long()
        inputs, targets = problem.standardised(problem.pick(source, spread))
        x = self.with_statistics(x)
        output = self.outputs(x[None], inputs)  # the same for both losses, so that only these can differ
        close = 1e-4 if x.dtype == torch.float32 else 1e-8
        for part in (slice(None), slice(0, None, 2), slice(1, 20)):
            try:
                few = at(output, (slice(None), part)), at(targets, part)
                each, whole = self.losses(*few), problem.loss(at(few[0], 0), few[1])
            except Exception:  # any error of the user's loss under vmap, or outputs without an axis of samples
                return False
            if not torch.isclose(each.mean(), whole.double(), rtol=close):
                return False
        return True

    @cached_property
    def stacks_replicas(self) -> bool:
        """Whether replicas go through the model as one stack. On a CPU a loop is faster than grouped convolutions, and
        some modules fail under vmap."""
        problem = self.problem
        if problem.device.type == "cpu" and convolutional(problem.model):
            return False
        x = self.with_statistics(problem.full_point())
        inputs = problem.standardised(problem.pick(problem.data, slice(1))).x
        return runs(lambda: vmap(stackable(problem.inference), (0, None))(x[None], inputs))

    @cached_property
    def stacks_batches(self) -> bool:
        """Whether several batches go through the model in training mode at once, for the statistics of BatchNorm."""
        inputs = self.problem.standardised(self.problem.example(2)[1]).x
        return runs(lambda: vmap(stackable(self.problem.forward), (None, 0))(self.problem.full_point(), inputs))

    def with_statistics(self, x: Tensor) -> Tensor:
        """The parameters x [d], followed by default statistics if the model has BatchNorm."""
        norms = self.problem.batch_norms
        return torch.cat([x, norms.default_statistics(x)]) if norms.layers else x

    def outputs(self, x: Tensor, inputs: Any) -> Any:
        """The outputs of the model, [replicas, samples, ...]: a tensor, or a tuple or dict of tensors."""
        chain = self.problem.chain
        if chain is not None and inputs.is_cpu:
            return (chain.native(x.dtype) or chain).outputs(x, inputs)
        paths = self.problem.gradient_paths
        if paths.kernels is not None and paths.chosen == "kernels":
            return paths.kernels.outputs(x, inputs)
        if self.stacks_replicas and len(x) > 1:
            kernels = paths.precision if paths.chosen.startswith("layers") else ""
            last = paths.chosen == "layers-last"
            return vmap(stackable(self.problem.inference, kernels, last), (0, None))(x, inputs)
        return join(torch.stack, [self.problem.inference(one, inputs) for one in x])

    def as_one_batch(self, x: Tensor, data: Batch, index: slice) -> tuple[dict[str, Tensor], Outputs | None]:
        """The metrics of some samples as one batch, [replicas, 1], and the outputs if a metric needs them."""
        inputs, targets = self.problem.standardised(self.problem.pick(data, index))
        output = self.outputs(x, inputs)
        losses = [self.problem.loss(at(output, i), targets) for i in range(len(x))]
        metrics = {"loss": torch.stack(losses).double()[:, None]}
        each = {name: v.mean(dim=-1, keepdim=True) for name, v in self.each(output, targets).items()}
        return metrics | each, (output, targets) if self.problem.set_metrics else None

    def samples(self, x: Tensor, data: Batch, index: slice) -> tuple[dict[str, Tensor], Outputs | None]:
        """The loss of each sample, for classes whether it is classified correctly, and the other metrics of samples:
        [replicas, samples]; and the outputs if a metric needs them."""
        columns: dict[str, list[Tensor]] = {}
        all_outputs = []
        for output, targets in self.outputs_in_chunks(x, data, index):
            columns.setdefault("loss", []).append(self.losses(output, targets))
            for name, values in self.each(output, targets).items():
                columns.setdefault(name, []).append(values)
            if self.problem.set_metrics:
                all_outputs.append((output, targets))
        return {name: torch.cat(parts, dim=-1) for name, parts in columns.items()}, concatenated(all_outputs)

    def each(self, output: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The metrics of each sample besides the loss, [replicas, samples]."""
        right = correct(output, targets)
        values = {} if right is None else {"accuracy": right.double()}
        return values | {name: m.each(output, targets) for name, m in self.problem.sample_metrics.items()}

    def losses(self, output: Any, targets: Any) -> Tensor:
        """The loss of each sample, [replicas, samples]."""

        def of_sample(*pair: Any) -> Tensor:
            return self.problem.loss(*(at(one, None) for one in pair))

        each = vmap(vmap(of_sample), (0, None))
        losses: Tensor = each(output, targets).double()
        return losses

    def outputs_in_chunks(self, x: Tensor, data: Batch, index: slice) -> Iterator[tuple[Any, Any]]:
        """Outputs and targets in large chunks; the model takes few samples at a time."""
        outputs: list[Any] = []
        targets: list[Any] = []
        size = max(1, SAMPLES // len(x))
        for first in range(index.start, index.stop, size):
            part = slice(first, min(first + size, index.stop))
            inputs, target = self.problem.standardised(self.problem.pick(data, part))
            outputs.append(self.outputs(x, inputs))
            targets.append(target)
            if first + size >= index.stop or sum(first_tensor(v).numel() for v in outputs) >= OUTPUTS:
                yield join(partial(torch.cat, dim=1), outputs), join(torch.cat, targets)
                outputs, targets = [], []


def non_empty(shard: slice) -> tuple[slice, float]:
    """The slice and weight 1; if it is empty, a dummy slice and weight 0, so that every process knows the metrics."""
    return (shard, 1.0) if shard.stop > shard.start else (slice(0, 1), 0.0)


def zero_unless(share: float, total: Tensor) -> Tensor:
    """The total, or zero (even if the total is NaN) for the share 0."""
    return total if share else torch.zeros_like(total)


def convolutional(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())


def runs(call: Callable[[], object]) -> bool:
    """Whether the call raises no exception: a user's module may raise anything under vmap."""
    try:
        call()
    except Exception:
        return False
    return True


def correct(output: Any, target: Any) -> Tensor | None:
    """Whether each sample is classified correctly, [replicas, samples]; None if the targets are not classes. Of a dict
    of outputs, `logits` counts."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return None
    if target.is_floating_point() or target.dim() != 1:
        return None
    if output.dim() == 3 and output.shape[-1] > 1:
        return output.argmax(dim=-1) == target
    if output.flatten(1).shape[1] != len(target):
        return None
    return (output.flatten(1) > 0) == (target > 0)
