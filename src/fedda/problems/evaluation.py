"""Loss and accuracy of models on all the data, for several replicas at once.

Metrics are sums and weights first, so that each of several processes can evaluate a part of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from .trees import at, first_tensor, join

if TYPE_CHECKING:
    from .neural import Batch, Neural

Totals = dict[str, tuple[Tensor, Tensor]]  # of each metric: a weighted sum [...], and the weight
Shard = Callable[[int], slice]  # which of n clients, or of n test samples, this process evaluates
Sum = Callable[[Sequence[Tensor]], list[Tensor]]  # sums over all processes
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


class Evaluation:
    """The metrics of a problem at points x [replicas, d], in float64. If the model has BatchNorm, its statistics
    follow the parameters in x."""

    def __init__(self, problem: Neural):
        self.problem = problem

    def __call__(self, x: Tensor, weights: Tensor, mine: Shard) -> Totals:
        """train_loss and, for classes, train_accuracy: means over the samples of each client, then over clients. The
        same metrics of the validation and of the test samples are means over all of these."""
        problem, totals = self.problem, {}
        shard, share = non_empty(mine(problem.clients))
        values_by_client = self.client_means(x, shard) if self.loss_is_mean else self.client_by_client(x, shard)
        for name, values in values_by_client.items():
            totals[f"train_{name}"] = zero_unless(share, values @ weights[shard]), share * weights[shard].sum()
        for part, data in problem.held_out.items():
            shard, share = non_empty(mine(data.samples))
            if self.loss_is_mean:
                tested = self.samples(x, data, shard)
            else:  # the process with the first sample evaluates all of them, as one batch
                share = float(shard.start == 0) * share
                tested = self.as_one_batch(x, data, slice(None) if share else slice(1))
            for name, values in tested.items():
                total, number = values.sum(dim=-1), share * values.shape[-1]
                totals[f"{part}_{name}"] = zero_unless(share, total), values.new_tensor(number)
        return totals

    def client_means(self, x: Tensor, clients: slice) -> dict[str, Tensor]:
        """The means over the samples of each client, [replicas, clients]."""
        sizes = self.problem.sizes[clients]
        values = self.samples(x, self.problem.data, self.problem.spans(clients))
        sums = {k: torch.segment_reduce(v.T.contiguous(), "sum", lengths=sizes, axis=0) for k, v in values.items()}
        return {name: (total / sizes[:, None]).T for name, total in sums.items()}

    def client_by_client(self, x: Tensor, clients: slice) -> dict[str, Tensor]:
        """The same for a loss that is not the mean of the losses of its samples."""
        spans = [self.problem.spans(slice(k, k + 1)) for k in range(clients.start, clients.stop)]
        rows = [self.as_one_batch(x, self.problem.data, span) for span in spans]
        return {name: torch.cat([row[name] for row in rows], dim=-1) for name in rows[0]}

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
        return runs(lambda: vmap(problem.inference, (0, None))(x[None], inputs))

    @cached_property
    def stacks_batches(self) -> bool:
        """Whether several batches go through the model in training mode at once, for the statistics of BatchNorm."""
        inputs = self.problem.standardised(self.problem.example(2)[1]).x
        return runs(lambda: vmap(self.problem.forward, (None, 0))(self.problem.full_point(), inputs))

    def with_statistics(self, x: Tensor) -> Tensor:
        """The parameters x [d], followed by default statistics if the model has BatchNorm."""
        norms = self.problem.batch_norms
        return torch.cat([x, norms.default_statistics(x)]) if norms.layers else x

    def outputs(self, x: Tensor, inputs: Any) -> Any:
        """The outputs of the model, [replicas, samples, ...]: a tensor, or a tuple or dict of tensors."""
        if self.problem.chain is not None and inputs.is_cpu:
            return self.problem.chain.outputs(x, inputs)
        paths = self.problem.gradient_paths
        if paths.kernels is not None and paths.chosen == "kernels":
            return paths.kernels.outputs(x, inputs)
        if self.stacks_replicas and len(x) > 1:
            return vmap(self.problem.inference, (0, None))(x, inputs)
        return join(torch.stack, [self.problem.inference(one, inputs) for one in x])

    def as_one_batch(self, x: Tensor, data: Batch, index: slice) -> dict[str, Tensor]:
        """The metrics of some samples as one batch, [replicas, 1]."""
        inputs, targets = self.problem.standardised(self.problem.pick(data, index))
        output = self.outputs(x, inputs)
        each = [self.problem.loss(at(output, i), targets) for i in range(len(x))]
        metrics = {"loss": torch.stack(each).double()[:, None]}
        right = correct(output, targets)
        return metrics if right is None else metrics | {"accuracy": right.double().mean(dim=-1, keepdim=True)}

    def samples(self, x: Tensor, data: Batch, index: slice) -> dict[str, Tensor]:
        """The loss of each sample and, for classes, whether it is classified correctly: [replicas, samples]."""
        columns: dict[str, list[Tensor]] = {}
        for output, targets in self.outputs_in_chunks(x, data, index):
            columns.setdefault("loss", []).append(self.losses(output, targets))
            right = correct(output, targets)
            if right is not None:
                columns.setdefault("accuracy", []).append(right.double())
        return {name: torch.cat(parts, dim=-1) for name, parts in columns.items()}

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
