"""Tells code of the user from code of this library."""

from types import FunctionType
from typing import Any

import torch
from torch import Tensor

PLAIN = (bool, int, float, str, bytes, slice, Tensor, torch.dtype, torch.device, torch.Size, type(None))


def has_user_code(value: Any) -> bool:
    """Whether a value, or anything that it holds, is neither of this library nor plain data.

    >>> has_user_code([1, "a"]), has_user_code(object())
    (False, True)
    """
    if isinstance(value, PLAIN):
        return False
    if isinstance(value, list | tuple):
        return any(map(has_user_code, value))
    if isinstance(value, dict):
        return any(map(has_user_code, value.values()))
    if isinstance(value, FunctionType):
        return not of_fedda(value) or any(has_user_code(cell.cell_contents) for cell in value.__closure__ or ())
    return not of_fedda(type(value)) or any(map(has_user_code, getattr(value, "__dict__", {}).values()))


def of_fedda(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] == "fedda"
