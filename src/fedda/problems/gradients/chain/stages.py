"""The stages of a chain of layers for a stack of models, without autograd: linear maps, ReLU, flattening."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Image = tuple[int, int, int]  # channels, height, width
Views = Sequence[Tensor]  # of a stage's parameters in the stack's vectors

THRESHOLD = torch.ops.aten.threshold_backward.default  # looked up once: on small stacks that is dear
THRESHOLD_OUT = torch.ops.aten.threshold_backward.grad_input


class Parameters(NamedTuple):
    """Where a parameter stands in flat vectors, and its shape."""

    first: int
    shape: torch.Size
    strides: tuple[int, ...]

    def view(self, x: Tensor) -> Tensor:
        """The parameters [g, *shape] in the vectors x [g, d]."""
        return x.as_strided((x.shape[0], *self.shape), (x.stride(0), *self.strides), x.storage_offset() + self.first)


class Space:
    """Memory by name that is written to again and again: on a CPU fresh pages cost more than the arithmetic on them."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def __call__(self, name: str, like: Tensor, *shape: int) -> Tensor:
        if like.device.type != "cpu":  # where memory is kept anyway
            return like.new_empty(shape)
        kept, size = self.kept.get(name), math.prod(shape)
        if kept is None or len(kept) < size or kept.dtype != like.dtype:
            kept = self.kept[name] = like.new_empty(size)
        return kept[:size].view(shape)


class Stage(ABC):
    """One step of a chain: samples are [g, features, batch] or [g, height, width, batch, channels]."""

    weight: Parameters | None = None
    bias: Parameters | None = None
    shape: tuple[int, ...]  # of one sample after it
    numbers: int  # that it makes of one sample: what must fit in a cache

    def views(self, x: Tensor) -> list[Tensor]:
        """Its parameters in the vectors x [g, d]."""
        return [p.view(x) for p in (self.weight, self.bias) if p]

    def prepare(self, h: Tensor) -> Tensor:
        """What the stage makes of its input alone, whatever the parameters."""
        return h

    def forward(self, parameters: Views, h: Tensor) -> tuple[Tensor, Any]:
        """The output of what was prepared, at its parameters [g, ...], and what the gradient needs."""
        raise NotImplementedError

    @abstractmethod
    def backward(self, parameters: Views, kept: Any, g: Tensor, wanted: bool) -> tuple[Tensor | None, list[Tensor]]:
        """The gradient of the input, where it is wanted, and those of the parameters, each [g, numbers]."""


class LinearStage(Stage):
    """W h + b, then ReLU."""

    weight: Parameters

    def __init__(self, weight: Parameters, bias: Parameters | None, relu: bool):
        self.weight, self.bias, self.relu = weight, bias, relu
        self.shape, self.numbers = weight.shape[:1], sum(weight.shape)

    def forward(self, parameters: Views, h: Tensor) -> tuple[Tensor, Any]:
        if self.bias is None:
            y = torch.bmm(parameters[0], h)
        else:
            y = torch.baddbmm(parameters[1].unsqueeze(2), parameters[0], h)
        if self.relu:
            y.relu_()
        return y, (h, y)

    def backward(self, parameters: Views, kept: Any, g: Tensor, wanted: bool) -> tuple[Tensor | None, list[Tensor]]:
        h, y = kept
        if self.relu:
            g = relu_gradient(g, y)
        learned = [torch.bmm(g, h.mT).flatten(1)]
        if self.bias is not None:
            learned.append(g.sum(2))
        return torch.bmm(parameters[0].mT, g) if wanted else None, learned


class Relu(Stage):
    """A ReLU that follows no layer with parameters."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape, self.numbers = shape, torch.Size(shape).numel()

    def forward(self, parameters: Views, h: Tensor) -> tuple[Tensor, Any]:
        h = h.relu()
        return h, h

    def backward(self, parameters: Views, kept: Any, g: Tensor, wanted: bool) -> tuple[Tensor | None, list[Tensor]]:
        return relu_gradient(g, kept), []


class Flatten(Stage):
    """Images to vectors."""

    def __init__(self, sample: tuple[int, ...]):
        self.sample, self.numbers = sample, torch.Size(sample).numel()
        self.shape = (self.numbers,)

    def forward(self, parameters: Views, h: Tensor) -> tuple[Tensor, Any]:
        return h.permute(0, 4, 1, 2, 3).flatten(1, 3), None

    def backward(self, parameters: Views, kept: Any, g: Tensor, wanted: bool) -> tuple[Tensor | None, list[Tensor]]:
        return g.unflatten(1, self.sample).permute(0, 2, 3, 4, 1), []


class Squeeze(Stage):
    """One output as a number."""

    shape, numbers = (), 1

    def forward(self, parameters: Views, h: Tensor) -> tuple[Tensor, Any]:
        return h.squeeze(1), None

    def backward(self, parameters: Views, kept: Any, g: Tensor, wanted: bool) -> tuple[Tensor | None, list[Tensor]]:
        return g.unsqueeze(1), []


def activated(h: Tensor, bias: Views, relu: bool) -> Tensor:
    """h [g, samples, features] with its bias and its ReLU, if it has them, in place."""
    for b in bias:
        h += b[:, None]
    return h.relu_() if relu else h


def relu_gradient(g: Tensor, y: Tensor) -> Tensor:
    """g where y > 0, else 0; where y is NaN, g."""
    gradient: Tensor = THRESHOLD(g, y, 0)
    return gradient


def masked(g: Tensor, y: Tensor, relu: bool, out: Tensor) -> Tensor:
    """g in the memory of `out`, through the ReLU where there is one: g where y > 0, else 0."""
    return torch.ops.aten.threshold_backward(g, y, 0, grad_input=out) if relu else out.copy_(g)
