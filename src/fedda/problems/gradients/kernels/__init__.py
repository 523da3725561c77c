"""GPU kernels for stacks of convolutional networks and perceptrons.

They need Triton, which comes with PyTorch for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..chain import Chain
from ..chain.convolution import Convolution
from ..chain.losses import class_gradient
from ..chain.stages import Flatten, LinearStage, Stage
from ..chain.winograd import Winograd
from .plan import ConvolutionPlan, LinearPlan, NetworkPlan, NormPlan

if TYPE_CHECKING:
    from .operators import Kernels

PARTS = {"tf32": 2, "bf16": 1}  # bfloat16 numbers per number, see tiles.py
FILTERS = (16, 32, 64, 128)  # of a layer


def kernels_for(chain: Chain, sample: tuple[int, ...], batch: int, precision: str) -> Kernels | None:
    """The gradients of a chain for samples of this shape by our kernels; None if they do not fit."""
    if precision not in PARTS or batch > 128 or find_spec("triton") is None:
        return None
    plan = plan_of(chain, sample, precision)
    from .operators import Kernels

    return None if plan is None else Kernels(plan)


def draw_kernel(device: torch.device) -> Callable[..., Tensor] | None:
    """A kernel that draws batches; None without a GPU."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from . import operators  # noqa: F401

    return torch.ops.fedda.draw


def plan_of(chain: Chain, sample: tuple[int, ...], precision: str) -> NetworkPlan | None:
    """The plan of a chain for samples of this shape, or None if the kernels do not fit. They fit linear layers with
    relu in between and a cross-entropy, alone or behind convolutions of images [channels, height, width] with relu,
    stride 1 and equal padding, with or without a 2x2 max-pool or with a BatchNorm and a 2x2 max-pool."""
    if chain.shared or chain.loss is not class_gradient:
        return None
    stages = list(chain.stages)
    layers: list[ConvolutionPlan] = []
    while stages and isinstance(stages[0], Convolution | Winograd):
        layer = plan_convolution(stages.pop(0), sample, first=not layers)
        if layer is None:
            return None
        layers.append(layer)
        sample = (layer.filters, *layer.pooled)
    if layers and not (stages and isinstance(stages.pop(0), Flatten) and stages):
        return None
    linear = []
    for stage in stages:
        if not isinstance(stage, LinearStage) or stage.relu == (stage is stages[-1]):
            return None
        outputs, inputs = stage.weight.shape
        linear.append(LinearPlan(inputs, outputs, stage.weight.first, stage.bias and stage.bias.first))
    return NetworkPlan(tuple(layers), tuple(linear), PARTS[precision]) if linear[-1].outputs <= 128 else None


def plan_convolution(stage: Stage, sample: tuple[int, ...], first: bool) -> ConvolutionPlan | None:
    assert isinstance(stage, Convolution | Winograd)
    filters, channels, kernel, other = stage.weight.shape
    stride, padding, pool = stage.stride, stage.padding, stage.pool
    fits = channels * kernel**2 < 128 if first else channels in FILTERS
    plain = stride == (1, 1) and len(set(padding)) == 1 and kernel == other and kernel <= 7
    if not (fits and stage.relu and plain and filters in FILTERS and pool in ((1, 1), (2, 2))):
        return None
    norm = stage.norm and NormPlan(stage.norm.weight.first, stage.norm.bias.first, stage.norm.eps)
    if norm and pool == (1, 1):
        return None
    weight, bias = stage.weight.first, stage.bias and stage.bias.first
    return ConvolutionPlan(
        channels, filters, sample[1], sample[2], kernel, padding[0], pool == (2, 2), weight, bias, norm
    )
