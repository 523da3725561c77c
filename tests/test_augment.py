"""Augmentations do what they say, by numbers that depend on the key and the sample alone."""

import pytest
import torch
from torch.nn import functional as F

from fedda.problems import augment

KEYS = torch.arange(6).view(2, 3) * 7919


def images(dtype=torch.uint8):
    torch.manual_seed(0)
    return torch.randint(1, 256, (2, 3, 50, 2, 9, 7)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
@pytest.mark.parametrize(
    "make", [augment.flip, augment.crop, augment.crop_flip, augment.cutout, lambda: augment.noise(20.0)]
)
def test_a_batch_alone_is_augmented_as_in_a_stack(make, dtype):
    x, change = images(dtype), make()
    together = augment.apply(change, x, KEYS)
    assert together.dtype == dtype and not torch.equal(together, x)
    assert torch.equal(together, augment.apply(change, x, KEYS))
    for i in range(2):
        for j in range(3):
            assert torch.equal(augment.apply(change, x[i, j], KEYS[i, j]), together[i, j])
    assert not torch.equal(augment.apply(change, x, KEYS + 1), together)


def test_half_of_the_images_are_mirrored():
    x = images()
    changed = augment.apply(augment.flip(), x, KEYS)
    same, mirrored = (changed == x).flatten(3).all(-1), (changed == x.flip(-1)).flatten(3).all(-1)
    assert bool((same ^ mirrored).all()) and 110 < mirrored.sum() < 190


def test_crops_are_windows_of_the_padded_image():
    x = images()[0, 0]
    padded = F.pad(x, (2, 2, 2, 2))
    windows = torch.stack([padded[..., i : i + 9, j : j + 7] for i in range(5) for j in range(5)])
    changed = augment.apply(augment.crop(2), x, KEYS[0, 0])
    hit = (windows == changed).flatten(2).all(-1)
    assert bool(hit.any(0).all()) and hit.any(1).sum() > 15  # many of the 25 positions occur


def test_cutout_makes_one_square_hole():
    x = images()[0, 0]
    hole = (augment.apply(augment.cutout(4), x, KEYS[0, 0]) == 0).all(1)
    assert torch.equal(
        augment.apply(augment.cutout(4), x, KEYS[0, 0]).masked_fill(hole[:, None], 7), x.masked_fill(hole[:, None], 7)
    )
    sizes = [(int(h.any(1).sum()), int(h.any(0).sum())) for h in hole]
    assert all(int(h.sum()) == a * b for h, (a, b) in zip(hole, sizes, strict=True)) and (4, 4) in sizes
    assert all(2 <= a <= 4 and 2 <= b <= 4 for a, b in sizes)


def test_noise_has_its_deviation():
    x = torch.zeros(40, 1, 50, 50, dtype=torch.float64)
    changed = augment.apply(augment.noise(0.3), x, KEYS[0, 0])
    assert abs(changed.std() - 0.3) < 0.005 and abs(changed.mean()) < 0.005


def test_a_function_of_ones_own_must_keep_shape_and_dtype():
    assert torch.equal(augment.apply(lambda x, uniform: x * 2, torch.ones(4, 3), KEYS[0, 0]), torch.full((4, 3), 2.0))
    with pytest.raises(ValueError, match="must return samples of the same shape and dtype"):
        augment.apply(lambda x, uniform: x[:, :2], torch.ones(4, 3), KEYS[0, 0])
    with pytest.raises(ValueError, match="pad must be a whole number >= 1"):
        augment.crop(0)
