"""The cross-entropy of a stack of models: its gradient is one Triton kernel instead of some ten operations."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from .stack import LARGEST, TYPES, applied, flat, unflat, with_stack_first

CLASSES = 8192  # at most: a program holds all numbers of a row
library = torch.library.Library("fedda", "FRAGMENT")
library.define("class_gradient(Tensor d, Tensor x, Tensor target, int ignored, float smoothing) -> Tensor")


def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor | None:  # fmt: skip
    """torch.nn.functional.cross_entropy, or None if our kernel does not fit."""
    if weight is not None or size_average is not None or reduce is not None or reduction != "mean":
        return None
    return of_last_axis(input.movedim(1, -1) if input.dim() > 1 else input, target, ignore_index, label_smoothing)


def of_last_axis(
    logits: Tensor, target: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor | None:
    """The mean cross-entropy of logits whose classes are the last axis; None if our kernel does not fit."""
    fits = is_batchedtensor(logits) and logits.dtype in TYPES and target.dtype == torch.int64
    if not fits or target.shape != logits.shape[:-1] or logits.shape[-1] > CLASSES:
        return None
    if not 0 < logits.numel() < LARGEST:
        return None
    x = logits.reshape(-1, logits.shape[-1])
    mean: Tensor = applied(StackedCrossEntropy, x, target.reshape(-1), ignore_index, float(label_smoothing))
    return mean


class StackedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, target: Tensor, ignored: int, smoothing: float) -> Tensor:
        """Plain operations: a recorded gradient does not need the value."""
        log = x.float().log_softmax(-1)
        used = target != ignored
        of_target = log.gather(-1, target.where(used, 0)[..., None])[..., 0]
        losses = -of_target if not smoothing else (smoothing - 1) * of_target - smoothing * log.mean(-1)
        return losses.where(used, 0.0).sum(-1) / used.sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        x, target, ctx.ignored, ctx.smoothing = inputs
        ctx.save_for_backward(x, target)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Any, ...]:
        x, target = ctx.saved_tensors
        return torch.ops.fedda.class_gradient(d, x, target, ctx.ignored, ctx.smoothing), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, int]:
        return applied(StackedCrossEntropy, *with_stack_first(info.batch_size, in_dims, args)), 0


@torch.library.impl(library, "class_gradient", "CompositeExplicitAutograd")
def _class_gradient(d: Tensor, x: Tensor, target: Tensor, ignored: int, smoothing: float) -> Tensor:
    from .kernels import cross_entropy as kernel

    lead = x.shape[:-2]
    x, target = flat(lead, (x, 2), (target, 1))
    with torch.cuda.device_of(x):  # Triton launches on the current device
        return unflat(lead, kernel.gradient(d.reshape(-1), x.contiguous(), target.contiguous(), ignored, smoothing))
