"""Our own GPU kernels for stacks of convolutional networks; needs Triton, which comes with PyTorch for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..chain.convolution import Convolution
from ..chain.losses import of_classes
from ..chain.stack import Chain
from ..chain.stages import Flatten, LinearStage, Stage
from ..chain.winograd import Winograd

if TYPE_CHECKING:
    from .operators import Kernels
    from .plan import Layer, NetworkPlan

PARTS = {"tf32": 2, "bf16": 1}  # of a number, by precision: see pieces.py
WIDTHS = (16, 32, 64, 128)  # of a layer, in filters


def kernels_for(chain: Chain, sample: tuple[int, ...], batch: int, precision: str) -> Kernels | None:
    """The gradients of a chain on batches of samples [channels, height, width] by our kernels, where they fit it."""
    if precision not in PARTS or batch > 128 or find_spec("triton") is None:
        return None
    plan = plan_of(chain, sample, precision)
    from .operators import Kernels

    return None if plan is None else Kernels(plan)


def draw_kernel(device: torch.device) -> Callable[..., Tensor] | None:
    """The draws of batches as one kernel, on a GPU."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from . import operators  # noqa: F401

    return torch.ops.fedda.draw


def plan_of(chain: Chain, sample: tuple[int, ...], precision: str) -> NetworkPlan | None:
    """The kernels for a chain on samples [channels, height, width], or None where they do not fit it: convolutions with
    relu, of stride 1 and equal padding, alone or under a 2x2 max-pool, then linear layers under a cross-entropy."""
    if chain.shared or chain.loss is not of_classes:
        return None
    from .plan import Dense, NetworkPlan

    stages = list(chain.stages)
    layers: list[Layer] = []
    while stages and isinstance(stages[0], Convolution | Winograd):
        layer = convolution(stages.pop(0), sample, first=not layers)
        if layer is None:
            return None
        layers.append(layer)
        sample = (layer.filters, *layer.result)
    if not layers or not stages or not isinstance(stages.pop(0), Flatten) or not stages:
        return None
    dense = []
    for stage in stages:
        if not isinstance(stage, LinearStage) or stage.relu == (stage is stages[-1]):
            return None
        outputs, inputs = stage.weight.shape
        dense.append(Dense(inputs, outputs, stage.weight.first, stage.bias and stage.bias.first))
    return NetworkPlan(tuple(layers), tuple(dense), PARTS[precision]) if dense[-1].outputs <= 128 else None


def convolution(stage: Stage, sample: tuple[int, ...], first: bool) -> Layer | None:
    from .plan import Layer

    assert isinstance(stage, Convolution | Winograd)
    filters, channels, kernel, other = stage.weight.shape
    stride, padding, pool = (1, 1), (1, 1, 1, 1), (2, 2)  # Winograd's
    if isinstance(stage, Convolution):
        stride, padding, pool = stage.stride, stage.padding, stage.pool
    fits = channels * kernel**2 < 128 if first else channels in WIDTHS
    plain = stride == (1, 1) and len(set(padding)) == 1 and kernel == other and kernel <= 7
    if not (fits and stage.relu and plain):
        return None
    if filters not in WIDTHS or pool not in ((1, 1), (2, 2)):
        return None
    bias = stage.bias and stage.bias.first
    return Layer(channels, filters, sample[1], sample[2], kernel, padding[0], pool == (2, 2), stage.weight.first, bias)
