"""Augmentation: training samples changed at random, by numbers from the counter, so that a run can be repeated.

An augmentation takes samples x [n, ...] as they are stored (images: uint8 or floats, [n, channels, height, width]) and
a function `uniform`, which gives a fresh number in (0, 1) for each sample: `uniform()` is [n], `uniform(3)` is [n, 3].
Any function of this form can be given to `fedda.problem(augment=...)`. Samples for evaluation stay as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .. import rng
from ..checks import POSITIVE, count, number
from ..registry import augmentations
from .trees import first_tensor, map_tensors

__all__ = [
    "AddNoise", "Augmentation", "Compose", "Crop", "Cutout", "Flip", "Uniform", "compose", "crop", "crop_flip",
    "cutout", "flip", "noise",
]  # fmt: skip

Uniform = Callable[..., Tensor]
Augmentation = Callable[[Any, Uniform], Any]


def apply(augmentation: Augmentation, x: Any, key: Tensor) -> Any:
    """Augment batches x [..., batch, *sample], one key [...] for each batch.

    >>> x = torch.arange(12.0).view(1, 2, 1, 2, 3)
    >>> apply(flip(), x, torch.tensor([3])).shape
    torch.Size([1, 2, 1, 2, 3])
    """
    lead, first = key.dim() + 1, first_tensor(x)
    size, device = first.shape[lead - 1], first.device
    keys = rng.fold(rng.fold(key, -rng.AUGMENT)[..., None], torch.arange(size, device=device)).flatten()
    calls = 0

    def uniform(*shape: int) -> Tensor:
        nonlocal calls
        calls += 1
        own = rng.fold(keys, calls)
        if shape:
            own = rng.fold(own[:, None], torch.arange(torch.Size(shape).numel(), device=device)).view(-1, *shape)
        return rng.uniform(own)

    samples = map_tensors(lambda v: v.reshape(-1, *v.shape[lead:]), x)
    changed = augmentation(samples, uniform)
    wanted, got = _kinds(samples), _kinds(changed)
    if got != wanted:
        raise ValueError(f"the augmentation must return samples of the same shape and dtype, {wanted}, got {got}")
    return map_tensors(lambda v: v.view(*first.shape[:lead], *v.shape[1:]), changed)


def _kinds(samples: Any) -> str:
    """The shapes and dtypes of samples, such as "[4, 3] torch.float32"."""
    kinds = tree_map(lambda v: f"{list(v.shape)} {v.dtype}" if isinstance(v, Tensor) else type(v).__name__, samples)
    return str(kinds)


def refuse_all_but_images(owner: str, x: Any) -> None:
    """Refuse samples that are not images."""
    if not isinstance(x, Tensor) or x.dim() != 4:
        got = list(x.shape[1:]) if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(f"{owner}: samples must be images [channels, height, width], got {got}")


@augmentations.register("flip")
@dataclass(frozen=True)
class Flip:
    """Mirror an image left to right, with probability 1/2."""

    def __call__(self, x: Tensor, uniform: Uniform) -> Tensor:
        refuse_all_but_images("flip", x)
        mirrored = uniform() < 0.5
        return torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x)


@augmentations.register("crop")
@dataclass(frozen=True)
class Crop:
    """Shift an image at random; what comes in from outside is 0.

    Args:
        pad: the largest shift in each direction, in pixels.
    """

    pad: int = 4

    def __post_init__(self) -> None:
        count("crop", "pad", self.pad)

    def __call__(self, x: Tensor, uniform: Uniform) -> Tensor:
        refuse_all_but_images("crop", x)
        height, width = x.shape[-2:]
        shift = (uniform(2) * (2 * self.pad + 1)).long() - self.pad
        rows = torch.arange(height, device=x.device) + shift[:, :1]
        columns = torch.arange(width, device=x.device) + shift[:, 1:]
        inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None]
        index = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None]
        index = index.view(len(x), 1, -1).expand(*x.shape[:2], -1)
        moved = x.flatten(-2).gather(-1, index).view(x.shape)
        return moved.masked_fill(~inside[:, None], 0)


@augmentations.register("cutout")
@dataclass(frozen=True)
class Cutout:
    """Set a square at a random position to 0 (DeVries, Taylor 2017); it may reach over the edge.

    Args:
        size: the side of the square, in pixels.
    """

    size: int = 8

    def __post_init__(self) -> None:
        count("cutout", "size", self.size)

    def __call__(self, x: Tensor, uniform: Uniform) -> Tensor:
        refuse_all_but_images("cutout", x)
        centre = uniform(2) * torch.tensor(x.shape[-2:], device=x.device)
        first = centre.long() - self.size // 2
        rows, columns = (torch.arange(n, device=x.device) - first[:, i, None] for i, n in enumerate(x.shape[-2:]))
        hole = ((rows >= 0) & (rows < self.size))[:, :, None] & ((columns >= 0) & (columns < self.size))[:, None]
        return x.masked_fill(hole[:, None], 0)


@augmentations.register("noise")
@dataclass(frozen=True)
class AddNoise:
    """Add normal noise.

    Args:
        std: its deviation, in the units in which the samples are stored (0 to 255 for bytes).
    """

    std: float = 0.1

    def __post_init__(self) -> None:
        number("noise", "std", self.std, POSITIVE)

    def __call__(self, x: Tensor, uniform: Uniform) -> Tensor:
        noise = self.std * rng.box_muller(uniform(*x.shape[1:]), uniform(*x.shape[1:]))
        if x.is_floating_point():
            return x + noise.to(x.dtype)
        return (x + noise).round().clamp(0, 255).to(x.dtype)


@dataclass(frozen=True)
class Compose:
    """One augmentation after the other.

    Args:
        parts: the augmentations, in this order.
    """

    parts: tuple[Augmentation, ...]

    def __call__(self, x: Tensor, uniform: Uniform) -> Tensor:
        for part in self.parts:
            x = part(x, uniform)
        return x


flip, crop, cutout, noise = Flip, Crop, Cutout, AddNoise  # `fedda.augment.crop(4)`


@augmentations.register("crop_flip")
def crop_flip(pad: int = 4) -> Compose:
    """The usual augmentation for small images: `crop(pad)`, then `flip()`.

    Args:
        pad: the largest shift in each direction, in pixels.
    """
    return Compose((Crop(pad), Flip()))


def compose(*parts: Augmentation) -> Compose:
    """One augmentation after the other.

    Args:
        parts: the augmentations, in this order.
    """
    return Compose(parts)


def named(owner: str, augment: Any) -> Augmentation | None:
    """An augmentation from its name, from a table such as {"kind": "crop", "pad": 2}, or from a list of these; a
    function stays as it is.

    >>> named("problem", ["flip", {"kind": "crop", "pad": 2}])
    Compose(parts=(Flip(), Crop(pad=2)))
    """
    if augment is None or callable(augment):
        return augment  # type: ignore[no-any-return]
    if isinstance(augment, list | tuple) and augment:
        parts = [named(owner, part) for part in augment]
        return compose(*(part for part in parts if part is not None))
    table = {"kind": augment} if isinstance(augment, str) else augment
    if not isinstance(table, dict) or not isinstance(table.get("kind"), str):
        raise ValueError(
            f'{owner}: augment must be a name, a table such as {{kind = "crop", pad = 4}}, a list of these, or a '
            f"function, got {augment!r}"
        )
    entry = augmentations.find(table["kind"])
    made: Augmentation = entry(**{key: value for key, value in table.items() if key != "kind"})
    return made


def __dir__() -> list[str]:
    return sorted(__all__)
