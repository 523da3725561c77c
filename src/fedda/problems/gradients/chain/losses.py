"""The gradients of known losses (means over the batch) with respect to the outputs of a stack of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models import binary_cross_entropy, cross_entropy
from .stages import Run

# writes the gradient g of outputs [g, ..., batch] for targets [g, batch]
LossGradient = Callable[[Tensor, Tensor, Tensor, Run], None]


def loss_gradient(loss: Any, shape: tuple[int, ...]) -> LossGradient | None:
    """The gradient of a loss for outputs of this shape, or None if it is not known."""
    if loss is binary_cross_entropy and shape == ():
        return logit_gradient
    if len(shape) == 1 and (loss is cross_entropy or loss is F.cross_entropy or _is_default(loss)):
        return class_gradient
    return None


def _is_default(loss: Any) -> bool:
    """Whether it is nn.CrossEntropyLoss() with default arguments: no class weights, no smoothing, no hooks."""
    if type(loss) is not nn.CrossEntropyLoss:
        return False
    return vars(loss) | {"training": True} == vars(nn.CrossEntropyLoss())


def class_gradient(g: Tensor, output: Tensor, target: Tensor, run: Run) -> None:
    """g = (softmax(output) - one-hot(target)) / batch, for outputs [g, classes, batch]."""
    run(torch.softmax, output, 1, out=g)
    run(g.scatter_, 1, target.unsqueeze(1), -1.0, reduce="add")
    run(g.div_, target.shape[-1])


def logit_gradient(g: Tensor, output: Tensor, target: Tensor, run: Run) -> None:
    """g = (sigmoid(output) - target) / batch, for outputs [g, batch]."""
    run(torch.sigmoid, output, out=g)
    run(g.sub_, target)
    run(g.div_, target.shape[-1])


def in_range(targets: Tensor, gradient: LossGradient, shape: tuple[int, ...]) -> bool:
    """Whether the gradient is exact for these targets: torch's cross-entropy ignores the class -100."""
    if targets.dim() != 1:
        return False
    if gradient is logit_gradient:
        return True
    return targets.dtype == torch.int64 and bool(((targets >= 0) & (targets < shape[0])).all())
