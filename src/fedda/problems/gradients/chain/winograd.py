"""3x3 convolution, ReLU and 2x2 max-pool by Winograd's minimal filtering F(2x2, 3x3) (Lavin, Gray: Fast Algorithms for
Convolutional Neural Networks, CVPR 2016): 16 products for a tile of 2x2 outputs instead of 36.

    Y = A^T [(G w G^T) . (B^T d B)] A

A tile is a window of the pool. The transforms are sums of slabs, and gradients use their transposes, so forward and
both gradients are 16 matrix products each. The last row of B^T has the opposite sign, so that all corners of A are 1.
In a constant image the four outputs are equal to the bit, so ties are the same as in a direct sum.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from .pooling import pool, unpool
from .stages import Gradients, Image, ParameterView, Saved, Stage, Views, Workspace, activate_, relu_gradient_into

G = ((1.0, 0.0, 0.0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0.0, 0.0, 1.0))


@cache
def filter_transform(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The Kronecker product of G with itself, [16, 9]; set number by number, because a copy to a device would wait."""
    g = torch.empty(4, 3, dtype=dtype, device=device)
    for i, row in enumerate(G):
        for j, value in enumerate(row):
            g[i, j] = value
    return torch.kron(g, g)


class Winograd(Stage):
    """A 3x3 convolution with padding 1 and stride 1, then a 2x2 max-pool."""

    weight: ParameterView
    kernel, stride, padding, pool = (3, 3), (1, 1), (1, 1, 1, 1), (2, 2)

    def __init__(self, weight: ParameterView, bias: ParameterView | None, image: Image, relu: bool):
        self.weight, self.bias, self.relu, self.filters = weight, bias, relu, weight.shape[0]
        self.channels, *self.size = image
        self.tiles = (self.size[0] // 2, self.size[1] // 2)
        self.shape = (self.filters, *self.tiles)
        self.numbers = 16 * self.tiles[0] * self.tiles[1] * (self.channels + self.filters)
        self.workspace = Workspace()

    def prepare(self, h: Tensor) -> Tensor:
        """B^T d B of every tile: [g, 16, tiles * batch, channels]."""
        (m, n), (g, height, width, batch, c) = self.tiles, h.shape
        padded = self.workspace("padded", h, g, height + 2, width + 2, batch, c)
        for edge in (padded[:, 0], padded[:, -1], padded[:, :, 0], padded[:, :, -1]):
            edge.zero_()
        padded[:, 1:-1, 1:-1] = h
        rows = self.workspace("rows", h, g, 4, m, width + 2, batch, c)
        into_tile([padded[:, i : i + 2 * m : 2] for i in range(4)], rows.unbind(1))
        tiles = self.workspace("tiles", h, g, 4, 4, m, n, batch, c)
        into_tile([rows[:, :, :, i : i + 2 * n : 2] for i in range(4)], tiles.unbind(2))
        return tiles.view(g, 16, m * n * batch, c)

    def forward(self, parameters: Views, h: Tensor) -> tuple[Tensor, Saved]:
        weight, *bias = parameters
        g, k, samples = len(weight), self.filters, h.shape[2]
        transform = filter_transform(h.dtype, h.device).expand(g, 16, 9)
        filters = torch.bmm(transform, weight.view(g, -1, 9).mT).view(g * 16, k, -1)
        products = self.workspace("products", h, g, 4, 4, samples, k)
        torch.bmm(h.flatten(0, 1), filters.mT, out=products.view(g * 16, samples, k))
        rows = self.workspace("rows", h, g, 2, 4, samples, k)
        out_of_tile(products.unbind(1), rows.unbind(1))
        y = self.workspace("y", h, g, 2, 2, samples, k)
        out_of_tile(rows.unbind(2), y.unbind(2))
        *choices, _ = slabs = y.flatten(1, 2).unbind(1)
        top = activate_(pool(slabs), bias, self.relu)
        return top.view(g, *self.tiles, -1, k), (h, filters, choices, top)

    def backward(self, parameters: Views, saved: Saved, g: Tensor, need_input: bool) -> Gradients:
        _, *bias = parameters
        h, filters, choices, top = saved
        g = relu_gradient_into(self.workspace("g", top, *top.shape), g.reshape(top.shape), top, self.relu)
        gradients = [g.sum(1) for _ in bias]
        products = self.workspace("products", g, len(g), 4, 4, *g.shape[1:])
        unpool(g, choices, [products[:, i, j] for i in (0, 3) for j in (0, 3)])
        for axis in (
            products[:, ::3].unbind(2),
            products.unbind(1),
        ):  # A dY A^T: first the columns of two rows, then all rows
            torch.add(axis[0], axis[3], out=axis[1])
            torch.sub(axis[0], axis[3], out=axis[2])
        products, tiles = products.view(-1, *g.shape[1:]), h.flatten(0, 1)
        of_filters = torch.bmm(products.mT, tiles).view(len(g), 16, -1)
        transform = filter_transform(h.dtype, h.device).mT.expand(len(g), 9, 16)
        gradients = [torch.bmm(transform, of_filters).mT.flatten(1), *gradients]
        if not need_input:
            return None, gradients
        return self._scatter(torch.bmm(products, filters, out=self.workspace("tiles", g, *tiles.shape))), gradients

    def _scatter(self, tiles: Tensor) -> Tensor:
        """The sum of overlapping tiles: the transpose of `prepare`."""
        (m, n), (height, width) = self.tiles, self.size
        tiles = tiles.view(-1, 4, 4, m, n, tiles.shape[1] // (m * n), self.channels)
        g, rest = len(tiles), tiles.shape[5:]
        rows = self.workspace("rows", tiles, g, 4, m, width, *rest)
        overlap([t.movedim(3, 0) for t in tiles.unbind(2)], rows.movedim(3, 0))
        image = self.workspace("padded", tiles, g, height, width, *rest)
        overlap([t.movedim(1, 0) for t in rows.unbind(1)], image.movedim(1, 0))
        return image


def into_tile(d: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """B^T d along one axis."""
    torch.sub(d[0], d[2], out=out[0])
    torch.add(d[1], d[2], out=out[1])
    torch.sub(d[2], d[1], out=out[2])
    torch.sub(d[3], d[1], out=out[3])


def out_of_tile(m: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """A^T m along one axis."""
    torch.add(m[0], m[1], out=out[0]).add_(m[2])
    torch.sub(m[1], m[2], out=out[1]).add_(m[3])


def overlap(e: Sequence[Tensor], out: Tensor) -> None:
    """B e along the first axis: the sum of overlapping tiles, without the padding."""
    n = len(e[0])
    even, odd = out[0 : 2 * n : 2], out[1 : 2 * n : 2]
    torch.sub(e[1], e[2], out=even).sub_(e[3])
    even[1:] += e[3][:-1]
    torch.add(e[1], e[2], out=odd).sub_(e[0])
    odd[:-1] += e[0][1:]
    if len(out) > 2 * n:  # with an odd number of pixels, only the last tile reads the last pixel
        out[-1] = e[3][-1]
