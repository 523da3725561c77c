"""Loss and accuracy of models on all the data, several replicas at once."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import vmap

if TYPE_CHECKING:
    from .neural import Batch, Neural

SAMPLES = 10_000  # evaluated at once, over all replicas


class Evaluation:
    """The metrics of a problem at points x [replicas, d], in float64."""

    def __init__(self, problem: Neural):
        self.problem = problem

    def __call__(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """train_loss and, for classes, train_accuracy: means over each client's samples, then over clients; the same
        on the test set, over its samples."""
        problem, metrics = self.problem, {}
        for name, values in (self.by_client(x) if self.by_sample else self.one_by_one(x)).items():
            metrics[f"train_{name}"] = values @ weights / weights.sum()
        if problem.test is not None:
            test = self.samples(x, problem.test) if self.by_sample else self.whole(x, problem.test, slice(None))
            for name, values in test.items():
                metrics[f"test_{name}"] = values.mean(dim=-1)
        return metrics

    def by_client(self, x: Tensor) -> dict[str, Tensor]:
        """The means over each client's samples, [replicas, clients]."""
        sizes = self.problem.sizes
        found = self.samples(x, self.problem.data)
        sums = {k: torch.segment_reduce(v.T.contiguous(), "sum", lengths=sizes, axis=0) for k, v in found.items()}
        return {name: (total / sizes[:, None]).T for name, total in sums.items()}

    def one_by_one(self, x: Tensor) -> dict[str, Tensor]:
        """The same of a loss that is no mean of its samples' losses."""
        problem = self.problem
        rows = [self.whole(x, problem.data, problem.span(k)) for k in range(problem.clients)]
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
        spread = torch.linspace(0, len(problem.data.x) - 1, 32, device=x.device).long()
        close = 1e-4 if x.dtype == torch.float32 else 1e-8
        for few in (spread, spread[::2], spread[1:20]):
            data = type(problem.data)(problem.data.x[few], problem.data.y[few])
            try:
                each = self.samples(x[None], data)["loss"].mean()
            except Exception:  # whatever the user's loss raises under vmap
                return False
            if not torch.isclose(each, problem.objective(x, *problem.ready(data)).double(), rtol=close):
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
            vmap(problem.forward, (0, None))(
                problem.point()[None], problem.ready(problem.pick(problem.data, slice(1))).x
            )
        except Exception:  # whatever the user's module raises under vmap
            return False
        return True

    def outputs(self, x: Tensor, inputs: Tensor) -> Tensor:
        """The model's outputs, [replicas, samples, ...]."""
        if self.problem.chain is not None and inputs.is_cpu:
            return self.problem.chain.outputs(x, inputs)
        paths = self.problem.paths
        if paths.kernels is not None and paths.chosen == "kernels":
            return paths.kernels.outputs(x, inputs)
        if self.together and len(x) > 1:
            stack: Tensor = vmap(self.problem.forward, (0, None))(x, inputs)
            return stack
        return torch.stack([self.problem.forward(one, inputs) for one in x])

    def whole(self, x: Tensor, data: Batch, index: slice) -> dict[str, Tensor]:
        """The metrics over some samples as one batch, [replicas, 1]."""
        inputs, targets = self.problem.ready(self.problem.pick(data, index))
        output = self.outputs(x, inputs)
        metrics = {"loss": torch.stack([self.problem.loss(one, targets) for one in output]).double()[:, None]}
        right = correct(output, targets)
        return metrics if right is None else metrics | {"accuracy": right.double().mean(dim=-1, keepdim=True)}

    def samples(self, x: Tensor, data: Batch) -> dict[str, Tensor]:
        """The loss (and whether the class is right) of every sample, [replicas, samples]."""
        each = vmap(vmap(lambda output, target: self.problem.loss(output[None], target[None])), (0, None))
        columns: dict[str, list[Tensor]] = {}
        size = max(1, SAMPLES // len(x))
        for first in range(0, len(data.x), size):
            inputs, targets = self.problem.ready(self.problem.pick(data, slice(first, first + size)))
            output = self.outputs(x, inputs)
            columns.setdefault("loss", []).append(each(output, targets).double())
            right = correct(output, targets)
            if right is not None:
                columns.setdefault("accuracy", []).append(right.double())
        return {name: torch.cat(parts, dim=-1) for name, parts in columns.items()}


def correct(output: Tensor, target: Tensor) -> Tensor | None:
    """Whether each sample's class is right, [replicas, samples]; None where the targets are no classes."""
    if target.is_floating_point() or target.dim() != 1:
        return None
    if output.dim() == 3 and output.shape[-1] > 1:
        return output.argmax(dim=-1) == target
    if output.flatten(1).shape[1] != len(target):
        return None
    return (output.flatten(1) > 0) == (target > 0)
