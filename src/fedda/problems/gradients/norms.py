"""Group, layer and batch norms of a stack of models by our Triton kernels, with a sum and a relu behind them.

A network adds and takes a relu in separate operations. When it takes the relu of a norm's output, one operation
computes all of it from the norm's input. Then nothing needs the norm's own output, and a recording leaves it out.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from .convolution import channels_last
from .joining import added
from .stack import LARGEST, TYPES, applied, unflat, with_stack_first

# Operators of PyTorch's dispatcher, so that recordings and graphs include them.
library = torch.library.Library("fedda", "FRAGMENT")
library.define(
    "norm(Tensor x, Tensor? w, Tensor? bias, Tensor? residual, int[] sizes, bool by_row, int dims, float eps, "
    "bool relu, ScalarType dtype) -> Tensor[]"
)
library.define(
    "norm_backward(Tensor d, Tensor x, Tensor? y, Tensor? w, Tensor mean, Tensor rstd, int[] sizes, "
    "bool by_row, int dims, bool residual, bool weights) -> Tensor[]"
)
SUMS = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)
SUMS_IN_PLACE = (torch.Tensor.add_, torch.Tensor.__iadd__)
RELUS = (F.relu, torch.relu, torch.Tensor.relu)
RELUS_IN_PLACE = (torch.relu_, torch.Tensor.relu_)


class NormCall(NamedTuple):
    """What a tensor was computed from: the norm of x, by `sizes` (row_norm.py explains them), plus a residual."""

    x: Tensor
    w: Tensor | None
    bias: Tensor | None
    sizes: tuple[int, ...]
    by_row: bool
    eps: float
    dtype: torch.dtype
    residual: Tensor | None = None

    def computed(self, relu: bool = False) -> Tensor:
        x, w, bias, sizes, by_row, eps, dtype, residual = self
        output: Tensor = applied(StackedNorm, x, w, bias, residual, sizes, by_row, x.dim(), eps, relu, dtype)[0]
        return output


class Norms:
    """Calls of functions that our kernels take: norms, and relus of their outputs."""

    def __init__(self) -> None:
        self.norm_of: Any = WeakTensorKeyDictionary()

    def __call__(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """The result of a call, or None if the function itself must compute it."""
        if function is F.group_norm or function is torch.group_norm:
            return self.group_norm(*args, **kwargs)
        if function is F.layer_norm or function is torch.layer_norm:
            return self.layer_norm(*args, **kwargs)
        if function is F.batch_norm:
            return self.batch_norm(*args, **kwargs)
        if function is torch.batch_norm:
            return self.plain_batch_norm(*args, **kwargs)
        if function in SUMS or function in SUMS_IN_PLACE:
            return self.sum(function, *args, **kwargs)
        if function in RELUS or function in RELUS_IN_PLACE:
            return self.relu(function, *args, **kwargs)
        return None

    def group_norm(
        self, input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
        eps: float = 1e-5, cudnn_enabled: bool = True,
    ) -> Tensor | None:  # fmt: skip
        if input.dim() < 2 or input.shape[1] % num_groups:
            return None  # PyTorch says what is wrong
        sizes = len(input), num_groups, input.shape[1] // num_groups, math.prod(input.shape[2:])
        return self.norm(input, sizes, weight, bias, eps, input.dtype)

    def layer_norm(
        self, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
        eps: float = 1e-5, cudnn_enable: bool = True,
    ) -> Tensor | None:  # fmt: skip
        axes = len(normalized_shape)
        if not axes or tuple(input.shape[-axes:]) != tuple(normalized_shape):
            return None
        size = math.prod(normalized_shape)
        rounded = torch.is_autocast_enabled("cuda")  # then PyTorch computes layer norms in single precision
        dtype = torch.float32 if rounded else input.dtype
        return self.norm(input, (input.numel() // max(size, 1), 1, size, 1), weight, bias, eps, dtype)

    def batch_norm(
        self, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
        bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5, *_: Any,
    ) -> Tensor | None:  # fmt: skip
        """With the statistics of the batch, which no running ones follow."""
        pixels = math.prod(input.shape[2:])
        if not training or running_mean is not None or input.dim() < 2 or len(input) * pixels == 1:
            return None
        return self.norm(input, (1, input.shape[1], len(input), pixels), weight, bias, eps, input.dtype, by_row=True)

    def plain_batch_norm(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, *rest: Any
    ) -> Tensor | None:
        """The operator under F.batch_norm."""
        return self.batch_norm(input, running_mean, None, weight, bias, *rest[1:])

    def norm(
        self, input: Tensor, sizes: tuple[int, ...], w: Tensor | None, bias: Tensor | None, eps: float,
        dtype: torch.dtype, by_row: bool = False,
    ) -> Tensor | None:  # fmt: skip
        given = all(v is None or v.dtype == torch.float32 for v in (w, bias))
        if not given or not is_batchedtensor(input) or input.dtype not in TYPES or not 0 < input.numel() < LARGEST:
            return None
        w, bias = (None if v is None else v.reshape(-1) for v in (w, bias))
        call = NormCall(input, w, bias, sizes, by_row, eps, dtype)
        return self.remembered(call.computed(), call)

    def sum(self, function: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        """A sum with a norm's output is computed as it is: its relu may not be asked for."""
        a, b = args if len(args) == 2 and not kwargs else (None, None)
        norm, residual = (b, a) if function in SUMS and self.known(b) else (a, b)
        call = self.known(norm)
        if call is None or call.residual is not None or not isinstance(residual, Tensor):
            return None
        if residual.shape != call.x.shape or residual.dtype not in TYPES:
            return None
        dtype = torch.promote_types(call.dtype, residual.dtype)
        call = call._replace(residual=residual, dtype=dtype)
        return self.remembered(function(*args), call)

    def relu(self, function: Any, input: Tensor, inplace: bool = False) -> Tensor | None:
        call = self.known(input)
        if call is None:
            return None
        result = call.computed(relu=True)
        if inplace or function in RELUS_IN_PLACE:
            torch.relu_(input)
        return result

    def known(self, v: Any) -> NormCall | None:
        """What a tensor was computed from, unless something has changed since."""
        call, then = self.norm_of.get(v, (None, None)) if isinstance(v, Tensor) else (None, None)
        return call if call is not None and then == state(v, *call) else None

    def remembered(self, v: Tensor, call: NormCall) -> Tensor:
        self.norm_of[v] = call, state(v, *call)
        return v


