"""Models for data of a given shape and number of classes, each with its loss."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary

from ..checks import count, one_of
from ..registry import models

Model = tuple[nn.Module, Callable[..., Tensor]]
NUMBERS = 0  # instead of a number of classes: the targets are numbers, for regression


@models.register("logistic")
def logistic(shape: tuple[int, ...], classes: int) -> Model:
    """Logistic regression: one logit for two classes, otherwise one per class."""
    features = math.prod(shape)
    if classes == NUMBERS:
        return nn.Sequential(nn.Flatten(), nn.Linear(features, 1), nn.Flatten(0)), F.mse_loss
    if classes == 2:
        return nn.Sequential(nn.Flatten(), nn.Linear(features, 1), nn.Flatten(0)), binary_cross_entropy
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes)), cross_entropy


@models.register("mlp")
def mlp(shape: tuple[int, ...], classes: int, hidden: Any = (32,)) -> Model:
    """A multi-layer perceptron with ReLU.

    Args:
        shape: the shape of a sample.
        classes: how many.
        hidden: the widths of its hidden layers, one number or a list.
    """
    inner = [hidden] if isinstance(hidden, int) else hidden
    if not isinstance(inner, list | tuple):
        raise ValueError(f"mlp: hidden must be a whole number >= 1, or a list of them, got {hidden!r}")
    for width in inner:
        count("mlp", "hidden", width)
    widths = [math.prod(shape), *inner]
    layers: list[nn.Module] = [nn.Flatten()]
    for i, o in pairwise(widths):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return _with_head(layers, widths[-1], classes)


@models.register("cnn")
def cnn(
    shape: tuple[int, ...], classes: int, filters: int = 64, layers: int = 4, norm: str = "none", pool: str = "max"
) -> Model:
    """The paper's network: `layers` times (3x3 convolution, ReLU, 2x2 max-pool), then linear.

    There is no pool or stride once the image has only one pixel (small images only).

    Args:
        shape: the shape of a sample.
        classes: how many.
        filters: channels of each convolution.
        layers: how many convolutions.
        norm: "none", or "batch": a BatchNorm follows each ReLU.
        pool: "max", or "stride": the convolutions have stride 2, and there is no pool.
    """
    one_of("cnn", "norm", norm, ("none", "batch"))
    one_of("cnn", "pool", pool, ("max", "stride"))
    if len(shape) != 3:
        raise ValueError(f"cnn: the data must be images [channels, height, width], got samples of shape {list(shape)}")
    channels, height, width = shape
    body: list[nn.Module] = []
    for _ in range(layers):
        shrinks = min(height, width) > 1
        stride = 2 if shrinks and pool == "stride" else 1
        body += [nn.Conv2d(channels, filters, 3, stride, padding=1), nn.ReLU()]
        channels = filters
        if norm == "batch":
            body.append(nn.BatchNorm2d(filters))
        if stride == 2:
            height, width = (height + 1) // 2, (width + 1) // 2
        elif shrinks:
            body.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
    return _with_head([*body, nn.Flatten()], filters * height * width, classes)


@models.register("resnet8")
def resnet8(shape: tuple[int, ...], classes: int, width: int = 16, groups: int = 8) -> Model:
    """A small residual network with GroupNorm: a 3x3 convolution, three blocks of two with `width`, 2 and 4 times
    `width` channels, a mean over the pixels, then linear. It keeps no statistics, so clients have none to average.

    Args:
        shape: the shape of a sample.
        classes: how many.
        width: channels of the first block.
        groups: of each GroupNorm; they divide the width.
    """
    count("resnet8", "width", width)
    count("resnet8", "groups", groups)
    if len(shape) != 3:
        raise ValueError(f"resnet8: the data must be images [channels, height, width], got samples of {list(shape)}")
    if width % groups:
        raise ValueError(f"resnet8: width must be a multiple of groups, got {width} and {groups}")
    body: list[nn.Module] = [
        nn.Conv2d(shape[0], width, 3, padding=1, bias=False), nn.GroupNorm(groups, width), nn.ReLU(),
        ResidualBlock(width, width, 1, groups), ResidualBlock(width, 2 * width, 2, groups),
        ResidualBlock(2 * width, 4 * width, 2, groups), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    ]  # fmt: skip
    return _with_head(body, 4 * width, classes)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm beside a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, channels: int, width: int, stride: int, groups: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False), nn.GroupNorm(groups, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(groups, width),
        )  # fmt: skip
        same = channels == width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _with_head(layers: list[nn.Module], features: int, classes: int) -> Model:
    """The layers and a linear one: a logit for each class, or one number for regression."""
    if classes == NUMBERS:
        return nn.Sequential(*layers, nn.Linear(features, 1), nn.Flatten(0)), F.mse_loss
    return nn.Sequential(*layers, nn.Linear(features, classes)), cross_entropy


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits and classes: F.cross_entropy without its ignored class, which would be a third of the
    operations in a step of a small model."""
    if has_torch_function_unary(output):  # a mode may compute it in another way
        return handle_torch_function(cross_entropy, (output,), output, target)
    return -output.log_softmax(dim=-1).gather(-1, target[..., None]).mean()


def binary_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of one logit and a class 0 or 1."""
    return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))
