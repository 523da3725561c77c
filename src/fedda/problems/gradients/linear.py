"""Linear layers of a stack of models by our Triton kernels. These read weights of any strides and types, and add the
bias themselves, so no extra kernel converts types or adds the bias."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from .joining import added
from .stack import LARGEST, applied, flat, precision_of, unflat, with_stack_first

MIN_TOKENS = 16  # tokens of a model: with fewer, the gradient of a weight is hardly more than the writing of it
MAX_WEIGHTS = 1 << 18  # numbers of a weight: of larger ones the product takes the time, and PyTorch's is fast
library = torch.library.Library("fedda", "FRAGMENT")
library.define("linear(Tensor x, Tensor w, Tensor? bias, str precision) -> Tensor")
library.define("linear_input(Tensor d, Tensor w, str precision, ScalarType dtype) -> Tensor")
library.define("linear_weight(Tensor x, Tensor d, bool bias, str precision) -> Tensor[]")


def linear(precision: str, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """F.linear by our operator; None if it does not fit. A frozen layer is left to PyTorch."""
    precision = precision_of(precision, input, weight)
    fits = precision and is_batchedtensor(weight) and weight.dtype == torch.float32 and weight.dim() == 2
    if not fits or not weight.numel() or input.shape[-1:] != weight.shape[1:]:
        return None
    if bias is not None and bias.shape != weight.shape[:1]:  # PyTorch broadcasts others, or refuses them
        return None
    outputs, inputs = weight.shape
    tokens = input.numel() // inputs
    if tokens < MIN_TOKENS or weight.numel() > MAX_WEIGHTS or tokens * max(inputs, outputs) >= LARGEST:
        return None
    out: Tensor = applied(StackedLinear, input, weight, bias, precision)
    return out


class StackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, precision: str) -> Tensor:
        y = torch.ops.fedda.linear(by_tokens(x, w), w, bias, precision)
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]])  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        x, w, _, ctx.precision = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        for_x, for_w, for_bias, _ = ctx.needs_input_grad
        shape, x, d = x.shape, by_tokens(x, w), by_tokens(d, w)
        dx = torch.ops.fedda.linear_input(d, w, ctx.precision, x.dtype).view(shape) if for_x else None
        if not for_w and not for_bias:
            return dx, None, None, None
        dw, *db = (added(v, 0) for v in torch.ops.fedda.linear_weight(x, d, for_bias, ctx.precision))
        return dx, dw, db[0] if db else None, None

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, int]:
        return applied(StackedLinear, *with_stack_first(info.batch_size, in_dims, args)), 0


def by_tokens(x: Tensor, w: Tensor) -> Tensor:
    """Inputs or outputs of a stack of layers, as [..., tokens, numbers]."""
    return x.reshape(*w.shape[:-2], -1, x.shape[-1])


@torch.library.impl(library, "linear", "CompositeExplicitAutograd")
def _linear(x: Tensor, w: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    from .kernels import products

    lead = w.shape[:-2]
    x, w = flat(lead, (x, 2), (w, 2))
    b = None if bias is None else flat(lead, (bias, 1))[0]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with torch.cuda.device_of(x):  # Triton launches on the current device
        y = products.multiplied(x, w.mT, b, precision, dtype)
    return unflat(lead, y)


@torch.library.impl(library, "linear_input", "CompositeExplicitAutograd")
def _linear_input(d: Tensor, w: Tensor, precision: str, dtype: torch.dtype) -> Tensor:
    from .kernels import products

    lead = w.shape[:-2]
    d, w = flat(lead, (d, 2), (w, 2))
    with torch.cuda.device_of(d):
        dx = products.multiplied(d, w, None, precision, dtype)
    return unflat(lead, dx)


@torch.library.impl(library, "linear_weight", "CompositeExplicitAutograd")
def _linear_weight(x: Tensor, d: Tensor, bias: bool, precision: str) -> list[Tensor]:
    from .kernels import products

    lead = d.shape[:-2]
    x, d = flat(lead, (x, 2), (d, 2))
    with torch.cuda.device_of(d):
        results = products.weight_gradient(x, d, bias, precision)
    return [v.view(len(v), *lead, *v.shape[2:]) for v in results]
