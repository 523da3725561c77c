"""Gradients of a stack of models that are chains of known layers, written out: no autograd, no vmap, no recording.

Shapes: a stack has g members; member i has the parameters x[i] of x [g, d]. Features are [g, features, batch], images
are [g, height, width, batch, channels].
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn

from .build import build_stages
from .losses import LossGradient, in_range, loss_gradient
from .native import NativeChain, native_chain
from .stages import Flatten, Stage

CACHE = 40_000_000  # bytes that are processed at once on a CPU: about the size of its last cache


class Chain:
    """A model and a loss as stages whose gradients are known; made by `Chain.of`."""

    def __init__(self, stages: list[Stage], loss: LossGradient, sample: tuple[int, ...]):
        self.loss, self.shape, self.sample = loss, stages[-1].shape, sample
        self.flat = isinstance(stages[0], Flatten)  # a first Flatten is a view, for samples of any shape
        stages = stages[1:] if self.flat else stages
        first = next(i for i, stage in enumerate(stages) if stage.weight)
        # The stages before the first parameters give the same result for all points that share a batch.
        self.shared, self.stages = stages[:first], stages[first:]
        self.numbers = sum(stage.numbers for stage in stages)
        self._native: dict[torch.dtype, NativeChain | None] = {}

    @classmethod
    def of(cls, model: nn.Module, loss: Any, sample: tuple[int, ...], norms: bool = False) -> Chain | None:
        """The chain of a model for samples of this shape; None if a layer or the loss is not known. With `norms`, a
        BatchNorm is known as well, for the kernels alone: the chain itself cannot compute it."""
        stages = build_stages(model, tuple(sample), norms)
        gradient = loss_gradient(loss, stages[-1].shape) if stages else None
        return cls(stages, gradient, tuple(sample)) if stages and gradient else None

    def takes(self, targets: Tensor) -> bool:
        """Whether the gradient of the loss is exact for targets [samples]."""
        return in_range(targets, self.loss, self.shape)

    def native(self, dtype: torch.dtype) -> NativeChain | None:
        """The same chain as C code for a CPU, if there is a C compiler and all layers are known there."""
        if dtype not in self._native:
            sample = (math.prod(self.sample),) if self.flat else self.sample
            self._native[dtype] = native_chain([*self.shared, *self.stages], self.loss, sample, dtype)
        return self._native[dtype]

    def gradients(self, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """The gradients [g, d] at x [g, d]; member i of the stack uses batch i % n of inputs [n, batch, ...]."""
        n, batch, *_ = inputs.shape
        size, stack = max(1, self.samples_at_once(inputs) // batch), x.shape[0]
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
        """The outputs [g, samples, ...] at x [g, d] for inputs [samples, ...] that all members share."""
        size = min(len(inputs), self.samples_at_once(inputs))
        members = max(1, self.samples_at_once(inputs) // size)
        out = x.new_empty(len(x), len(inputs), *self.shape)
        for first in range(0, len(inputs), size):
            features = self.prepare(inputs[None, first : first + size])
            for i in range(0, len(x), members):
                parameters = self.views(x[i : i + members])
                h = features.expand(len(parameters[0][0]), *features.shape[1:])
                for k, stage in enumerate(self.stages):
                    h, _ = stage.forward(parameters[k], stage.prepare(h) if k else h)
                out[i : i + members, first : first + size] = h.mT if self.shape else h
        return out

    def prepare(self, inputs: Tensor) -> Tensor:
        """The input of the first stage with parameters, from inputs [n, batch, ...]; it depends on no parameter."""
        h = inputs.flatten(2).mT if self.flat or inputs.dim() == 3 else inputs.permute(0, 3, 4, 1, 2)
        for stage in self.shared:
            h, _ = stage.forward((), h)
        return self.stages[0].prepare(h)

    def samples_at_once(self, inputs: Tensor) -> int:
        """The number of samples that are processed at once, over all members of the stack."""
        return max(1, CACHE // (self.numbers * inputs.itemsize)) if inputs.is_cpu else sys.maxsize

    def views(self, x: Tensor) -> list[list[Tensor]]:
        """The parameters of each stage as views of x [g, d]."""
        return [stage.views(x) for stage in self.stages]

    def _gradients(self, x: Tensor, h: Tensor, targets: Tensor) -> list[Tensor]:
        """The gradient of each parameter, [g, numbers], from the prepared input h."""
        parameters, saved = self.views(x), []
        for i, stage in enumerate(self.stages):
            h, kept = stage.forward(parameters[i], stage.prepare(h) if i else h)
            saved.append(kept)
        g: Tensor | None = self.loss(h, targets)
        gradients: list[Tensor] = []
        for i in reversed(range(len(saved))):
            assert g is not None
            g, of_stage = self.stages[i].backward(parameters[i], saved[i], g, need_input=i > 0)
            gradients = of_stage + gradients
        return gradients
