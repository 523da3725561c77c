"""Small stacks of linear layers on a CPU: the calls that compute their gradients are recorded once and replayed.

On small models, views and memory allocation cost as much as the arithmetic. Here all memory is fixed, so that every
view is made once: a gradient is three copies in, a list of calls on fixed memory, and one copy out. The calls are
those of the stages, in the same order, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .losses import LossGradient, class_gradient
from .stages import THRESHOLD_OUT, LinearStage, Squeeze, Stage

NUMBERS = 1_000_000  # in a stack of vectors: for larger ones the arithmetic dominates
KEPT = 8  # recordings, one for each shape


class ReplayedGradients:
    """The gradients of a chain of linear layers, recorded for each shape."""

    def __init__(self, stages: Sequence[Stage], loss: LossGradient):
        self.layers = [stage for stage in stages if isinstance(stage, LinearStage)]
        self.loss = loss
        self.fits = len(self.layers) + isinstance(stages[-1], Squeeze) == len(stages)
        self.recordings: dict[tuple[object, ...], GradientReplay] = {}

    def __call__(self, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """The gradients as in `Chain.gradients`; None for stacks that are too large, not linear or not on a CPU."""
        if not self.fits or not x.is_cpu or x.numel() > NUMBERS:
            return None
        shape = (x.shape, inputs.shape, x.dtype)
        if shape not in self.recordings:
            if len(self.recordings) >= KEPT:
                self.recordings.clear()
            self.recordings[shape] = GradientReplay(self.layers, self.loss, x, inputs, targets)
        return self.recordings[shape](x, inputs, targets)


class GradientReplay:
    """The calls that compute gradients [g, d] at x [g, d] for inputs [n, batch, features], for one shape of each."""

    def __init__(self, layers: Sequence[LinearStage], loss: LossGradient, x: Tensor, inputs: Tensor, targets: Tensor):
        (g, _), (n, batch, *_) = x.shape, inputs.shape
        self.x = torch.empty(x.shape, dtype=x.dtype)
        self.inputs = x.new_empty(g // n, n, *inputs.shape[1:])  # [points, n, ...]: points share the batches
        self.targets = targets.new_empty(g // n, *targets.shape)
        self.gradients: list[Tensor] = []  # of each parameter, [g, numbers]
        self.calls: list[Callable[[], object]] = []
        outputs = [self.inputs.view(g, batch, -1).mT]
        for layer in layers:
            outputs.append(self.forward(layer, outputs[-1], x.new_empty(g, layer.shape[0], batch)))
        gradient = torch.empty_like(outputs[-1])
        self.loss_gradient(loss, outputs[-1], gradient, self.targets.view(g, batch))
        for i in reversed(range(len(layers))):
            gradient = self.backward(layers[i], outputs[i], outputs[i + 1], gradient, need_input=i > 0)

    def __call__(self, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        self.x.copy_(x)
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        for call in self.calls:
            call()
        return torch.cat(self.gradients, dim=1)

    def record(self, call: Callable[..., object], *args: object, **kwargs: object) -> None:
        self.calls.append(partial(call, *args, **kwargs))

    def forward(self, layer: LinearStage, h: Tensor, y: Tensor) -> Tensor:
        weight, *bias = layer.views(self.x)
        if bias:
            self.record(torch.baddbmm, bias[0].unsqueeze(2), weight, h, out=y)
        else:
            self.record(torch.bmm, weight, h, out=y)
        if layer.relu:
            self.record(y.relu_)
        return y

    def loss_gradient(self, loss: LossGradient, output: Tensor, g: Tensor, targets: Tensor) -> None:
        """The same calls as in `losses`."""
        if loss is class_gradient:
            self.record(torch.softmax, output, 1, out=g)
            self.record(g.scatter_, 1, targets.unsqueeze(1), -1.0, reduce="add")
        else:
            self.record(torch.sigmoid, output, out=g)
            self.record(g.sub_, targets.unsqueeze(1))
        self.record(g.div_, targets.shape[-1])

    def backward(self, layer: LinearStage, h: Tensor, y: Tensor, g: Tensor, need_input: bool) -> Tensor:
        weight, *bias = layer.views(self.x)
        if layer.relu:
            self.record(THRESHOLD_OUT, g, y, 0, grad_input=g)
        gradients = [torch.empty(p.shape, dtype=p.dtype) for p in (weight, *bias)]
        self.record(torch.bmm, g, h.mT, out=gradients[0])
        for of_bias in gradients[1:]:
            self.record(torch.sum, g, 2, out=of_bias)
        self.gradients = [v.flatten(1) for v in gradients] + self.gradients
        of_input = torch.empty(h.shape, dtype=h.dtype)
        if need_input:
            self.record(torch.bmm, weight.mT, g, out=of_input)
        return of_input
