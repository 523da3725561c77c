"""The gradients of a stack of models that are chains of known layers, written out: no autograd, no vmap, no tracing."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from .layers import stages
from .losses import LossGradient, in_range, loss_gradient
from .recorded import CallRecorder
from .stages import Flatten, Stage

CACHE = 40_000_000  # bytes that go through at once on a CPU: about what its last cache holds


class Chain:
    """A model and a loss as stages whose gradients are known; made by `Chain.of`."""

    def __init__(self, stages: list[Stage], loss: LossGradient):
        self.loss, self.shape = loss, stages[-1].shape
        self.flat = isinstance(stages[0], Flatten)  # samples of any shape may be flattened at first, as a view
        stages = stages[1:] if self.flat else stages
        first = next(i for i, stage in enumerate(stages) if stage.weight)
        # What comes before the first parameters is the same for all points that share a batch.
        self.shared, self.stages = stages[:first], stages[first:]
        self.numbers = sum(stage.numbers for stage in stages)
        self.recorder = CallRecorder(stages, loss)

    @classmethod
    def of(cls, model: nn.Module, loss: Any, sample: tuple[int, ...]) -> Chain | None:
        """The chain of a model on samples of a shape, or None where a layer or the loss is not known."""
        found = stages(model, tuple(sample))
        gradient = loss_gradient(loss, found[-1].shape) if found else None
        return cls(found, gradient) if found and gradient else None

    def takes(self, targets: Tensor) -> bool:
        """Whether the gradient of the loss is exact for targets [samples]."""
        return in_range(targets, self.loss, self.shape)

    def gradients(self, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """[g, d] from the stack x [g, d], whose member i uses the batch i % n of inputs [n, batch, ...]."""
        done = self.recorder(x, inputs, targets)
        if done is not None:
            return done
        n, batch, *_ = inputs.shape
        size, stack = max(1, self.samples(inputs) // batch), x.shape[0]
        if stack <= size:
            features, points = self.prepare(inputs), stack // n
            if points > 1:
                features, targets = (v.expand(points, *v.shape).flatten(0, 1) for v in (features, targets))
            return torch.cat(self._gradients(x, features, targets), dim=1)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for first in range(0, n, size):
            part = slice(first, min(first + size, n))
            features = self.prepare(inputs[part])
            for point in range(0, stack, n):
                rows = slice(point + part.start, point + part.stop)
                torch.cat(self._gradients(x[rows], features, targets[part]), dim=1, out=out[rows])
        return out

    def outputs(self, x: Tensor, inputs: Tensor) -> Tensor:
        """[g, samples, ...] of the stack x [g, d] on inputs [samples, ...], which all share."""
        size = min(len(inputs), self.samples(inputs))
        members = max(1, self.samples(inputs) // size)
        out = x.new_empty(len(x), len(inputs), *self.shape)
        for first in range(0, len(inputs), size):
            features = self.prepare(inputs[None, first : first + size])
            for i in range(0, len(x), members):
                views = self.views(x[i : i + members])
                h = features.expand(len(views[0][0]), *features.shape[1:])
                for k, stage in enumerate(self.stages):
                    h, _ = stage.forward(views[k], stage.prepare(h) if k else h)
                out[i : i + members, first : first + size] = h.mT if self.shape else h
        return out

    def prepare(self, inputs: Tensor) -> Tensor:
        """What the first layer makes of inputs [n, batch, ...], whatever its parameters."""
        h = inputs.flatten(2).mT if self.flat or inputs.dim() == 3 else inputs.permute(0, 3, 4, 1, 2)
        for stage in self.shared:
            h, _ = stage.forward((), h)
        return self.stages[0].prepare(h)

    def samples(self, inputs: Tensor) -> int:
        """How many samples go through at once, over all members of the stack."""
        return max(1, CACHE // (self.numbers * inputs.itemsize)) if inputs.is_cpu else sys.maxsize

    def views(self, x: Tensor) -> list[list[Tensor]]:
        """The parameters of each stage in the vectors x [g, d]."""
        return [stage.views(x) for stage in self.stages]

    def _gradients(self, x: Tensor, h: Tensor, targets: Tensor) -> list[Tensor]:
        views, saved = self.views(x), []
        for i, stage in enumerate(self.stages):
            h, kept = stage.forward(views[i], stage.prepare(h) if i else h)
            saved.append(kept)
        g: Tensor | None = self.loss(h, targets)
        learned: list[Tensor] = []
        for i in reversed(range(len(saved))):
            assert g is not None
            g, own = self.stages[i].backward(views[i], saved[i], g, wanted=i > 0)
            learned = own + learned
        return learned