def state(*values: Any) -> tuple[Any, ...]:
    """How often each tensor was changed in place, and whether gradients are taken."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    return torch.is_grad_enabled(), *(innermost(v)._version for v in tensors)


def innermost(v: Tensor) -> Tensor:
    """The tensor with the numbers of a whole stack."""
    while is_functorch_wrapped_tensor(v):
        v = get_unwrapped(v)
    return v


class StackedNorm(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return tuple(torch.ops.fedda.norm(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
        x, w, _, residual, *ctx.layout, _, relu, _ = inputs
        y, mean, rstd = output
        ctx.residual = None if residual is None else residual.dtype
        ctx.save_for_backward(x, y if relu else None, w, mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)

    @staticmethod
    def backward(ctx: Any, d: Tensor, *_: Any) -> tuple[Any, ...]:
        for_x, for_w, for_bias, for_residual, *others = ctx.needs_input_grad
        x, y, *saved = ctx.saved_tensors
        by_kernel = for_residual and y is not None  # else it is d itself
        dx, *rest = torch.ops.fedda.norm_backward(d, x, y, *saved, *ctx.layout, by_kernel, for_w or for_bias)
        dr = rest.pop(0) if by_kernel else d
        dw, dbias = (added(v, -2) for v in rest) if rest else (None, None)
        dr = dr.to(ctx.residual) if for_residual else None
        return dx if for_x else None, dw if for_w else None, dbias if for_bias else None, dr, *(None for _ in others)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        return applied(StackedNorm, *with_stack_first(info.batch_size, in_dims, args)), (0, 0, 0)


@torch.library.impl(library, "norm", "CompositeExplicitAutograd")
def _norm(
    x: Tensor, w: Tensor | None, bias: Tensor | None, residual: Tensor | None, sizes: list[int], by_row: bool,
    dims: int, eps: float, relu: bool, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    from .kernels import row_norm

    lead, last, shape = x.shape[:-dims], in_lines(x, sizes, by_row, dims), x.shape
    if last:
        x, residual = x.movedim(1 - dims, -1), None if residual is None else residual.movedim(1 - dims, -1)
    inner = x.shape
    x, residual = (dense(lead, v) for v in (x, residual))
    w, bias = by_model(lead, w), by_model(lead, bias)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        y, *statistics = row_norm.forward(x, w, bias, residual, sizes, by_row, last, eps, relu, dtype)
    y = y.view(inner).movedim(-1, 1 - dims) if last else y
    return [torch.ops.aten._unsafe_view(y, shape), *(unflat(lead, v) for v in statistics)]


@torch.library.impl(library, "norm_backward", "CompositeExplicitAutograd")
def _norm_backward(
    d: Tensor, x: Tensor, y: Tensor | None, w: Tensor | None, mean: Tensor, rstd: Tensor, sizes: list[int],
    by_row: bool, dims: int, residual: bool, weights: bool,
) -> list[Tensor]:  # fmt: skip
    from .kernels import row_norm

    lead, last = x.shape[:-dims], in_lines(x, sizes, by_row, dims)
    if last:
        d, x, y = (*(v.movedim(1 - dims, -1) for v in (d, x)), None if y is None else y.movedim(1 - dims, -1))
    shape = x.shape
    d, x, y, mean, rstd = (dense(lead, v) for v in (d, x, y, mean, rstd))
    w = by_model(lead, w)
    with torch.cuda.device_of(x):
        dx, dr, dw = row_norm.backward(d, x, y, w, mean, rstd, sizes, by_row, last, residual, weights)
    results = [v.view(shape) for v in (dx, dr) if v is not None]
    results = [v.movedim(-1, 1 - dims) for v in results] if last else results
    return [*results, *(() if dw is None else (unflat(lead, v) for v in dw))]


def in_lines(x: Tensor, sizes: list[int], by_row: bool, dims: int) -> bool:
    """Whether this is a group norm of a tensor in which the channels of a pixel lie side by side."""
    return not by_row and sizes[3] > 1 and channels_last(x, 1 - dims)


def by_model(lead: torch.Size, v: Any) -> Any:
    """A tensor as [n, numbers of a model]. The numbers of a model lie side by side, the models anywhere."""
    if v is None:
        return None
    v = v.reshape(lead.numel(), -1)
    return v if v.stride(1) == 1 else v.contiguous()


def dense(lead: torch.Size, v: Any) -> Any:
    """The same, but without gaps between the models."""
    return None if v is None else by_model(lead, v).contiguous()
