"""Sums and maxima over groups of coordinates by gathering alone: the same bits every time, on every device."""

import torch
from torch import Tensor

WIDTHS = (4, 16, 64, 256, 1024)


class Segments:
    """The groups of an id vector [d] (-1: in none). Scattering would add in another order every time on CUDA.

    Each group is cut into pieces of one width, padded; the sums of the pieces are then summed in the same way.

    >>> Segments(torch.tensor([0, 2, 0, -1])).sum(torch.tensor([1.0, 2.0, 4.0, 8.0]))
    tensor([5., 0., 2.])
    """

    def __init__(self, ids: Tensor):
        self.ids, self.count = ids, int(ids.max()) + 1
        self.sizes = torch.bincount(ids[ids >= 0], minlength=self.count)
        order, sizes, d = ids.argsort(stable=True)[int((ids < 0).sum()) :], self.sizes, len(ids)
        self.levels: list[Tensor] = []
        while not self.levels or int(sizes.max()) > 1:
            index, sizes = _pieces(order, sizes, d)
            self.levels.append(index)
            d = len(index)
            order = torch.arange(d, device=ids.device)

    def sum(self, x: Tensor) -> Tensor:
        """[..., groups] from [..., d]."""
        for index in self.levels:
            x = torch.nn.functional.pad(x, (0, 1))[..., index].sum(dim=-1)
        return x

    def amax(self, x: Tensor) -> Tensor:
        """The same of x >= 0; 0 for an empty group."""
        for index in self.levels:
            x = torch.nn.functional.pad(x, (0, 1))[..., index].amax(dim=-1)
        return x

    def spread(self, y: Tensor, otherwise: float) -> Tensor:
        """[..., d] from [..., groups]: to every coordinate the number of its group, `otherwise` to those in none."""
        return torch.nn.functional.pad(y, (0, 1), value=otherwise)[..., self.ids]


def _pieces(order: Tensor, sizes: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """The positions of every piece [pieces, width], d where it is padded, and the number of pieces of every group."""

    def cut(width: int) -> Tensor:
        return ((sizes + width - 1) // width).clamp(min=1)

    # The width with the least to gather; more than 1, or nothing would be summed.
    width = 1 if int(sizes.max()) <= 1 else min(WIDTHS, key=lambda w: int(cut(w).sum()) * (w + 4))
    pieces = cut(width)
    group = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), pieces)
    number = torch.arange(len(group), device=sizes.device) - (pieces.cumsum(0) - pieces)[group]
    slot = number[:, None] * width + torch.arange(width, device=sizes.device)
    inside = slot < sizes[group][:, None]
    position = ((sizes.cumsum(0) - sizes)[group][:, None] + slot).where(inside, 0)
    return torch.where(inside, order[position] if len(order) else position, d), pieces
