"""Small stacks of linear layers on a CPU: the calls that their gradients take, recorded once and done again.

On small models making views and finding memory costs as much as the arithmetic. Here all memory is fixed, so every view
of it is made once; a gradient is three copies in, a list of calls that write where they always do, and one copy out.
The calls are those of the stages, in their order, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .losses import LossGradient, of_classes, of_logit
from .stages import THRESHOLD_OUT, LinearStage, Squeeze, Stage

NUMBERS = 1_000_000  # in a stack of vectors: a larger one is all arithmetic
KEPT = 8  # shapes that are remembered


class CallRecorder:
    """Recorded gradients by shape, for a chain of linear layers."""

    def __init__(self, stages: Sequence[Stage], loss: LossGradient):
        self.layers = [stage for stage in stages if isinstance(stage, LinearStage)]
        self.loss = loss
        known = len(self.layers) + isinstance(stages[-1], Squeeze) == len(stages)
        self.fits = known and loss in (of_classes, of_logit)
        self.recorded: dict[tuple[object, ...], Recorded] = {}

    def __call__(self, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """The gradients as `Chain.gradients` gives them, or None where that is left to it."""
        if not self.fits or not x.is_cpu or x.numel() > NUMBERS:
            return None
        shape = (x.shape, inputs.shape, x.dtype)
        found = self.recorded.get(shape)
        if found is None:
            if len(self.recorded) >= KEPT:
                self.recorded.clear()
            found = self.recorded[shape] = Recorded(self.layers, self.loss, x, inputs, targets)
        return found(x, inputs, targets)


class Recorded:
    """The gradients [g, d] at x [g, d] of batches [n, batch, features], for one shape of each."""

    def __init__(self, layers: Sequence[LinearStage], loss: LossGradient, x: Tensor, inputs: Tensor, targets: Tensor):
        (g, _), (n, batch, *_) = x.shape, inputs.shape
        self.x = torch.empty(x.shape, dtype=x.dtype)
        self.inputs = x.new_empty(g // n, n, *inputs.shape[1:])  # points that share their batches
        self.targets = targets.new_empty(g // n, *targets.shape)
        self.learned: list[Tensor] = []  # the gradient of each parameter, [g, numbers]
        self.calls: list[Callable[[], object]] = []
        outputs = [self.inputs.view(g, batch, -1).mT]
        for layer in layers:
            outputs.append(self.forward(layer, outputs[-1], x.new_empty(g, layer.shape[0], batch)))
        back = torch.empty_like(outputs[-1])
        self.lose(loss, outputs[-1], back, self.targets.view(g, batch))
        for i in reversed(range(len(layers))):
            back = self.backward(layers[i], outputs[i], outputs[i + 1], back, wanted=i > 0)

    def __call__(self, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        self.x.copy_(x)
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        for call in self.calls:
            call()
        return torch.cat(self.learned, dim=1)

    def record(self, call: Callable[..., object], *args: object, **more: object) -> None:
        self.calls.append(partial(call, *args, **more))

    def forward(self, layer: LinearStage, h: Tensor, y: Tensor) -> Tensor:
        weight, *bias = layer.views(self.x)
        if bias:
            self.record(torch.baddbmm, bias[0].unsqueeze(2), weight, h, out=y)
        else:
            self.record(torch.bmm, weight, h, out=y)
        if layer.relu:
            self.record(y.relu_)
        return y

    def lose(self, loss: LossGradient, output: Tensor, g: Tensor, targets: Tensor) -> None:
        """As in `losses`."""
        if loss is of_classes:
            self.record(torch.softmax, output, 1, out=g)
            self.record(g.scatter_, 1, targets.unsqueeze(1), -1.0, reduce="add")
        else:
            self.record(torch.sigmoid, output, out=g)
            self.record(g.sub_, targets.unsqueeze(1))
        self.record(g.div_, targets.shape[-1])

    def backward(self, layer: LinearStage, h: Tensor, y: Tensor, g: Tensor, wanted: bool) -> Tensor:
        weight, *bias = layer.views(self.x)
        if layer.relu:
            self.record(THRESHOLD_OUT, g, y, 0, grad_input=g)
        learned = [torch.empty(p.shape, dtype=p.dtype) for p in (weight, *bias)]
        self.record(torch.bmm, g, h.mT, out=learned[0])
        for own in learned[1:]:
            self.record(torch.sum, g, 2, out=own)
        self.learned = [own.flatten(1) for own in learned] + self.learned
        below = torch.empty(h.shape, dtype=h.dtype)
        if wanted:
            self.record(torch.bmm, weight.mT, g, out=below)
        return below
