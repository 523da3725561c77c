"""The attention of a stack of models: two products and a softmax or, by our Triton kernels, without the scores in
memory."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor

from .stack import applied, precision_of, with_stack_first

Dropout = Callable[[Tensor], Tensor]
LARGEST_HEAD = 128  # numbers of a head: a program keeps blocks of whole heads in registers
# Operators of PyTorch's dispatcher, so that recordings and graphs include them.
library = torch.library.Library("fedda", "FRAGMENT")
library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, str precision) -> Tensor[]"
)
library.define(
    "attention_backward(Tensor d, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor sums, bool causal, "
    "float scale, str precision) -> Tensor[]"
)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False, dropout: Dropout | None = None,
    kernels: str = "",
) -> Tensor:  # fmt: skip
    """F.scaled_dot_product_attention; `dropout` is applied to the weights. `kernels` is the precision of the products
    in our kernels; if it is empty, or they do not fit, attention is two products and a softmax."""
    if enable_gqa:
        key, value = (v.repeat_interleave(query.shape[-3] // v.shape[-3], -3) for v in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    precision = kernels and precision_of(kernels, query, key, value)
    if precision and dropout_p == 0 and dropout is None and fits(query, key, value, attn_mask, is_causal):
        return by_kernels(precision, query, key, value, attn_mask, is_causal, scale)
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:
        past = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = torch.where(past, scores, -math.inf)
    if attn_mask is not None:
        seen = attn_mask.dtype == torch.bool
        scores = torch.where(attn_mask, scores, -math.inf) if seen else scores + attn_mask
        hidden = (scores == -math.inf).all(-1, keepdim=True)  # a query without keys has the result 0, as in PyTorch
        weights = scores.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)
    else:
        weights = scores.softmax(-1)
    return (weights if dropout is None else dropout(weights)) @ value


def fits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> bool:
    """Whether the kernels take these tensors. What the stack shares altogether is left to PyTorch."""
    if mask is not None:
        known = mask.dtype in (torch.bool, torch.float32, torch.bfloat16)
        if causal or not known or requires_grad(mask):
            return False
    size = q.shape[-1]
    if not size == k.shape[-1] == v.shape[-1] <= LARGEST_HEAD or k.shape[-2] != v.shape[-2]:
        return False
    return any(map(is_batchedtensor, (q, k, v))) and all(x.numel() > 0 for x in (q, k, v))


def requires_grad(v: Tensor) -> bool:
    """Whether a gradient is taken by `v`, inside of vmap or outside."""
    while not v.requires_grad and is_functorch_wrapped_tensor(v):
        v = get_unwrapped(v)
    return v.requires_grad


def by_kernels(
    precision: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v, mask) if x is not None))
    if mask is not None:
        mask = mask.expand(*lead, q.shape[-2], k.shape[-2])
    q, k, v = (x.expand(*lead, *x.shape[-2:]) for x in (q, k, v))
    out: Tensor = applied(Attention, q, k, v, mask, causal, scale, precision)[0]
    return out


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return tuple(torch.ops.fedda.attention(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.causal, ctx.scale, ctx.precision = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, d: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        saved = (*ctx.saved_tensors, ctx.causal, ctx.scale, ctx.precision)
        return (*torch.ops.fedda.attention_backward(d, *saved), None, None, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, tuple[int, int]]:
        return applied(Attention, *with_stack_first(info.batch_size, in_dims, args)), (0, 0)


@torch.library.impl(library, "attention", "CompositeExplicitAutograd")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, precision: str
) -> list[Tensor]:
    """The results, and the logarithm of the sum of each softmax to base 2."""
    from .kernels import attention as kernels

    shape = q.shape
    q, k, v, mask = map(of_models, (q, k, v, mask))
    with torch.cuda.device_of(q):  # Triton launches on the current device
        out, sums = kernels.forward(q, k, v, mask, causal, scale, precision)
    return [out.reshape(shape), sums.view(shape[:-1])]


@torch.library.impl(library, "attention_backward", "CompositeExplicitAutograd")
def _attention_backward(
    d: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, sums: Tensor, causal: bool,
    scale: float, precision: str,
) -> list[Tensor]:  # fmt: skip
    from .kernels import attention as kernels

    shapes = [x.shape for x in (q, k, v)]
    d, q, k, v, mask, out = map(of_models, (d, q, k, v, mask, out))
    with torch.cuda.device_of(q):
        results = kernels.backward(d, q, k, v, mask, out, sums, causal, scale, precision)
    return [x.reshape(shape) for x, shape in zip(results, shapes, strict=True)]


def of_models(v: Tensor | None) -> Any:
    """The tensor as [models, samples, heads, rows, columns]."""
    if v is None:
        return None
    v = v[(None,) * (5 - v.dim())]
    return v.reshape(-1, *v.shape[-4:])
