"""From a model to the stages of a chain, if all its layers are known.

The types must match exactly, every parameter must be trained and used once, in order, and there must be no hooks.
"""

import torch
from torch import Tensor, nn

from .convolution import Convolution
from .pooling import Pool
from .stages import Flatten, Image, LinearStage, Norm, ParameterView, Relu, Squeeze, Stage
from .trace import LAYERS, layers_of
from .winograd import Winograd

WINOGRAD_CHANNELS = 8  # with fewer channels, Winograd's transforms cost more than they save


def build_stages(model: nn.Module, sample: tuple[int, ...], norms: bool = False) -> list[Stage] | None:
    """The stages of a model for samples of this shape, or None if it is not a chain of known layers. With `norms`, a
    BatchNorm between the ReLU of a convolution and a pool is known."""
    layers, parameters = _layers(model, sample), list(model.parameters())
    if layers is None or not parameters or not all(p.requires_grad for p in parameters):
        return None
    builder = _Builder([layer for layer in layers if type(layer) not in (nn.Identity, nn.Dropout)], sample, norms)
    stages = builder.build()
    # The lists differ if a parameter is shared, or if no known layer uses it.
    return stages if [id(p) for p in builder.parameters] == [id(p) for p in parameters] else None


def _layers(model: nn.Module, sample: tuple[int, ...]) -> list[nn.Module] | None:
    """The layers of nested nn.Sequential, or of a module with a `forward` of its own, in order."""
    for module in model.modules():
        hooks = any(vars(module)[name] for name in vars(module) if name.endswith("_hooks"))
        if hooks or "forward" in vars(module) or (type(module) is nn.Dropout and module.training):
            return None
    layers = _sequence(model)
    if any(type(layer) not in LAYERS for layer in layers):
        return layers_of(model, sample)
    return layers


def _sequence(model: nn.Module) -> list[nn.Module]:
    return [layer for part in model for layer in _sequence(part)] if type(model) is nn.Sequential else [model]


class _Builder:
    """Takes layers from the front of a list; a stage includes the ReLU and the pool that follow it."""

    def __init__(self, layers: list[nn.Module], sample: tuple[int, ...], norms: bool):
        self.layers, self.shape, self.norms, self.parameters = layers, sample, norms, list[Tensor]()

    def build(self) -> list[Stage] | None:
        stages: list[Stage] = []
        while self.layers:
            layer = self.layers.pop(0)
            if type(layer) is nn.Flatten and len(self.shape) == 1 and (layer.start_dim, layer.end_dim) == (1, -1):
                continue
            stage = self.stage(layer)
            if stage is None or 0 in stage.shape:
                return None
            stages.append(stage)
            self.shape = stage.shape
        return stages

    def stage(self, layer: nn.Module) -> Stage | None:
        if type(layer) is nn.Flatten:
            dims = (layer.start_dim, layer.end_dim)
            if dims == (0, -1) and self.shape == (1,):  # after the last layer: one number per sample
                return Squeeze()
            return Flatten(self.shape) if dims == (1, -1) else None
        if type(layer) is nn.ReLU:
            return Relu(self.shape) if len(self.shape) in (1, 3) else None
        if type(layer) is nn.Linear and self.shape == (layer.in_features,):
            return LinearStage(*self.parameter_views(layer), self.takes_relu())
        if len(self.shape) != 3:
            return None
        if type(layer) is nn.MaxPool2d and (kernel := known_pool(layer)):
            return Pool(self.image, kernel)
        if type(layer) is nn.Conv2d and layer.in_channels == self.shape[0] and (padding := known_padding(layer)):
            return self.convolution(layer, padding)
        return None

    def convolution(self, layer: nn.Conv2d, padding: tuple[int, int, int, int]) -> Stage:
        weight, bias = self.parameter_views(layer)
        relu, pool = self.takes_relu(), (1, 1)
        norm = self.takes_norm() if self.norms and relu else None
        if self.layers and type(self.layers[0]) is nn.MaxPool2d and (kernel := known_pool(self.layers[0])):
            self.layers.pop(0)
            pool, relu = kernel, (norm is None and self.takes_relu()) or relu
        kernel, stride = _pair(layer.kernel_size), _pair(layer.stride)
        same = (kernel, stride, padding) == ((3, 3), (1, 1), (1, 1, 1, 1))
        if same and pool == (2, 2) and layer.in_channels >= WINOGRAD_CHANNELS:
            stage: Stage = Winograd(weight, bias, self.image, relu)
        else:
            stage = Convolution(weight, bias, self.image, stride, padding, pool, relu)
        stage.norm = norm
        return stage

    @property
    def image(self) -> Image:
        return (self.shape[0], self.shape[1], self.shape[2])

    def takes_relu(self) -> bool:
        taken = bool(self.layers) and type(self.layers[0]) is nn.ReLU
        if taken:
            self.layers.pop(0)
        return taken

    def takes_norm(self) -> Norm | None:
        layer = self.layers[0] if self.layers else None
        if type(layer) is not nn.BatchNorm2d or not (layer.training and layer.track_running_stats and layer.affine):
            return None
        self.layers.pop(0)
        weight, bias = self.parameter_views(layer)
        assert bias is not None
        return Norm(weight, bias, layer.eps)

    def parameter_views(
        self, layer: nn.Linear | nn.Conv2d | nn.BatchNorm2d
    ) -> tuple[ParameterView, ParameterView | None]:
        """The positions of a layer's weight and bias in the flat vector."""
        views: list[ParameterView] = []
        for parameter in (layer.weight, *([] if layer.bias is None else [layer.bias])):
            first = sum(p.numel() for p in self.parameters)
            strides = torch.empty(parameter.shape, device="meta").stride()
            views.append(ParameterView(first, parameter.shape, strides))
            self.parameters.append(parameter)
        return views[0], views[1] if layer.bias is not None else None


def known_pool(layer: nn.MaxPool2d) -> tuple[int, int] | None:
    """The kernel of a plain pool whose windows do not overlap, or None."""
    kernel, stride = _pair(layer.kernel_size), _pair(layer.stride)
    plain = _pair(layer.padding) == (0, 0) and _pair(layer.dilation) == (1, 1)
    return kernel if kernel == stride and plain and not layer.ceil_mode and not layer.return_indices else None


def known_padding(layer: nn.Conv2d) -> tuple[int, int, int, int] | None:
    """Zeros to the left, right, top and bottom of a plain convolution, or None."""
    if layer.groups != 1 or layer.dilation != (1, 1) or layer.padding_mode != "zeros":
        return None
    (kh, kw), padding = layer.kernel_size, layer.padding
    if padding == "same":  # torch puts the odd zero of an even kernel on the right
        return ((kw - 1) // 2, kw // 2, (kh - 1) // 2, kh // 2)
    rows, columns = (0, 0) if isinstance(padding, str) else padding
    return (columns, columns, rows, rows)


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
