"""The stages of a chain of layers, forward and backward for a stack of models: linear maps, ReLU, flattening."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Image = tuple[int, int, int]  # channels, height, width
Gradients = tuple[Tensor | None, list[Tensor]]  # of the input, if needed, and of each parameter, [g, numbers]
Saved = Any  # what `backward` needs; each stage saves something else
Views = Sequence[Tensor]  # the parameters of a stage, as views of the stack x [g, d]

THRESHOLD = torch.ops.aten.threshold_backward.default  # looked up once: it takes long on small stacks
THRESHOLD_OUT = torch.ops.aten.threshold_backward.grad_input


class ParameterView(NamedTuple):
    """The position of a parameter in flat vectors, and its shape."""

    first: int
    shape: torch.Size
    strides: tuple[int, ...]

    def view(self, x: Tensor) -> Tensor:
        """The parameter [g, *shape] as a view of x [g, d]."""
        return x.as_strided((x.shape[0], *self.shape), (x.stride(0), *self.strides), x.storage_offset() + self.first)


class Norm(NamedTuple):
    """A BatchNorm by the statistics of the batch, between the ReLU of a convolution and its pool."""

    weight: ParameterView
    bias: ParameterView
    eps: float


class Workspace:
    """Named memory that is used again and again: on a CPU, new pages cost more than the arithmetic on them."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, like: Tensor, *shape: int) -> Tensor:
        if like.device.type != "cpu":  # PyTorch keeps the memory of other devices
            return like.new_empty(shape)
        buffer, size = self.buffers.get(name), math.prod(shape)
        if buffer is None or len(buffer) < size or buffer.dtype != like.dtype:
            buffer = self.buffers[name] = like.new_empty(size)
        return buffer[:size].view(shape)


class Stage(ABC):
    """One step of a chain. Samples are [g, features, batch] or [g, height, width, batch, channels]."""

    weight: ParameterView | None = None
    bias: ParameterView | None = None
    norm: Norm | None = None  # only in stages for the kernels: nothing here computes it
    shape: tuple[int, ...]  # of one sample in its output
    numbers: int  # that it computes for one sample: these should fit in a cache

    def views(self, x: Tensor) -> list[Tensor]:
        """Its parameters as views of x [g, d]."""
        return [p.view(x) for p in (self.weight, self.bias) if p]

    def prepare(self, h: Tensor) -> Tensor:
        """The part of the stage that does not depend on its parameters, for the input h."""
        return h

    def forward(self, parameters: Views, h: Tensor) -> tuple[Tensor, Saved]:
        """The output for a prepared input, and what `backward` needs."""
        raise NotImplementedError

    @abstractmethod
    def backward(self, parameters: Views, saved: Saved, g: Tensor, need_input: bool) -> Gradients:
        """The gradients of input and parameters, from the gradient g of the output."""


class LinearStage(Stage):
    """W h + b, then ReLU."""

    weight: ParameterView

    def __init__(self, weight: ParameterView, bias: ParameterView | None, relu: bool):
        self.weight, self.bias, self.relu = weight, bias, relu
        self.shape, self.numbers = weight.shape[:1], sum(weight.shape)

    def forward(self, parameters: Views, h: Tensor) -> tuple[Tensor, Saved]:
        if self.bias is None:
            y = torch.bmm(parameters[0], h)
        else:
            y = torch.baddbmm(parameters[1].unsqueeze(2), parameters[0], h)
        if self.relu:
            y.relu_()
        return y, (h, y)

    def backward(self, parameters: Views, saved: Saved, g: Tensor, need_input: bool) -> Gradients:
        h, y = saved
        if self.relu:
            g = relu_gradient(g, y)
        gradients = [torch.bmm(g, h.mT).flatten(1)]
        if self.bias is not None:
            gradients.append(g.sum(2))
        return torch.bmm(parameters[0].mT, g) if need_input else None, gradients


class Relu(Stage):
    """A ReLU that does not follow a layer with parameters."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape, self.numbers = shape, torch.Size(shape).numel()

    def forward(self, parameters: Views, h: Tensor) -> tuple[Tensor, Saved]:
        h = h.relu()
        return h, h

    def backward(self, parameters: Views, saved: Saved, g: Tensor, need_input: bool) -> Gradients:
        return relu_gradient(g, saved), []


class Flatten(Stage):
    """Images to vectors."""

    def __init__(self, sample: tuple[int, ...]):
        self.sample, self.numbers = sample, torch.Size(sample).numel()
        self.shape = (self.numbers,)

    def forward(self, parameters: Views, h: Tensor) -> tuple[Tensor, Saved]:
        return h.permute(0, 4, 1, 2, 3).flatten(1, 3), None

    def backward(self, parameters: Views, saved: Saved, g: Tensor, need_input: bool) -> Gradients:
        return g.view(len(g), *self.sample, -1).permute(0, 2, 3, 4, 1), []


class Squeeze(Stage):
    """One output feature as a number."""

    shape, numbers = (), 1

    def forward(self, parameters: Views, h: Tensor) -> tuple[Tensor, Saved]:
        return h.squeeze(1), None

    def backward(self, parameters: Views, saved: Saved, g: Tensor, need_input: bool) -> Gradients:
        return g.unsqueeze(1), []


def activate_(h: Tensor, bias: Views, relu: bool) -> Tensor:
    """Add the bias to h [g, samples, features] and apply ReLU, if there are any, in place."""
    for b in bias:
        h += b[:, None]
    return h.relu_() if relu else h


def relu_gradient(g: Tensor, y: Tensor) -> Tensor:
    """g if y > 0 or y is NaN, else 0."""
    gradient: Tensor = THRESHOLD(g, y, 0)
    return gradient


def relu_gradient_into(out: Tensor, g: Tensor, y: Tensor, relu: bool) -> Tensor:
    """The same in the memory of `out`; without a ReLU, a copy of g."""
    return torch.ops.aten.threshold_backward(g, y, 0, grad_input=out) if relu else out.copy_(g)
