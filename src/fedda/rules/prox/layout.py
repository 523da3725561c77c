"""Which entries of the flat vector belong to which parameter: masks and groups by the names and shapes of a model."""

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor

Layout = Sequence[tuple[str, Sequence[int]]]  # (name, shape) of every parameter, in the order of the flat vector
GROUPS = ("layer", "filter", "feature")


class Span(NamedTuple):
    name: str
    shape: tuple[int, ...]
    part: slice  # of the flat vector


def spans(layout: Layout) -> Iterator[Span]:
    start = 0
    for name, shape in layout:
        stop = start + math.prod(shape)
        yield Span(name, tuple(shape), slice(start, stop))
        start = stop


def size(layout: Layout) -> int:
    return sum(math.prod(shape) for _, shape in layout)


def matching(owner: str, on: str, layout: Layout) -> list[Span]:
    """The parameters that `on` means: all weights (2 or more dimensions), or those whose name fits the pattern.

    >>> [span.name for span in matching("L1", "fc*", [("conv", (2, 1)), ("fc.a", (3, 2)), ("fc.b", (3,))])]
    ['fc.a', 'fc.b']
    """
    if not isinstance(on, str):
        raise ValueError(f"{owner}: on must be 'weights' or a pattern over the parameters' names, got {on!r}")
    chosen = [
        span for span in spans(layout) if (len(span.shape) > 1 if on == "weights" else fnmatchcase(span.name, on))
    ]
    if not chosen:
        raise ValueError(f"{owner}: on={on!r} fits no parameter; there are {described(layout)}")
    return chosen


def mask(owner: str, on: str, layout: Layout) -> Tensor:
    """Whether `on` selects each coordinate: [d], boolean."""
    chosen = torch.zeros(size(layout), dtype=torch.bool)
    for span in matching(owner, on, layout):
        chosen[span.part] = True
    return chosen


def group_ids(owner: str, how: str, layout: Layout) -> Tensor:
    """The group of every coordinate: [d], -1 for none. One-dimensional parameters (biases) have no group.

    "layer": every weight is a group; "filter": every output channel or row of every weight; "feature": every input
    channel or column of the FIRST weight, so that a zero group is an input that the model ignores.

    >>> group_ids("GroupLasso", "filter", [("weight", (2, 3)), ("bias", (2,))]).tolist()
    [0, 0, 0, 1, 1, 1, -1, -1]
    >>> group_ids("GroupLasso", "feature", [("weight", (2, 3)), ("bias", (2,))]).tolist()
    [0, 1, 2, 0, 1, 2, -1, -1]
    """
    weights = [span for span in spans(layout) if len(span.shape) > 1]
    if not weights:
        raise ValueError(
            f"{owner}: groups={how!r} needs a parameter with 2 or more dimensions; there are {described(layout)}"
        )
    ids, count = torch.full((size(layout),), -1), 0
    for _, shape, part in weights[:1] if how == "feature" else weights:
        axis = {"layer": None, "filter": 0, "feature": 1}[how]
        n = 1 if axis is None else shape[axis]
        column = [-1 if i == axis else 1 for i in range(len(shape))]
        number = torch.zeros(shape, dtype=torch.int64) if axis is None else torch.arange(n).view(column).expand(shape)
        ids[part] = count + number.reshape(-1)
        count += n
    return ids


def described(layout: Layout) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in layout)
