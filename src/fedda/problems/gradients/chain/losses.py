"""The gradients of known losses (means over the batch) with respect to the outputs of a stack of models."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models import binary_cross_entropy, cross_entropy

LossGradient = Callable[[Tensor, Tensor], Tensor]  # of outputs [g, ..., batch] and targets [g, batch]


def loss_gradient(loss: Any, shape: tuple[int, ...]) -> LossGradient | None:
    """The gradient of a loss for outputs of this shape, or None if it is not known."""
    if shape == ():
        if loss is binary_cross_entropy:
            return logit_gradient
        return square_gradient if loss is F.mse_loss or _is_default(loss, nn.MSELoss) else None
    if len(shape) == 1 and (loss is cross_entropy or loss is F.cross_entropy or _is_default(loss, nn.CrossEntropyLoss)):
        return class_gradient
    return None


def _is_default(loss: Any, kind: type[nn.Module]) -> bool:
    """Whether it is a loss of this kind with default arguments: no class weights, no smoothing, no hooks."""
    return type(loss) is kind and vars(loss) | {"training": True} == vars(kind())


def class_gradient(output: Tensor, target: Tensor) -> Tensor:
    """(softmax(output) - one-hot(target)) / batch, for outputs [g, classes, batch]."""
    g = output.softmax(dim=1)
    g.scatter_(1, target.unsqueeze(1), -1.0, reduce="add")
    return g.div_(target.shape[-1])


def logit_gradient(output: Tensor, target: Tensor) -> Tensor:
    """(sigmoid(output) - target) / batch, for outputs [g, batch]."""
    return (output.sigmoid() - target).div_(target.shape[-1])


def square_gradient(output: Tensor, target: Tensor) -> Tensor:
    """2 (output - target) / batch, for outputs [g, batch]."""
    return (output - target).mul_(2 / target.shape[-1])


def in_range(targets: Tensor, gradient: LossGradient, shape: tuple[int, ...]) -> bool:
    """Whether the gradient is exact for these targets: torch's cross-entropy ignores the class -100."""
    if targets.dim() != 1:
        return False
    if gradient is not class_gradient:
        return True
    return targets.dtype == torch.int64 and bool(((targets >= 0) & (targets < shape[0])).all())
