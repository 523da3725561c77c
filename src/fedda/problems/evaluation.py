"""Loss and accuracy of models on all the data, several replicas at once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import vmap

if TYPE_CHECKING:
    from .neural import Batch, Neural
    from .totals import Mine, Totals

SAMPLES = 10_000  # go through the model at once, over all replicas
OUTPUTS = 2**24  # numbers of which the losses are taken at once: that goes through vmap, which is slow to start


class Evaluation:
    """The metrics of a problem at points x [replicas, d], in float64; where the model has BatchNorm, its statistics
    follow the parameters in x."""

    def __init__(self, problem: Neural):
        self.problem = problem

    def __call__(self, x: Tensor, weights: Tensor, mine: Mine) -> Totals:
        """train_loss and, for classes, train_accuracy: means over each client's samples, then over clients; the same
        on the validation and test samples, over all of them."""
        problem, totals = self.problem, {}
        some, share = _some(mine(problem.clients))
        found = self.by_client(x, some) if self.by_sample else self.one_by_one(x, some)
        for name, values in found.items():
            totals[f"train_{name}"] = _of(values @ weights[some], share), share * weights[some].sum()
        for part, data in problem.held_out.items():
            some, share = _some(mine(len(data.y)))
            if self.by_sample:
                tested = self.samples(x, data, some)
            else:  # of all samples at once, by whoever has the first
                share = float(some.start == 0) * share
                tested = self.whole(x, data, slice(None) if share else slice(1))
            for name, values in tested.items():
                totals[f"{part}_{name}"] = _of(values.sum(dim=-1), share), values.new_tensor(share * values.shape[-1])
        return totals

    def by_client(self, x: Tensor, some: slice) -> dict[str, Tensor]:
        """The means over each client's samples, [replicas, clients]."""
        sizes = self.problem.sizes[some]
        found = self.samples(x, self.problem.data, self.problem.spans(some))
        sums = {k: torch.segment_reduce(v.T.contiguous(), "sum", lengths=sizes, axis=0) for k, v in found.items()}
        return {name: (total / sizes[:, None]).T for name, total in sums.items()}

    def one_by_one(self, x: Tensor, some: slice) -> dict[str, Tensor]:
        """The same of a loss that is no mean of its samples' losses."""
        problem = self.problem
        rows = [self.whole(x, problem.data, problem.spans(slice(k, k + 1))) for k in range(some.start, some.stop)]
        return {name: torch.cat([row[name] for row in rows], dim=-1) for name in rows[0]}

    @cached_property
    def by_sample(self) -> bool:
        """Whether the loss of a batch is the mean of its samples' losses: true of most, but not of a cross-entropy with
        class weights, nor of one that vmap cannot take. Such a loss is evaluated client by client."""
        problem = self.problem
        # Away from the start, where a model may be constant, and on samples of all clients: among samples of one class,
        # or of one loss, every mean is the same.
        x = problem.point()
        x = x + 0.1 * torch.sin(torch.arange(problem.d, device=x.device, dtype=x.dtype) * 1.7)
        # Of several processes each may hold its own clients' samples, but all hold the test set.
        source = next((part for part in (problem.test, problem.validation) if part is not None), problem.data)
        spread = torch.linspace(0, len(source.y) - 1, 32, device=x.device).long()
        inputs, targets = problem.ready(problem.pick(source, spread))
        x = self.point(x)
        output = self.outputs(x[None], inputs)  # both from the same: how they are rounded is no matter of the loss
        close = 1e-4 if x.dtype == torch.float32 else 1e-8
        for few in (slice(None), slice(0, None, 2), slice(1, 20)):
            try:
                each, whole = self.losses(output[:, few], targets[few]), problem.loss(output[0, few], targets[few])
            except Exception:  # whatever the user's loss raises under vmap, or outputs that are no samples'
                return False
            if not torch.isclose(each.mean(), whole.double(), rtol=close):
                return False
        return True

    @cached_property
    def together(self) -> bool:
        """Whether replicas go through the model as one stack: grouped convolutions lose to a loop on a CPU, and some
        modules vmap cannot take."""
        problem = self.problem
        if problem.device.type == "cpu" and any(
            isinstance(m, nn.modules.conv._ConvNd) for m in problem.model.modules()
        ):
            return False
        try:
            vmap(problem.inference, (0, None))(
                self.point(problem.point())[None], problem.ready(problem.pick(problem.data, slice(1))).x
            )
        except Exception:  # whatever the user's module raises under vmap
            return False
        return True

    @cached_property
    def batched(self) -> bool:
        """Whether several batches go through the model in training at once, for BatchNorm's statistics."""
        _, batch = self.problem.example(2)
        try:
            vmap(self.problem.forward, (None, 0))(self.problem.point(), self.problem.ready(batch).x)
        except Exception:  # as above
            return False
        return True

    def point(self, x: Tensor) -> Tensor:
        """Parameters x [d] as a point to evaluate, with any statistics."""
        norms = self.problem.norms
        return torch.cat([x, norms.plain(x)]) if norms.layers else x

    def outputs(self, x: Tensor, inputs: Tensor) -> Tensor:
        """The model's outputs, [replicas, samples, ...]."""
        if self.problem.chain is not None and inputs.is_cpu:
            return self.problem.chain.outputs(x, inputs)
        paths = self.problem.paths
        if paths.kernels is not None and paths.chosen == "kernels":
            return paths.kernels.outputs(x, inputs)
        if self.together and len(x) > 1:
            stack: Tensor = vmap(self.problem.inference, (0, None))(x, inputs)
            return stack
        return torch.stack([self.problem.inference(one, inputs) for one in x])

    def whole(self, x: Tensor, data: Batch, index: slice) -> dict[str, Tensor]:
        """The metrics over some samples as one batch, [replicas, 1]."""
        inputs, targets = self.problem.ready(self.problem.pick(data, index))
        output = self.outputs(x, inputs)
        metrics = {"loss": torch.stack([self.problem.loss(one, targets) for one in output]).double()[:, None]}
        right = correct(output, targets)
        return metrics if right is None else metrics | {"accuracy": right.double().mean(dim=-1, keepdim=True)}

    def samples(self, x: Tensor, data: Batch, some: slice) -> dict[str, Tensor]:
        """The loss (and whether the class is right) of each of some samples, [replicas, samples]."""
        columns: dict[str, list[Tensor]] = {}
        for output, targets in self.gathered(x, data, some):
            columns.setdefault("loss", []).append(self.losses(output, targets))
            right = correct(output, targets)
            if right is not None:
                columns.setdefault("accuracy", []).append(right.double())
        return {name: torch.cat(parts, dim=-1) for name, parts in columns.items()}

    def losses(self, output: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample, [replicas, samples]."""
        each = vmap(vmap(lambda output, target: self.problem.loss(output[None], target[None])), (0, None))
        found: Tensor = each(output, targets).double()
        return found

    def gathered(self, x: Tensor, data: Batch, some: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs and targets of many samples that went through the model few at a time."""
        outputs: list[Tensor] = []
        targets: list[Tensor] = []
        size = max(1, SAMPLES // len(x))
        for first in range(some.start, some.stop, size):
            inputs, target = self.problem.ready(self.problem.pick(data, slice(first, min(first + size, some.stop))))
            outputs.append(self.outputs(x, inputs))
            targets.append(target)
            if first + size >= some.stop or sum(v.numel() for v in outputs) >= OUTPUTS:
                yield torch.cat(outputs, dim=1), torch.cat(targets)
                outputs, targets = [], []


def _some(part: slice) -> tuple[slice, float]:
    """The part and 1; where there is nothing in it something else and 0, so that every process knows the metrics."""
    return (part, 1.0) if part.stop > part.start else (slice(0, 1), 0.0)


def _of(total: Tensor, share: float) -> Tensor:
    """Nothing of what is not ours, even where it is no number."""
    return total if share else torch.zeros_like(total)


def correct(output: Tensor, target: Tensor) -> Tensor | None:
    """Whether each sample's class is right, [replicas, samples]; None where the targets are no classes."""
    if target.is_floating_point() or target.dim() != 1:
        return None
    if output.dim() == 3 and output.shape[-1] > 1:
        return output.argmax(dim=-1) == target
    if output.flatten(1).shape[1] != len(target):
        return None
    return (output.flatten(1) > 0) == (target > 0)
