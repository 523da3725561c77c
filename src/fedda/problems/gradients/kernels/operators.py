"""The kernels as operators of PyTorch, so that a recorded or captured round includes them."""

from functools import partial

import torch
from torch import Tensor

from . import draws
from .launch import compile_and_run
from .passes import Pass
from .plan import NetworkPlan

PLANS: list[NetworkPlan] = []
# Defined by hand: torch.library.custom_op would load PyTorch's compiler, which takes seconds.
library = torch.library.Library("fedda", "FRAGMENT")
library.define("gradients(Tensor x, Tensor inputs, Tensor targets, Tensor? mean, Tensor? std, int plan) -> Tensor")
library.define("draw(Tensor key, Tensor ids, Tensor offsets, Tensor sizes, int batch) -> Tensor")


@torch.library.impl(library, "gradients", "CompositeExplicitAutograd")
def gradients(x: Tensor, inputs: Tensor, targets: Tensor, mean: Tensor | None, std: Tensor | None, plan: int) -> Tensor:
    scale = None if mean is None or std is None else (mean, std)
    x, inputs, targets = x.contiguous(), inputs.contiguous(), targets.contiguous()
    key = plan, x.shape, inputs.shape, inputs.dtype, targets.dtype, scale is None
    return compile_and_run(key, x, lambda: Pass(PLANS[plan], x, inputs, scale).gradients(targets))


@torch.library.impl(library, "draw", "CompositeExplicitAutograd")
def draw(key: Tensor, ids: Tensor, offsets: Tensor, sizes: Tensor, batch: int) -> Tensor:
    with torch.cuda.device_of(key):
        return draws.draw_batches(key.contiguous(), ids.contiguous(), offsets, sizes, batch)


class Kernels:
    """The gradients and outputs of the networks of a plan."""

    def __init__(self, plan: NetworkPlan):
        if plan not in PLANS:
            PLANS.append(plan)
        self.plan, self.number = plan, PLANS.index(plan)

    def __call__(self, x: Tensor, inputs: Tensor, targets: Tensor, scale: tuple[Tensor, Tensor] | None) -> Tensor:
        """The gradients at x [points * c, d] for batches [c, B, ...], standardised by (mean, std) of each channel."""
        n, batch = inputs.shape[:2]
        mean, std = scale if scale is not None else (None, None)
        x = x.view(len(x) // n, n, -1)
        size = max(1, self.plan.at_once(batch) // len(x))
        parts = [
            torch.ops.fedda.gradients(part.flatten(0, 1), *data, mean, std, self.number).unflatten(0, (len(x), -1))
            for part, *data in zip(x.split(size, dim=1), inputs.split(size), targets.split(size), strict=True)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).flatten(0, 1)

    def outputs(self, x: Tensor, inputs: Tensor) -> Tensor:
        """The outputs [groups, samples, classes] at x [groups, d] for inputs [samples, ...] that all groups share. With
        BatchNorm, the statistics follow the parameters in x: a mean and a variance for each."""
        widths = [layer.filters for layer in self.plan.convolutions if layer.norm for _ in range(2)]
        x, *statistics = (v.contiguous() for v in x.split([x.shape[1] - sum(widths), *widths], dim=1))

        def outputs(part: Tensor) -> Tensor:
            key = self.number, x.shape, part.shape, part.dtype
            return compile_and_run(key, x, lambda: Pass(self.plan, x, part, None, statistics).outputs())

        parts = inputs.split(self.plan.samples(len(x)))
        return torch.cat([outputs(part[None].contiguous()) for part in parts], dim=1)

    def moments(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Mean and second moment of the input of each BatchNorm, one after the other, [points, n, size] in float64, at
        x [points, d] for batches [n, B, ...]."""
        n, stack = len(inputs), x.repeat_interleave(len(inputs), dim=0)
        size = max(n, self.plan.at_once(inputs.shape[1]) // n * n)  # whole points

        def moments(part: Tensor) -> Tensor:
            made = Pass(self.plan, part, inputs.contiguous(), None)
            pairs = [
                (t[0].double(), t[1].double() ** -2 - layer.norm.eps) for layer, t in made.norms.items() if layer.norm
            ]
            return torch.cat([v for mean, variance in pairs for v in (mean, variance + mean**2)], dim=1)

        key = "moments", self.number, inputs.shape, inputs.dtype
        parts = [compile_and_run((key, part.shape), x, partial(moments, part)) for part in stack.split(size)]
        return torch.cat(parts).view(len(x), n, -1)
