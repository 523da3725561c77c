"""Embeddings of a stack of models. On a GPU, the gradients of their tables come from a Triton kernel of ours: PyTorch
sorts the tokens first, which takes a dozen kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.nn import functional as F

from .stack import applied, flat, unflat, with_stack_first

# Of one model: tokens times rows of the table, times columns in blocks of 64. Every program has 32 rows and looks at
# all tokens, 64 at a time. We guess that a look takes half a microsecond, and that an H200 runs 800 programs at once;
# neither is measured. With 20 models, this limit is 160,000 looks, or 100 microseconds, like PyTorch's sort.
MAX_LOOKS = 1 << 24
library = torch.library.Library("fedda", "FRAGMENT")
library.define("embedding_weight(Tensor d, Tensor rows, int number, str precision) -> Tensor")


def embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False, *, kernels: str = "",
) -> Tensor:  # fmt: skip
    """Rows of `weight`. The row of the padding gets no gradient, and if asked for, each other row its mean one instead
    of the sum. `kernels` is the precision of our Triton kernels; empty: none."""
    fits = kernels and is_batchedtensor(weight) and weight.dtype == torch.float32 and max_norm is None and not sparse
    if fits and 0 < input.numel() * len(weight) * -(-weight.shape[1] // 64) <= MAX_LOOKS:
        out: Tensor = applied(StackedEmbedding, weight, input.flatten().long(), kernels).view(*input.shape, -1)
    else:
        out = F.embedding(input, weight, None, max_norm, norm_type)
    if scale_grad_by_freq:
        rows = input.flatten()
        counts = out.new_zeros(len(weight)).scatter_add(0, rows, torch.ones_like(rows, dtype=out.dtype))
        part = out / counts[input][..., None]
        out = part + (out - part).detach()
    if padding_idx is None:
        return out
    return torch.where((input == padding_idx % len(weight))[..., None], out.detach(), out)


def plain_embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False, *,
    kernels: str = "",
) -> Tensor:  # fmt: skip
    """The operator under `F.embedding`, for which -1 is no padding."""
    padding = None if padding_idx < 0 else padding_idx
    return embedding(indices, weight, padding, None, 2.0, scale_grad_by_freq, sparse, kernels=kernels)


class StackedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(w: Tensor, rows: Tensor, precision: str) -> Tensor:
        return w.gather(-2, rows[..., None].expand(*rows.shape, w.shape[-1]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        w, rows, ctx.precision = inputs
        ctx.number = w.shape[-2]
        ctx.save_for_backward(rows)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Any, ...]:
        return torch.ops.fedda.embedding_weight(d, *ctx.saved_tensors, ctx.number, ctx.precision), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, int]:
        return applied(StackedEmbedding, *with_stack_first(info.batch_size, in_dims, args)), 0


@torch.library.impl(library, "embedding_weight", "CompositeExplicitAutograd")
def _embedding_weight(d: Tensor, rows: Tensor, number: int, precision: str) -> Tensor:
    from .kernels import embedding as kernels

    lead = d.shape[:-2]
    d, rows = flat(lead, (d, 2), (rows, 1))
    with torch.cuda.device_of(d):  # Triton launches on the current device
        dw = kernels.weight_gradient(d, rows, number, precision)
    return unflat(lead, dw)
