"""What a stack of convolutional networks is made of, as the kernels see it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .launch import cdiv, power

LARGEST = 2**31 - 2**20  # places in an array: kernels count in 32 bits
GRID = 65_535  # programs along the axis of groups, as CUDA allows


@dataclass(frozen=True)
class Layer:
    """A convolution, relu and perhaps a 2x2 max-pool; where its parameters stand in the flat vector."""

    channels: int
    filters: int
    height: int
    width: int
    kernel: int
    pad: int
    pool: bool
    weight: int
    bias: int | None

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of the convolution's result, before the pool."""
        return self.height + 2 * self.pad - self.kernel + 1, self.width + 2 * self.pad - self.kernel + 1

    @property
    def result(self) -> tuple[int, int]:
        h, w = self.out
        return (h // 2, w // 2) if self.pool else (h, w)

    def rows(self, batch: int) -> int:
        """Rows of the product that computes a batch; windows come in blocks of 32."""
        n = batch * math.prod(self.result)
        return cdiv(n, 32) * 128 if self.pool else n


@dataclass(frozen=True)
class Dense:
    """A linear layer; all but the last are followed by a relu."""

    inputs: int
    outputs: int
    weight: int
    bias: int | None


@dataclass(frozen=True)
class NetworkPlan:
    """Convolutions, then linear layers, then a mean cross-entropy, on groups of parameters x [groups, d]."""

    convolutions: tuple[Layer, ...]
    dense: tuple[Dense, ...]
    parts: int

    def at_once(self, batch: int) -> int:
        """How many groups one call may have."""
        return max(1, min(GRID, LARGEST // self.numbers(batch)))

    def samples(self, groups: int) -> int:
        """How many samples a call may have that so many groups share."""
        return max(1, LARGEST * 32 // (groups * self.numbers(32)))

    def numbers(self, batch: int) -> int:
        """The most numbers that an array has for one group: patches, results, weights."""
        first = self.convolutions[0]
        patches = first.rows(batch) * power(first.channels * first.kernel**2 + 1)
        results = (batch * math.prod(layer.out) * layer.filters for layer in self.convolutions)
        weights = (layer.filters * layer.channels * layer.kernel**2 for layer in self.convolutions)
        return max(patches, *results, *weights)
