"""The ways to compute the gradients of a stack of models, and which one is taken."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...checks import one_of
from .kernels import kernels_for
from .measured import autotune, threads
from .vmap import StackedGradient

if TYPE_CHECKING:
    from ..neural import Batch, Neural, Scale
    from .kernels.operators import Kernels

PRECISIONS = ("float32", "tf32", "bf16")
PATHS = ("kernels", "chain", "traced", "loop")
Path = Callable[[Tensor, "Batch"], Tensor]  # x [points * c, d] and raw batches [c, ...] -> gradients [points * c, d]
FEW = 4  # clients of a measurement: what is faster for some is faster for many


class Paths:
    """The gradients of a stack by the path that was chosen.

    `kernels`: our GPU kernels for convolutional networks; `chain`: known layers written out as batched products;
    `traced`: any module, through vmap, traced into plain operations; `loop`: one model after the other. With `auto`,
    the first of them that fits, or, where convolutions leave it open, the fastest, by a measurement.
    """

    def __init__(self, problem: Neural, path: str, precision: str):
        one_of("Vectorised", "path", path, ("auto", *PATHS))
        one_of("Vectorised", "precision", precision, ("auto", *PRECISIONS))
        self.problem, self.path = problem, path
        cuda = problem.device.type == "cuda" and problem.dtype == torch.float32
        if precision in ("tf32", "bf16") and not cuda:
            raise ValueError(f"Vectorised: precision {precision!r} needs a float32 problem on a CUDA device")
        self.precision = ("tf32" if cuda else "float32") if precision == "auto" else precision
        self.traced = StackedGradient(self.objective)
        self.kernels = None
        if problem.chain is not None and self.precision != "float32":
            sample = tuple(problem.data.x.shape[1:])
            self.kernels = kernels_for(problem.chain, sample, problem.batch_size, self.precision)
        self.ways = self.fitting()
        if path != "auto" and path not in self.ways:
            raise ValueError(f"Vectorised: path {path!r} does not fit this problem; these do: {', '.join(self.ways)}")
        self.chosen = next(iter(self.ways)) if path == "auto" else path

    def fitting(self) -> dict[str, Path]:
        """What fits the model, the likely best first."""
        problem, ways = self.problem, dict[str, Path]()
        if problem.chain is not None:
            if self.kernels is not None:
                ways["kernels"] = partial(self.by_kernels, self.kernels)
            if self.precision != "bf16":
                ways["chain"] = self.by_layers
        return ways | {"traced": self.by_tracing, "loop": self.one_by_one}

    def of(self, clients: int) -> Paths:
        """The same, with its choice, where that is open, made by a measurement on a stack of so many clients. A copy:
        a run keeps its choice whatever later runs choose. What was traced is shared."""
        own = copy.copy(self)
        candidates = self.candidates()
        if len(candidates) > 1:
            problem, n = self.problem, min(clients, FEW)
            x, batch = problem.example(n)
            ways = {name: lambda way=way: self.run(way, x, batch) for name, way in candidates.items()}
            about = (problem.model, n, problem.data.x.shape[1:], problem.batch_size, problem.dtype, self.precision)
            # Where others use the machine, threads wait for each other, and such times say nothing of the paths.
            with threads(1):
                own.chosen = autotune(ways, problem.device, *about)
        return own

    def candidates(self) -> dict[str, Path]:
        """What `auto` measures. Beside kernels or, on a CPU, the chain, vmap's grouped convolutions have always lost,
        and tracing them takes seconds."""
        if self.path != "auto" or not convolutional(self.problem.model):
            return {self.chosen: self.ways[self.chosen]}
        out: tuple[str, ...] = ()
        if "kernels" in self.ways:
            out = ("traced", "loop")
        elif "chain" in self.ways and self.problem.device.type == "cpu":
            out = ("traced",)
        return {name: way for name, way in self.ways.items() if name not in out}

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        return self.run(self.ways[self.chosen], x, batch)

    def run(self, way: Path, x: Tensor, batch: Batch) -> Tensor:
        if x.is_cpu:
            return way(x, batch)
        with tensor_cores(self.precision != "float32"):
            return way(x, batch)

    def objective(self, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.precision == "bf16"):
            return self.problem.objective(x, inputs, targets)

    def by_kernels(self, kernels: Kernels, x: Tensor, batch: Batch) -> Tensor:
        scale = self.problem.scale
        channels = scale and by_channel(scale, batch.x.shape[2])
        if scale is not None and channels is None:
            batch = self.problem.ready(batch)
        return kernels(x, *batch, channels)

    def by_layers(self, x: Tensor, batch: Batch) -> Tensor:
        assert self.problem.chain is not None
        return self.problem.chain.gradients(x, *self.problem.ready(batch))

    def by_tracing(self, x: Tensor, batch: Batch) -> Tensor:
        return self.traced(x, *self.repeated(x, batch))

    def one_by_one(self, x: Tensor, batch: Batch) -> Tensor:
        return self.traced.loop(x, *self.repeated(x, batch))

    def repeated(self, x: Tensor, batch: Batch) -> list[Tensor]:
        """The batches once for each point."""
        points = len(x) // len(batch.x)
        return [v.expand(points, *v.shape).flatten(0, 1) for v in self.problem.ready(batch)]


def by_channel(scale: Scale, channels: int) -> tuple[Tensor, Tensor] | None:
    """Mean and deviation of each channel, where they are no images themselves."""
    if any(v.dim() > 3 or math.prod(v.shape[-2:]) != 1 for v in scale):
        return None
    mean, std = (v.expand(channels, 1, 1).reshape(channels) for v in scale)
    return mean, std


def convolutional(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())


@contextmanager
def tensor_cores(allowed: bool) -> Iterator[None]:
    """Whether float32 products may round to TF32: its relative error of 1e-3 drowns the small differences that variance
    reduction takes, so the truth never does."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
