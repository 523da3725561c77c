"""Sums of replies that do not depend on the order in which the replies arrive."""

import math

import torch
from torch import Tensor

SMALLEST = -150  # 2 to this power: what is smaller is rounded
BLOCK = 1 << 15  # numbers at a time, so that they stay in the cache


class ExactSum:
    """The sum of up to `terms` vectors with values up to `largest`: the same bits for every order of the terms.

    A float64 sum of multiples of a number q is exact as long as it stays below 2^53 q. So each term is cut into
    multiples of q1, of a much smaller q2, and so on down to 2^-150, and each of these is summed by itself.

    >>> tenth, total = torch.full((1, 1), 0.1, dtype=torch.float64), ExactSum(1, largest=1.0, terms=10)
    >>> for _ in range(10):
    ...     total.add(tenth)
    >>> total.value().item(), sum([0.1] * 10)
    (1.0, 0.9999999999999999)
    """

    def __init__(self, size: int, largest: float, terms: int):
        bits = 51 - math.ceil(math.log2(terms + 1))
        power = math.frexp(largest)[1] - bits  # of q1
        self.powers = [power]
        while power > SMALLEST:
            power -= bits
            self.powers.append(power)
        self.sums = [torch.zeros(1, size, dtype=torch.float64) for _ in self.powers]

    def add(self, vector: Tensor, weight: float = 1.0) -> None:
        """Add the weight times a vector [1, size]."""
        for at in range(0, vector.shape[-1], BLOCK):
            rest = vector[:, at : at + BLOCK].double() * weight
            for power, total in zip(self.powers, self.sums, strict=True):
                shift = 1.5 * 2.0 ** (52 + power)  # numbers of this size are multiples of q
                part = (rest + shift).sub_(shift)
                total[:, at : at + BLOCK] += part
                rest -= part
                if not rest.any():
                    break

    def value(self) -> Tensor:
        """The sum so far, [1, size]."""
        return sum(reversed(self.sums), start=torch.zeros_like(self.sums[0]))
