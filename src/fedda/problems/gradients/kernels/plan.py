"""A description of convolutional networks for the kernels."""

import math
from dataclasses import dataclass

from .launch import cdiv, power_of_two

LARGEST = 2**31 - 2**20  # numbers in an array: kernels count in 32 bits
GRID = 65_535  # CUDA's limit on programs along the axis of groups


@dataclass(frozen=True)
class NormPlan:
    """A BatchNorm by the statistics of the batch; `weight` and `bias` are positions in the flat vector."""

    weight: int
    bias: int
    eps: float


@dataclass(frozen=True)
class ConvolutionPlan:
    """A convolution, relu, perhaps a BatchNorm, and perhaps a 2x2 max-pool; `weight` and `bias` are positions in the
    flat vector."""

    channels: int
    filters: int
    height: int
    width: int
    kernel: int
    pad: int
    pool: bool
    weight: int
    bias: int | None
    norm: NormPlan | None = None

    @property
    def pools(self) -> bool:
        """Whether the kernel of the convolution pools as well: not with a BatchNorm in between."""
        return self.pool and self.norm is None

    @property
    def out(self) -> tuple[int, int]:
        """Height and width after the convolution, before the pool."""
        return self.height + 2 * self.pad - self.kernel + 1, self.width + 2 * self.pad - self.kernel + 1

    @property
    def pooled(self) -> tuple[int, int]:
        """Height and width after the pool, if there is one."""
        h, w = self.out
        return (h // 2, w // 2) if self.pool else (h, w)

    def rows(self, batch: int) -> int:
        """Rows of the matrix product for a batch; windows come in blocks of 32."""
        n = batch * math.prod(self.pooled if self.pools else self.out)
        return cdiv(n, 32) * 128 if self.pools else n


@dataclass(frozen=True)
class LinearPlan:
    """A linear layer; a relu follows all but the last."""

    inputs: int
    outputs: int
    weight: int
    bias: int | None


@dataclass(frozen=True)
class NetworkPlan:
    """Convolutions, if there are any, linear layers and a mean cross-entropy, for groups with the parameters
    x [groups, d]."""

    convolutions: tuple[ConvolutionPlan, ...]
    linear: tuple[LinearPlan, ...]
    parts: int  # bfloat16 numbers per number

    @property
    def linear_precision(self) -> str:
        """Of the products of hidden linear layers: as in the convolutions, or better."""
        return "tf32x3" if self.parts > 1 else "tf32"

    def at_once(self, batch: int) -> int:
        """The largest number of groups in one call."""
        return max(1, min(GRID, LARGEST // self.numbers(batch)))

    def samples(self, groups: int) -> int:
        """The largest number of samples in one call that `groups` groups share."""
        return max(1, LARGEST * 32 // (groups * self.numbers(32)))

    def numbers(self, batch: int) -> int:
        """The size of the largest array for one group: patches, outputs or weights."""
        linear = max(max(layer.inputs, layer.outputs) * max(batch, layer.outputs) for layer in self.linear)
        if not self.convolutions:
            return linear
        first = self.convolutions[0]
        patches = first.rows(batch) * power_of_two(first.channels * first.kernel**2 + 1)
        outputs = (batch * math.prod(layer.out) * layer.filters for layer in self.convolutions)
        weights = (layer.filters * layer.channels * layer.kernel**2 for layer in self.convolutions)
        return max(linear, patches, *outputs, *weights)
