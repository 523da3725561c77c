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

from .losses import LossGradient, logit_gradient
from .stages import LinearStage, Squeeze, Stage

NUMBERS = 1_000_000  # in a stack of vectors: for larger ones the arithmetic dominates
KEPT = 8  # recordings, one for each shape


class ReplayedGradients:
    """The gradients of a chain of linear layers, recorded for each shape."""

    def __init__(self, stages: Sequence[Stage], loss: LossGradient):
        self.layers = [stage for stage in stages if isinstance(stage, LinearStage)]
        self.loss = loss
        self.fits = len(self.layers) + isinstance(stages[-1], Squeeze) == len(stages)
        self.recordings: dict[tuple[object, ...], Recording] = {}

    def __call__(self, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """The gradients as in `Chain.gradients`; None for stacks that are too large, not linear or not on a CPU."""
        if not self.fits or not x.is_cpu or x.numel() > NUMBERS:
            return None
        shape = (x.shape, inputs.shape, x.dtype)
        if shape not in self.recordings:
            if len(self.recordings) >= KEPT:
                self.recordings.clear()
            self.recordings[shape] = Recording(self.layers, self.loss, x, inputs, targets)
        return self.recordings[shape](x, inputs, targets)


class Recording:
    """The calls that compute gradients [g, d] at x [g, d] for inputs [n, batch, features], for one shape of each."""

    def __init__(self, layers: Sequence[LinearStage], loss: LossGradient, x: Tensor, inputs: Tensor, targets: Tensor):
        (g, _), (n, batch, *_) = x.shape, inputs.shape
        self.x = torch.empty(x.shape, dtype=x.dtype)
        self.inputs = x.new_empty(g // n, n, *inputs.shape[1:])  # [points, n, ...]: points share the batches
        self.targets = targets.new_empty(g // n, *targets.shape)
        self.gradients: list[Tensor] = []  # of each parameter, [g, numbers]
        self.calls: list[Callable[[], object]] = []
        parameters = [layer.views(self.x) for layer in layers]
        outputs = [self.inputs.view(g, batch, -1).mT]
        for i, layer in enumerate(layers):
            outputs.append(x.new_empty(g, *layer.shape, batch))
            layer.forward_into(outputs[-1], parameters[i], outputs[-2], self.record)
        gradient = torch.empty_like(outputs[-1])
        last = [v.squeeze(1) if loss is logit_gradient else v for v in (gradient, outputs[-1])]
        loss(last[0], last[1], self.targets.view(g, batch), self.record)
        for i in reversed(range(len(layers))):
            of_layer = [p.new_empty(p.shape) for p in parameters[i]]
            of_input = torch.empty(outputs[i].shape, dtype=x.dtype) if i else None
            layers[i].backward_into(
                of_input, of_layer, parameters[i], outputs[i], outputs[i + 1], gradient, self.record
            )
            self.gradients = [v.flatten(1) for v in of_layer] + self.gradients
            gradient = gradient if of_input is None else of_input

    def __call__(self, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        self.x.copy_(x)
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        for call in self.calls:
            call()
        return torch.cat(self.gradients, dim=1)

    def record(self, call: Callable[..., object], *args: object, **kwargs: object) -> None:
        self.calls.append(partial(call, *args, **kwargs))
