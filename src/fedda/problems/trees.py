"""Samples and outputs that are a tensor, or a tuple or dict of tensors (nested, if need be)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def map_tensors(function: Callable[[Tensor], Any], values: Any) -> Any:
    """A function of a tensor, or of each tensor in a tuple or dict; anything else stays as it is."""
    if isinstance(values, Tensor):
        return function(values)
    return tree_map(lambda v: function(v) if isinstance(v, Tensor) else v, values)


def at(values: Any, index: Any) -> Any:
    """values[index], of a tensor or of each tensor in a tuple or dict."""
    return map_tensors(lambda v: v[index], values)


def first_tensor(values: Any) -> Tensor:
    """The tensor itself, or the first of a tuple or dict."""
    return values if isinstance(values, Tensor) else next(v for v in tree_leaves(values) if isinstance(v, Tensor))


def join(function: Callable[[list[Tensor]], Tensor], parts: Sequence[Any]) -> Any:
    """Several tensors as one, such as by `torch.cat`; of tuples and dicts, each entry. An entry that is not a tensor is
    that of the first part.

    >>> join(torch.cat, [{"a": torch.tensor([1])}, {"a": torch.tensor([2])}])
    {'a': tensor([1, 2])}
    """
    if isinstance(parts[0], Tensor):
        return function(list(parts))
    return tree_map(lambda *v: function(list(v)) if isinstance(v[0], Tensor) else v[0], *parts)


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model: a tuple is its positional arguments, a dict its keywords."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """The output of a model."""
    args, kwargs = arguments(inputs)
    return model(*args, **kwargs)


def tensors_of(owner: str, values: Any) -> Any:
    """A user's array as a tensor; of a tuple or dict of arrays, each of them. A list, and a tuple of numbers, are one
    array.

    >>> tensors_of("problem: y", ["cat", "dog"])
    Traceback (most recent call last):
    ValueError: problem: y must be numbers, got texts; number them: names, y = np.unique(y, return_inverse=True)
    """
    if isinstance(values, Mapping) and values:
        return {name: tensors_of(f"{owner}[{name!r}]", value) for name, value in values.items()}
    if isinstance(values, tuple) and values and not all(np.isscalar(v) for v in values):
        return tuple(tensors_of(f"{owner}[{i}]", value) for i, value in enumerate(values))
    if isinstance(values, Tensor):
        return values
    try:
        array = np.asarray(values)
    except (ValueError, TypeError):
        array = np.asarray(None)
    if array.dtype.kind in "US":
        raise ValueError(
            f"{owner} must be numbers, got texts; number them: names, y = np.unique(y, return_inverse=True)"
        )
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"{owner} must be one array with all samples, of equal shapes, got {type(values).__name__}; join the "
            "arrays of clients by torch.cat, and name the owner of each sample in client"
        )
    with warnings.catch_warnings():  # a mapped file is read-only, and we never write to it
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(array)
