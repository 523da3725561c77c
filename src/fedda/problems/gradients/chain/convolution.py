"""Convolution, max-pool and ReLU of a stack of models as one stage, forward and backward.

Images are [g, height, width, batch, channels]: a pixel is a contiguous slab of memory, so shifts and pools are fast.
Bias and ReLU come after the pool, where there are fewer pixels: both are monotone, so the maximum is the same.
"""

import math
from itertools import product

import torch
from torch import Tensor

from .pooling import pool, unpool
from .stages import Gradients, Image, ParameterView, Saved, Stage, Views, Workspace, activate_, relu_gradient_into

NARROW = 16  # with fewer filters, MKL's product of a tall matrix is many times slower


class Convolution(Stage):
    """Any convolution, as a matrix product with its windows (im2col); without a pool, `pool` is (1, 1)."""

    weight: ParameterView

    def __init__(
        self, weight: ParameterView, bias: ParameterView | None, image: Image, stride: tuple[int, int],
        padding: tuple[int, int, int, int], pool: tuple[int, int], relu: bool,
    ):  # fmt: skip
        self.weight, self.bias, self.relu = weight, bias, relu
        self.stride, self.padding, self.pool = stride, padding, pool
        self.filters, self.kernel = weight.shape[0], weight.shape[2:]
        self.channels, *self.size = image
        left, right, top, bottom = padding
        self.padded = self.size[0] + top + bottom, self.size[1] + left + right
        self.pixels = [
            ((n - k) // s + 1) // p for n, k, s, p in zip(self.padded, self.kernel, stride, pool, strict=True)
        ]
        self.shape = (self.filters, *self.pixels)
        self.places, self.features = math.prod(pool), weight.shape[1:].numel()
        self.numbers = math.prod(self.pixels) * self.places * (self.filters + self.features)
        self.workspace = Workspace()

    def prepare(self, h: Tensor) -> Tensor:
        """The windows [g, channels * kernel, pool * pixels * batch] of the image h."""
        padded = self.workspace("padded", h, len(h), self.channels, *self.padded, h.shape[3]).zero_()
        self._inside(padded).copy_(h.permute(0, 4, 1, 2, 3))
        view = self._windows(padded)
        windows = self.workspace("windows", h, *view.shape).copy_(view)
        return windows.view(len(h), self.features, -1)

    def forward(self, parameters: Views, h: Tensor) -> tuple[Tensor, Saved]:
        weight, *bias = parameters
        y = self.workspace("y", h, len(h), h.shape[2], self.filters)
        if self.filters < NARROW:
            y.copy_(torch.bmm(weight.flatten(2), h).mT)
        else:
            torch.bmm(h.mT, weight.flatten(2).mT.contiguous(), out=y)
        slabs = y.view(len(h), self.places, -1, self.filters).unbind(1)
        top = activate_(pool(slabs), bias, self.relu)
        return top.view(len(h), *self.pixels, -1, self.filters), (h, y, slabs, top)

    def backward(self, parameters: Views, saved: Saved, g: Tensor, need_input: bool) -> Gradients:
        weight, *bias = parameters
        h, y, slabs, top = saved
        batch = g.shape[3]
        g = relu_gradient_into(self.workspace("g", top, *top.shape), g.reshape(top.shape), top, self.relu)
        gradients = [g.sum(1) for _ in bias]
        unpool(g, slabs[:-1], slabs)
        of_weight = torch.bmm(y.mT, h.mT) if self.filters < NARROW else torch.bmm(h, y).mT
        gradients = [of_weight.flatten(1), *gradients]
        if not need_input:
            return None, gradients
        windows = torch.bmm(weight.flatten(2).mT, y.mT, out=self.workspace("windows", h, *h.shape))
        return self._scatter(windows, batch), gradients

    def _windows(self, padded: Tensor) -> Tensor:
        """A view [g, channels, kernel rows and columns, pool rows and columns, rows, columns, batch]."""
        (kh, kw), (sh, sw), (ph, pw) = self.kernel, self.stride, self.pool
        g, c, row, column, b = padded.stride()
        shape = (*padded.shape[:2], kh, kw, ph, pw, *self.pixels, padded.shape[-1])
        rows, columns = row * sh, column * sw
        return padded.as_strided(shape, (g, c, row, column, rows, columns, rows * ph, columns * pw, b))

    def _inside(self, padded: Tensor) -> Tensor:
        left, _, top, _ = self.padding
        return padded[:, :, top : top + self.size[0], left : left + self.size[1]]

    def _scatter(self, windows: Tensor, batch: int) -> Tensor:
        """The sum of overlapping windows: the transpose of `prepare`."""
        padded = self.workspace("padded", windows, len(windows), self.channels, *self.padded, batch).zero_()
        into = self._windows(padded)
        parts = windows.view(into.shape)
        for i, j in product(*map(range, self.kernel)):
            into[:, :, i, j] += parts[:, :, i, j]
        return self._inside(padded).permute(0, 2, 3, 4, 1)
