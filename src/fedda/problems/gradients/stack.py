"""What operators on a stack of models share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LARGEST = 2**31  # numbers of one model in one tensor: the kernels count in 32 bits
TYPES = (torch.float32, torch.bfloat16)  # of what kernels without products read


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """The result of a function that has its own derivatives."""
    return function.apply(*args)


def with_stack_first(n: int, in_dims: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The arguments with the axis of the stack in front; a tensor without one is shared by the stack."""

    def one(v: Any, dim: int | None) -> Any:
        if not isinstance(v, Tensor):
            return v
        return v.expand(n, *v.shape) if dim is None else v.movedim(dim, 0)

    return [one(v, dim) for v, dim in zip(args, in_dims, strict=True)]


def flat(lead: torch.Size, *tensors: tuple[Tensor, int]) -> list[Tensor]:
    """The tensors with one leading axis; each comes with its number of other axes."""
    return [v.reshape(lead.numel(), *v.shape[-dims:]) for v, dims in tensors]


def unflat(lead: torch.Size, v: Tensor) -> Tensor:
    """The opposite of `flat`. Autograd does not take it for a view: the output of a layer may be changed in place."""
    return torch.ops.aten._unsafe_view(v, [*lead, *v.shape[1:]])  # type: ignore[no-any-return]


def precision_of(precision: str, *tensors: Tensor) -> str:
    """The precision in which our kernels compute with these tensors, if it may be `precision`; empty if they cannot."""
    dtypes = {v.dtype for v in tensors}
    autocast = torch.is_autocast_enabled("cuda")  # perhaps the model switched it off
    if autocast and torch.get_autocast_dtype("cuda") != torch.bfloat16:
        return ""
    if dtypes == {torch.bfloat16} or (autocast and dtypes <= {torch.float32, torch.bfloat16}):
        return "bf16"
    return ("tf32" if precision == "bf16" else precision) if dtypes == {torch.float32} else ""
