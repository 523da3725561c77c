"""Max-pooling over slabs: a window's places are tensors of one shape, so a pool is a few passes over long runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .stages import Image, Stage, Views


def pool(slabs: Sequence[Tensor]) -> Tensor:
    """The maximum of slabs, in the memory of the last; the others become 1 where they gave it, else 0. Of equal ones it
    is the first, as in torch; a NaN is the maximum."""
    *earlier, top = slabs
    for slab in reversed(earlier):
        torch.maximum(slab, top, out=top)
        torch.ge(slab, top, out=slab)  # in the numbers' own dtype: products with booleans are not vectorised
    return top


def unpool(g: Tensor, choices: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """The gradient g of a maximum, which is used up, goes to the slab that gave it; `choices` may be `out`."""
    *earlier, last = out
    for choice, slab in zip(choices, earlier, strict=True):
        torch.mul(choice, g, out=slab)
        g -= slab
    last.copy_(g)


class Pool(Stage):
    """A max-pool that follows no convolution."""

    def __init__(self, image: Image, kernel: tuple[int, int]):
        self.kernel, self.size = kernel, image[1:]
        self.shape = (image[0], image[1] // kernel[0], image[2] // kernel[1])
        self.numbers = 2 * image[0] * image[1] * image[2]

    def forward(self, parameters: Views, h: Tensor) -> tuple[Tensor, Any]:
        *choices, _ = slabs = [slab.clone() for slab in self._slabs(h)]
        return pool(slabs), choices

    def backward(self, parameters: Views, kept: Any, g: Tensor, wanted: bool) -> tuple[Tensor | None, list[Tensor]]:
        image = g.new_zeros(len(g), *self.size, *g.shape[3:])
        unpool(g.clone(), kept, self._slabs(image))
        return image, []

    def _slabs(self, image: Tensor) -> list[Tensor]:
        (h, w), (_, rows, columns) = self.kernel, self.shape
        image = image[:, : rows * h, : columns * w]
        return [image[:, i::h, j::w] for i in range(h) for j in range(w)]
