"""Max-pooling over slabs: each position of the window is one tensor, so a pool is a few operations on large tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .stages import Gradients, Image, Saved, Stage, Views


def pool(slabs: Sequence[Tensor]) -> Tensor:
    """The maximum over slabs, in the memory of the last slab. The others become 1 where they are the maximum, else 0.
    Of equal slabs the first counts, as in torch; NaN is larger than all numbers."""
    *earlier, top = slabs
    for slab in reversed(earlier):
        torch.maximum(slab, top, out=top)
        torch.ge(slab, top, out=slab)  # 0 or 1 in the same dtype: products with booleans are slow
    return top


def unpool(g: Tensor, choices: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Write the gradient g of a maximum to the slab that it came from. g is overwritten; `choices` may be `out`."""
    *earlier, last = out
    for choice, slab in zip(choices, earlier, strict=True):
        torch.mul(choice, g, out=slab)
        g -= slab
    last.copy_(g)


class Pool(Stage):
    """A max-pool that does not follow a convolution."""

    def __init__(self, image: Image, kernel: tuple[int, int]):
        self.kernel, self.size = kernel, image[1:]
        self.shape = (image[0], image[1] // kernel[0], image[2] // kernel[1])
        self.numbers = 2 * image[0] * image[1] * image[2]

    def forward(self, parameters: Views, h: Tensor) -> tuple[Tensor, Saved]:
        *choices, _ = slabs = [slab.clone() for slab in self._slabs(h)]
        return pool(slabs), choices

    def backward(self, parameters: Views, saved: Saved, g: Tensor, need_input: bool) -> Gradients:
        image = g.new_zeros(len(g), *self.size, *g.shape[3:])
        unpool(g.clone(), saved, self._slabs(image))
        return image, []

    def _slabs(self, image: Tensor) -> list[Tensor]:
        (h, w), (_, rows, columns) = self.kernel, self.shape
        image = image[:, : rows * h, : columns * w]
        return [image[:, i::h, j::w] for i in range(h) for j in range(w)]
