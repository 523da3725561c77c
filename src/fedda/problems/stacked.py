"""One client's gradient made into that of a whole stack of clients, in one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

Objective = Callable[..., Tensor]  # (x [d], inputs [b, ...], targets [b, ...]) -> loss []


class StackedGradient:
    """grad(objective) over a leading axis of every argument.

    `vmap(grad(...))` is traced once for each shape into plain tensor operations: on small models its dispatch costs more
    than the arithmetic. What vmap cannot take is done in a loop, which is said once.
    """

    def __init__(self, objective: Objective):
        self.objective = objective
        self.stacked: Callable[..., Tensor] = vmap(grad(objective))
        self.traced: dict[Any, Callable[..., Tensor]] = {}

    def __call__(self, x: Tensor, *data: Tensor) -> Tensor:
        shapes = tuple((v.shape, v.dtype, v.device) for v in (x, *data))
        if shapes not in self.traced:
            self.traced[shapes] = self.trace(x, *data)
        return self.traced[shapes](x, *data)

    def trace(self, x: Tensor, *data: Tensor) -> Callable[..., Tensor]:
        try:
            self.stacked(x, *data)
        except Exception as why:  # whatever the user's module raises under vmap, the loop is right
            if self.stacked is not self.loop:
                self.stacked = self.loop
                reason = str(why).strip().splitlines()[0][:200] if str(why).strip() else type(why).__name__
                warnings.warn(f"vmap cannot take this model, its clients run one by one: {reason}", stacklevel=2)
            return self.loop
        try:
            from torch.fx.experimental.proxy_tensor import make_fx

            graph: Callable[..., Tensor] = make_fx(self.stacked)(x, *data)
            return graph
        except Exception:  # a module that tracing cannot take still runs under vmap, only slower
            return self.stacked

    def loop(self, x: Tensor, *data: Tensor) -> Tensor:
        return torch.stack([gradient(self.objective, *one) for one in zip(x, *data, strict=True)])


def gradient(objective: Objective, x: Tensor, *data: Tensor) -> Tensor:
    """One client's gradient by ordinary autograd: the truth."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(objective(x, *data), x)[0]
