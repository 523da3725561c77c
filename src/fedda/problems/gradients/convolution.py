"""Convolutions of a stack of models by our Triton kernels, in place of cuDNN's grouped convolutions, which are slow."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from .joining import added
from .stack import LARGEST, applied, flat, precision_of, unflat, with_stack_first

# Operators of PyTorch's dispatcher, so that recordings and graphs include them.
library = torch.library.Library("fedda", "FRAGMENT")
library.define(
    "convolution(Tensor x, Tensor w, Tensor? bias, int[] size, int[] window, str precision, bool last) -> Tensor"
)
library.define(
    "convolution_input(Tensor d, Tensor w, int[] size, int[] window, str precision, ScalarType dtype, bool last) "
    "-> Tensor"
)
library.define("convolution_weight(Tensor x, Tensor d, int[] window, str precision) -> Tensor")


class Window(NamedTuple):
    """Which pixels of its input a convolution reads: kernel, stride, padding above and left, dilation, groups."""

    kh: int
    kw: int
    sh: int
    sw: int
    ph: int
    pw: int
    dh: int
    dw: int
    groups: int


def convolve(
    precision: str, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1, *, last: bool = False,
) -> Tensor | None:  # fmt: skip
    """torch.conv1d or torch.conv2d by our kernels; None if they do not fit. A frozen layer is left to PyTorch: it is
    one convolution for all models. If `last`, the channels of a pixel lie side by side in the result."""
    precision, dims = precision_of(precision, input, weight), weight.dim() - 2
    fits = precision and is_batchedtensor(weight) and weight.dtype == torch.float32 and input.dim() == weight.dim()
    if not fits or input.shape[1] != weight.shape[1] * groups or not 0 < input.numel() < LARGEST:
        return None
    kernel, size = tuple(weight.shape[2:]), tuple(input.shape[2:])
    stride, dilation = repeated(stride, dims), repeated(dilation, dims)
    spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if padding == "same":
        left, both = tuple(v // 2 for v in spans), tuple(spans)
    else:
        left = repeated(0 if padding == "valid" else padding, dims)
        both = tuple(2 * p for p in left)
    out = [(n + p - span - 1) // s + 1 for n, p, span, s in zip(size, both, spans, stride, strict=True)]
    if min(out) < 1 or input.shape[0] * weight.shape[0] * torch.Size(out).numel() >= LARGEST:
        return None
    if dims == 1:
        input, weight = input[:, :, None], weight[:, :, None]
        kernel, stride, left, dilation, out = (1, *kernel), (1, *stride), (0, *left), (1, *dilation), [1, *out]
    window = Window._make((*kernel, *stride, *left, *dilation, groups))
    result: Tensor = applied(StackedConvolution, input, weight, bias, out, window, precision, last)
    return result[:, :, 0] if dims == 1 else result


def repeated(value: Any, dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values * dims if len(values) == 1 else values


def channels_last(x: Tensor, axis: int = -3) -> bool:
    """Whether the channels of a pixel lie side by side in memory; `axis` counts the channels."""
    return x.movedim(axis, -1).is_contiguous() and not x.is_contiguous()


class StackedConvolution(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any) -> Any:
        return torch.ops.fedda.convolution(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        x, w, _, _, ctx.window, ctx.precision, _ = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        for_x, for_w, for_bias, *_ = ctx.needs_input_grad
        how, operators = (ctx.window, ctx.precision), torch.ops.fedda
        dx = operators.convolution_input(d, w, x.shape[-2:], *how, x.dtype, channels_last(x)) if for_x else None
        dw = added(operators.convolution_weight(x, d, *how), 0) if for_w else None
        return dx, dw, d.sum((-4, -2, -1), dtype=w.dtype) if for_bias else None, *4 * [None]

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, int]:
        return applied(StackedConvolution, *with_stack_first(info.batch_size, in_dims, args)), 0


@torch.library.impl(library, "convolution", "CompositeExplicitAutograd")
def _convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, size: list[int], window: list[int], precision: str, last: bool
) -> Tensor:
    from .kernels import implicit_gemm

    lead = w.shape[:-4]
    x, w = flat(lead, (x, 4), (w, 4))
    b = None if bias is None else flat(lead, (bias, 1))[0]
    with torch.cuda.device_of(x):  # Triton launches on the current device
        y = implicit_gemm.forward(x, w, b, size, Window(*window), precision, last)
    return unflat(lead, y)


@torch.library.impl(library, "convolution_input", "CompositeExplicitAutograd")
def _convolution_input(
    d: Tensor, w: Tensor, size: list[int], window: list[int], precision: str, dtype: torch.dtype, last: bool
) -> Tensor:
    from .kernels import implicit_gemm

    lead = w.shape[:-4]
    d, w = flat(lead, (d, 4), (w, 4))
    with torch.cuda.device_of(d):
        dx = implicit_gemm.input_gradient(d, w, size, Window(*window), precision, dtype, last)
    return unflat(lead, dx)


@torch.library.impl(library, "convolution_weight", "CompositeExplicitAutograd")
def _convolution_weight(x: Tensor, d: Tensor, window: list[int], precision: str) -> Tensor:
    from .kernels import implicit_gemm

    lead = d.shape[:-4]
    x, d = flat(lead, (x, 4), (d, 4))
    with torch.cuda.device_of(d):
        dw = implicit_gemm.weight_gradient(x, d, Window(*window), precision)
    return dw.view(len(dw), *lead, *dw.shape[2:])
