"""Gradients and outputs of a stack of models by C code, on a CPU: chains of convolutions, max-pools, linear layers.

The code (`layers.c`) takes one model and as many samples as a vector of the processor holds, and passes them forward
and back through all layers: they stay in the cache. It is compiled on first use, if there is a C compiler.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .....c_code import WRITERS, library, pool
from .....recording import is_recording
from ..convolution import Convolution
from ..losses import LossGradient, class_gradient, logit_gradient, square_gradient
from ..pooling import Pool
from ..stages import Image, LinearStage, Relu, Stage
from ..winograd import Winograd

SOURCE = Path(__file__).with_name("layers.c").read_text(encoding="utf-8")
TYPES = {
    torch.float32: ("-DT=float", "-DINTEGER=int32_t", "-DEXP=expf"),
    torch.float64: ("-DT=double", "-DINTEGER=int64_t", "-DEXP=exp"),
}
CONVOLUTION, LINEAR, POOL, COPY = range(4)
LOSSES = (class_gradient, logit_gradient, square_gradient)
ARGUMENTS = {"p": ctypes.c_void_p, "n": ctypes.c_int64}
SIGNATURES = {"gradients": "pnpnnnpnnnnnpnppp", "outputs": "pnpnpnnnnpnpp"}  # pointers and numbers
CHAINS: WeakValueDictionary[int, NativeChain] = WeakValueDictionary()  # those in recorded rounds
THREAD_WORK = 20_000_000  # products below which a second thread costs more than it saves
Pair = tuple[int, int]
Position = tuple[int, int, int, int]  # in memory: of the first pixel; from one channel, row and column to the next
NOWHERE = (0, 0, 0, 0)

operators = torch.library.Library("fedda", "FRAGMENT")  # see kernels/operators.py
operators.define("native_gradients(Tensor x, Tensor inputs, Tensor targets, int chain) -> Tensor")


@torch.library.impl(operators, "native_gradients", "CompositeExplicitAutograd")
def native_gradients(x: Tensor, inputs: Tensor, targets: Tensor, chain: int) -> Tensor:
    return CHAINS[chain].gradients(x, inputs, targets)


def write_gradients(out: Tensor, x: Tensor, inputs: Tensor, targets: Tensor, chain: int) -> Callable[[], None] | None:
    """See `WRITERS`."""
    native = CHAINS[chain]
    return native.bound(x, inputs, targets, out) if native.fits(x, inputs, targets) else None


WRITERS[torch.ops.fedda.native_gradients.default] = write_gradients


class Layer(NamedTuple):
    """One step: `inside` and `outside` are the shapes of its input and output."""

    kind: int
    inside: Image
    outside: Image
    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)  # left, right, top, bottom
    weight: int = 0  # positions in the parameters
    bias: int = -1
    relu: bool = False

    @property
    def products(self) -> int:
        """Multiplications for one sample."""
        if self.kind not in (CONVOLUTION, LINEAR):
            return 0
        return math.prod(self.outside) * self.inside[0] * math.prod(self.kernel)


def native_layers(stages: Sequence[Stage], sample: tuple[int, ...]) -> list[Layer] | None:
    """The steps of a chain, or None if one of them is not known here."""
    shape: Image = (sample[0], sample[1], sample[2]) if len(sample) == 3 else (math.prod(sample), 1, 1)
    layers: list[Layer] = []
    for stage in stages:
        if isinstance(stage, LinearStage):
            if layers and layers[-1].kind == CONVOLUTION:  # its gradient has a border
                layers.append(Layer(COPY, shape, shape, relu=layers[-1].relu))
            inside, outside = (math.prod(shape), 1, 1), (stage.weight.shape[0], 1, 1)
            layers.append(Layer(LINEAR, inside, outside, **positions(stage), relu=stage.relu))
        elif isinstance(stage, Convolution | Winograd):
            (kh, kw), (left, right, top, bottom) = stage.kernel, stage.padding
            if stage.norm is not None or max(left, right) >= kw or max(top, bottom) >= kh:
                return None
            (sh, sw), (ph, pw), relu = stage.stride, stage.pool, stage.relu
            rows, columns = (shape[1] + top + bottom - kh) // sh + 1, (shape[2] + left + right - kw) // sw + 1
            outside = (stage.weight.shape[0], rows, columns)
            form = ((kh, kw), (sh, sw), stage.padding)
            layers.append(Layer(CONVOLUTION, shape, outside, *form, **positions(stage), relu=relu))
            if (ph, pw) != (1, 1):
                pooled = (outside[0], rows // ph, columns // pw)
                layers.append(Layer(POOL, outside, pooled, (ph, pw), (ph, pw), relu=relu))
        elif isinstance(stage, Pool):
            pooled = (shape[0], shape[1] // stage.kernel[0], shape[2] // stage.kernel[1])
            layers.append(Layer(POOL, shape, pooled, stage.kernel, stage.kernel))
        elif isinstance(stage, Relu):
            layers.append(Layer(COPY, shape, shape, relu=True))
        else:  # Flatten and Squeeze move no numbers
            continue
        shape = layers[-1].outside
    return layers if math.prod(shape[1:]) == 1 else None


def positions(stage: LinearStage | Convolution | Winograd) -> dict[str, Any]:
    """Those of weight and bias in the parameters."""
    return {"weight": stage.weight.first, "bias": -1 if stage.bias is None else stage.bias.first}


class MemoryPlan:
    """Where every value and gradient of a list of layers is in memory, as the arguments of the C code."""

    def __init__(self, layers: Sequence[Layer], lanes: int):
        self.size = 0  # of the memory, in vectors
        first = next(i for i, layer in enumerate(layers) if layer.kind in (CONVOLUTION, LINEAR))
        before = [layers[0].inside, *(layer.outside for layer in layers)]
        paddings = [*(layer.padding for layer in layers), (0, 0, 0, 0)]
        values = [self.value(shape, padding) for shape, padding in zip(before, paddings, strict=True)]
        # No gradient is needed before the first weights.
        gradients = [NOWHERE if i < first else self.gradient(layer) for i, layer in enumerate(layers)]
        rows, self.offsets = list[list[int]](), list[int]()
        for i, layer in enumerate(layers):
            of_input = gradients[i - 1] if i > first else NOWHERE
            view = values[i]
            if layer.kind == LINEAR:  # features in one row
                view, of_input = (view[0], 1, 1, 1), (of_input[0], 1, 1, 1)
            samples = self.take(lanes * math.ceil(layer.inside[0] / lanes)) if layer.kind == LINEAR else 0
            flags = [layer.relu and layer.kind != POOL, i > 0 and layers[i - 1].relu, i > first]
            rows.append([
                layer.kind, *layer.inside, *layer.outside, *layer.kernel, *layer.stride, layer.weight, layer.bias,
                *map(int, flags), *view, *values[i + 1], *of_input, *gradients[i],
                self.spread(layer, gradients[i]), samples, int(i == 0), *self.tables(layer, view),
            ])  # fmt: skip
        # Kept here, because the code gets addresses.
        self.arrays = torch.tensor(rows), torch.tensor(self.offsets or [0])
        self.arguments = (self.arrays[0].data_ptr(), len(rows), self.arrays[1].data_ptr())

    def take(self, vectors: int) -> int:
        self.size += vectors
        return self.size - vectors

    def value(self, shape: Image, padding: tuple[int, int, int, int]) -> Position:
        """Memory for an image with a border."""
        (channels, height, width), (left, right, top, bottom) = shape, padding
        row = width + left + right
        channel = row * (height + top + bottom)
        return self.take(channels * channel) + top * row + left, channel, row, 1

    def gradient(self, layer: Layer) -> Position:
        """Memory for the gradient of a layer's output. For a convolution it has a border, and zeros between the pixels
        if the stride is not 1: the gradient of the input is then a convolution of it, with stride 1."""
        channels, height, width = layer.outside
        if layer.kind != CONVOLUTION:
            return self.take(channels * height * width), height * width, width, 1
        (kh, kw), (sh, sw), (left, _, top, _) = layer.kernel, layer.stride, layer.padding
        row = layer.inside[2] + kw - 1
        channel = row * (layer.inside[1] + kh - 1)
        return self.take(channels * channel) + (kh - 1 - top) * row + kw - 1 - left, channel, row * sh, sw

    @staticmethod
    def spread(layer: Layer, gradient: Position) -> int:
        """The start of a gradient's border."""
        (kh, kw), (left, _, top, _) = layer.kernel, layer.padding
        row = layer.inside[2] + kw - 1
        return gradient[0] - (kh - 1 - top) * row - (kw - 1 - left) if layer.kind == CONVOLUTION else gradient[0]

    def tables(self, layer: Layer, view: Position) -> list[int]:
        """Where the offsets of a convolution begin: from a pixel to the places of the kernel, in the input and in the
        gradient of the output, and to all places and channels of the input."""
        (kh, kw), (left, _, top, _) = layer.kernel, layer.padding
        starts = [len(self.offsets)] * 3
        if layer.kind == CONVOLUTION:
            places = [(i, j) for i in range(kh) for j in range(kw)]
            inner = [(i - top) * view[2] + j - left for i, j in places]
            row = layer.inside[2] + kw - 1
            starts[1:] = starts[0] + len(places), starts[0] + 2 * len(places)
            self.offsets += [*inner, *((kh - 1 - i) * row + kw - 1 - j for i, j in places)]
            self.offsets += [c * view[1] + k for c in range(layer.inside[0]) for k in inner]
        return starts


