"""The gradients of known losses (means over the batch) at the outputs of a stack of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models import binary_cross_entropy, cross_entropy

LossGradient = Callable[[Tensor, Tensor], Tensor]  # outputs [g, ..., batch], targets [g, batch] -> as the outputs


def loss_gradient(loss: Any, shape: tuple[int, ...]) -> LossGradient | None:
    """The gradient of a loss of outputs of a shape, or None where it is not known."""
    if loss is binary_cross_entropy and shape == ():
        return of_logit
    if len(shape) == 1 and (loss is cross_entropy or loss is F.cross_entropy or _plain(loss)):
        return of_classes
    return None


def _plain(loss: Any) -> bool:
    """Whether it is nn.CrossEntropyLoss() as torch makes it: no class weights, no smoothing, no hooks."""
    if type(loss) is not nn.CrossEntropyLoss:
        return False
    return vars(loss) | {"training": True} == vars(nn.CrossEntropyLoss())


def of_classes(output: Tensor, target: Tensor) -> Tensor:
    """softmax(output) - one-hot(target), over the batch."""
    g = output.softmax(dim=1)
    g.scatter_(1, target.unsqueeze(1), -1.0, reduce="add")
    return g.div_(target.shape[-1])


def of_logit(output: Tensor, target: Tensor) -> Tensor:
    """sigmoid(output) - target, over the batch."""
    return (output.sigmoid() - target).div_(target.shape[-1])


def in_range(targets: Tensor, gradient: LossGradient, shape: tuple[int, ...]) -> bool:
    """Whether targets are what the gradient above is exact for: torch's cross-entropy leaves out the class -100."""
    if targets.dim() != 1:
        return False
    if gradient is of_logit:
        return True
    return targets.dtype == torch.int64 and bool(((targets >= 0) & (targets < shape[0])).all())
