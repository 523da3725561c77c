"""The kernels as operators of PyTorch: what captures a round sees them, with what they read and write."""

from __future__ import annotations

import torch
from torch import Tensor

from . import draws
from .plan import Plan

PLANS: list[Plan] = []


@torch.library.custom_op(
    "fedda::stack_gradients",
    mutates_args=(),
    schema="(Tensor x, Tensor inputs, Tensor targets, Tensor? mean, Tensor? std, int plan) -> Tensor",
)
def stack_gradients(x, inputs, targets, mean, std, plan):  # type: ignore[no-untyped-def]
    scale = None if mean is None else (mean, std)
    return PLANS[plan].gradients(x.contiguous(), inputs.contiguous(), targets.contiguous(), scale)


@torch.library.custom_op(
    "fedda::draw", mutates_args=(), schema="(Tensor key, Tensor ids, Tensor offsets, Tensor sizes, int batch) -> Tensor"
)
def draw(key, ids, offsets, sizes, batch):  # type: ignore[no-untyped-def]
    return draws.drawn(key.contiguous(), ids.contiguous(), offsets, sizes, batch)


class Kernels:
    """A plan as a function of points x [points * c, d] and batches [c, B, ...] with what standardises them."""

    def __init__(self, plan: Plan):
        if plan not in PLANS:
            PLANS.append(plan)
        self.plan, self.number = plan, PLANS.index(plan)

    def __call__(self, x: Tensor, inputs: Tensor, targets: Tensor, scale: tuple[Tensor, Tensor] | None) -> Tensor:
        n, batch = inputs.shape[:2]
        mean, std = scale if scale is not None else (None, None)
        x = x.view(len(x) // n, n, -1)
        size = max(1, self.plan.at_once(batch) // len(x))
        done = [
            stack_gradients(some.flatten(0, 1), *data, mean, std, self.number).unflatten(0, (len(x), -1))
            for some, *data in zip(x.split(size, dim=1), inputs.split(size), targets.split(size), strict=True)
        ]
        return (done[0] if len(done) == 1 else torch.cat(done, dim=1)).flatten(0, 1)