class NativeChain:
    """The gradients and outputs of a chain; made by `native_chain`."""

    def __init__(self, code: ctypes.CDLL, layers: Sequence[Layer], loss: LossGradient, dtype: torch.dtype):
        self.code, self.loss, self.dtype = code, LOSSES.index(loss), dtype
        self.classes = loss is class_gradient
        for function, arguments in SIGNATURES.items():
            getattr(code, function).argtypes = [ARGUMENTS[kind] for kind in arguments]
        self.lanes: int = code.lanes()
        self.plan = MemoryPlan(layers, self.lanes)
        self.features, self.width = math.prod(layers[0].inside), layers[-1].outside[0]
        self.products = sum(layer.products for layer in layers)
        self.free: list[Tensor] = []  # memory that no thread uses

    def gradients(self, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """The gradients [g, d] at x [g, d]; member i of the stack uses batch i % n of inputs [n, batch, ...]."""
        if is_recording():
            CHAINS[id(self)] = self
            return torch.ops.fedda.native_gradients(x, inputs, targets, id(self))  # type: ignore[no-any-return]
        out = torch.empty(x.shape, dtype=self.dtype)
        targets = targets if self.classes else targets.to(self.dtype)
        self.bound(self.rows(x), inputs.to(self.dtype).contiguous(), targets.contiguous(), out)()
        return out

    def bound(self, x: Tensor, inputs: Tensor, targets: Tensor, out: Tensor) -> Callable[[], None]:
        """A function that writes the gradients to `out`, from the numbers that the arguments hold at each call."""
        (g, d), (n, batch, *_) = x.shape, inputs.shape
        model = addresses(*self.plan.arguments, self.loss, self.features, d)
        arrays = addresses(n, batch, g, x, x.stride(0), inputs, targets, out)
        work = 3 * g * batch * self.products

        def part(memory: Tensor, first: int, end: int, held: object = (x, inputs, targets, out)) -> None:
            self.code.gradients(*model, memory.data_ptr(), first, end, *arrays)  # addresses of what is held

        return lambda: self.divide(part, n, 1, work)

    def fits(self, x: Tensor, inputs: Tensor, targets: Tensor) -> bool:
        """Whether `bound` takes these arguments as they are."""
        plain = inputs.is_contiguous() and targets.is_contiguous() and x.stride(1) == 1
        others = (x, inputs) if self.classes else (x, inputs, targets)
        return plain and all(v.dtype == self.dtype for v in others)

    def outputs(self, x: Tensor, inputs: Tensor) -> Tensor:
        """The outputs [g, samples, classes] at x [g, d] for inputs [samples, ...] that all members share; [g, samples]
        if they are numbers."""
        (g, _), samples = x.shape, len(inputs)
        x, inputs = self.rows(x), inputs.to(self.dtype).contiguous()
        out = torch.empty(g, samples, self.width, dtype=self.dtype)
        arrays = (x, x.stride(0), inputs, out)

        def part(memory: Tensor, first: int, end: int) -> None:
            model = (*self.plan.arguments, self.features)
            self.code.outputs(*addresses(*model, memory, first, end, samples, g, *arrays))

        self.divide(part, samples, self.lanes, g * samples * self.products)
        return out if self.classes else out.squeeze(-1)

    def divide(self, part: Callable[[Tensor, int, int], None], n: int, unit: int, work: int) -> None:
        """Run `part` for all of 0..n-1, on PyTorch's number of threads if there is much to do. The numbers are the same
        for any number of threads.

        If the user interrupts it, other threads are still at work: they hold all tensors that they use, and give their
        memory back themselves."""
        threads = max(1, min(torch.get_num_threads(), work // THREAD_WORK, math.ceil(n / unit)))
        size = max(1, math.ceil(n / threads / unit)) * unit

        def run(first: int, memory: Tensor) -> None:
            part(memory, first, min(first + size, n))
            self.free.append(memory)

        starts = range(0, n, size)
        memories = [self.memory() for _ in starts]
        if len(starts) <= 1:
            for first, memory in zip(starts, memories, strict=True):
                run(first, memory)
        else:
            list(pool().map(run, starts, memories))

    def rows(self, x: Tensor) -> Tensor:
        """x with numbers side by side in each row; rows may be the same."""
        x = x.to(self.dtype)
        return x if x.stride(1) == 1 else x.contiguous()

    def memory(self) -> Tensor:
        """For one thread. Its borders are zeros, which the code never writes."""
        try:
            return self.free.pop()
        except IndexError:
            return torch.zeros(self.plan.size * self.lanes, dtype=self.dtype)


def addresses(*arguments: int | Tensor) -> list[int]:
    """The arguments of a C function: a tensor is the address of its numbers."""
    return [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]


def native_chain(
    stages: Sequence[Stage], loss: LossGradient, sample: tuple[int, ...], dtype: torch.dtype
) -> NativeChain | None:
    """The C code for a chain; None if it has a layer that is not known here, or if there is no C compiler."""
    layers = native_layers(stages, sample) if dtype in TYPES else None
    code = library(SOURCE, *TYPES[dtype]) if layers else None
    complete = all(hasattr(code, function) for function in ("lanes", *SIGNATURES))  # not if CC hides functions
    return NativeChain(code, layers, loss, dtype) if layers and code and complete else None
