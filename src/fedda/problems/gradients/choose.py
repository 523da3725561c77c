"""The paths to compute the gradients of a stack of models, and the choice of one of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from ...checks import one_of, warn
from ..evaluation import convolutional
from .kernels import kernels_for
from .stackable import CONVOLUTIONAL, has_kernels
from .tuning import STACK, autotune, replayed, threads
from .vmap import StackedGradient

if TYPE_CHECKING:
    from ..neural import Batch, Neural, Scale
    from .chain import Chain
    from .chain.native import NativeChain
    from .kernels.operators import Kernels

PRECISIONS = ("float32", "tf32", "bf16")
PATHS = ("kernels", "native", "chain", "traced", "layers", "layers-last", "loop")
Path = Callable[[Tensor, "Batch"], Tensor]  # x [points * c, d] and raw batches [c, ...] -> gradients [points * c, d]
SMALL = 1_000_000  # numbers in a stack of linear layers whose path needs no measurement
# The relative error of a gradient by `layers` that lets it take part in a measurement: more must be a mistake.
TOLERANCES = {"float32": 1e-3, "tf32": 2e-2, "bf16": 0.1}
MEASURED_CLIENTS = 4  # at least, in a measurement, and exactly so many with convolutions, which take long


class GradientPaths:
    """The gradients of a stack of models by one of several paths.

    `kernels`: our GPU kernels for convolutional networks; `native`: C code for known layers, on a CPU; `chain`: known
    layers as batched products; `traced`: any module through vmap, recorded as plain operations; `layers`: the same with
    our GPU kernels for attention, convolutions, embeddings, linear and recurrent layers, norms and losses;
    `layers-last`: `layers`, but the channels of a pixel lie side by side; `loop`: one model after the other. `auto`
    takes the first that fits for small stacks of linear layers, and otherwise the fastest of the paths that fit, by
    measurement.
    """

    def __init__(self, problem: Neural, path: str, precision: str):
        one_of("Vectorised", "path", path, ("auto", *PATHS))
        one_of("Vectorised", "precision", precision, ("auto", *PRECISIONS))
        self.problem, self.path = problem, path
        cuda = problem.device.type == "cuda" and problem.dtype == torch.float32
        if precision in ("tf32", "bf16") and not cuda:
            raise ValueError(f"Vectorised: precision {precision!r} needs a float32 problem on a CUDA device")
        self.precision = ("tf32" if cuda else "float32") if precision == "auto" else precision
        frozen = not all(p.requires_grad for p in problem.model.parameters())
        self.stacked = StackedGradient(self.objective, frozen)
        self.kernels: Kernels | None = None
        self.paths: dict[str, Path] = {}  # those that fit the model, the likely fastest first
        chain = problem.chain
        if self.precision != "float32":
            if chain is None and problem.batch_norms.layers:
                chain = problem.known_chain(norms=True)
            if chain is not None:
                shape = tuple(problem.data.x.shape[1:])
                self.kernels = kernels_for(chain, shape, problem.batch_size, self.precision)
            if self.kernels is not None:
                self.paths["kernels"] = partial(self.by_kernels, self.kernels)
        if problem.chain is not None and self.precision != "bf16":
            if problem.device.type == "cpu" and (native := problem.chain.native(problem.dtype)) is not None:
                self.paths["native"] = partial(self.by_chain, native)
            self.paths["chain"] = partial(self.by_chain, problem.chain)
        self.paths["traced"] = partial(self.by_vmap, self.stacked)
        if cuda and find_spec("triton") is not None and has_kernels(problem.model):
            layers = StackedGradient(self.objective, frozen, self.precision)
            self.paths["layers"] = partial(self.by_vmap, layers)
            if has_kernels(problem.model, CONVOLUTIONAL):
                last = StackedGradient(self.objective, frozen, self.precision, last=True)
                self.paths["layers-last"] = partial(self.by_vmap, last)
        self.paths["loop"] = self.by_loop
        if path != "auto" and path not in self.paths:
            raise ValueError(f"Vectorised: path {path!r} does not fit this problem; these do: {', '.join(self.paths)}")
        self.accepted: set[Path] = set()  # paths whose gradients were compared with those of the loop
        self.chosen = next(iter(self.paths)) if path == "auto" else path
        self.choice = ""  # how the path was chosen, for the user, if it was measured

    def tuned(self, clients: int) -> GradientPaths:
        """A copy whose choice, if it is open, is made by a measurement on a stack of `clients`. A run keeps its choice,
        whatever later runs choose. The recorded operations are shared."""
        tuned = copy.copy(self)
        candidates = self.candidates(clients)
        if len(candidates) > 1:
            problem = self.problem
            many = 0 if convolutional(problem.model) else STACK // problem.d
            n = min(clients, max(MEASURED_CLIENTS, many))
            x, batch = problem.example(n)
            ways = {}
            for name, path in candidates.items():
                run = partial(self.checked, name) if name.startswith("layers") else self.run
                ways[name] = replayed(partial(run, path, x, batch), problem.device)
            shape = tree_map(lambda v: v.shape[1:], problem.data.x)
            about = (problem.model, n, shape, problem.batch_size, problem.dtype, self.precision)
            # On a busy machine threads wait for each other, and the times would say nothing about the paths.
            with threads(1):
                tuned.chosen = autotune(ways, problem.device, *about)
            slower = " and ".join(name for name in ways if name != tuned.chosen)
            tuned.choice = f"gradients take the path {tuned.chosen}, as measured here against {slower}"
        return tuned

    def candidates(self, clients: int) -> dict[str, Path]:
        """The paths that `auto` measures for a stack of `clients`; on a CPU the loop is the first, so that a path that
        is hardly faster does not replace it. A small stack of linear layers has always been the fastest as a chain.
        Next to kernels or, on a CPU, a chain, vmap has always been slower, and recording it takes seconds. C code has
        always been faster than its chain."""
        cpu = self.problem.device.type == "cpu"
        linear = self.chosen in ("native", "chain") and not convolutional(self.problem.model)
        if self.path != "auto" or (linear and (not cpu or clients * self.problem.d <= SMALL)):
            return {self.chosen: self.paths[self.chosen]}
        slower: tuple[str, ...] = ()
        if "kernels" in self.paths:
            slower = ("traced", "layers", "layers-last", "loop")
        elif "chain" in self.paths and cpu:
            slower = ("traced", "chain") if "native" in self.paths else ("traced",)
        names = sorted((name for name in self.paths if name not in slower), key=lambda name: cpu and name != "loop")
        return {name: self.paths[name] for name in names}

    def checked(self, name: str, path: Path, x: Tensor, batch: Batch) -> Tensor:
        """The gradients by a path, which fails if they are wrong, so that it is not chosen: its first call compares
        them with those of a loop in full precision. In a deep network, `traced` may be as far from these."""
        gradients = self.run(path, x, batch)
        if path not in self.accepted:
            exact = StackedGradient(self.problem.objective_of)
            with allow_tf32(False):
                truth = exact.loop(x, *self.problem.standardised(batch).leaves())
            traced = self.run(self.paths["traced"], x, batch)
            error, usual = (float((g - truth).norm() / truth.norm()) for g in (gradients, traced))
            if not error <= max(TOLERANCES[self.precision], 2 * usual):
                message = f"the path {name!r} is not used: its gradients have an error of {error:.1g}"
                warn(message)
                raise ArithmeticError(message)
            self.accepted.add(path)
        return gradients

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        return self.run(self.paths[self.chosen], x, batch)

    def run(self, path: Path, x: Tensor, batch: Batch) -> Tensor:
        if x.is_cpu:
            return path(x, batch)
        with allow_tf32(self.precision != "float32"):
            return path(x, batch)

    def objective(self, x: Tensor, *batch: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.precision == "bf16"):
            return self.problem.objective_of(x, *batch)

    def by_kernels(self, kernels: Kernels, x: Tensor, batch: Batch) -> Tensor:
        scale = self.problem.scale if kernels.plan.convolutions else None
        channels = scale and by_channel(scale, batch.x.shape[2])
        if channels is None:
            batch = self.problem.standardised(batch)
        return kernels(x, batch.x, batch.y, channels)

    def by_chain(self, chain: Chain | NativeChain, x: Tensor, batch: Batch) -> Tensor:
        return chain.gradients(x, *self.problem.standardised(batch))

    def by_vmap(self, stacked: StackedGradient, x: Tensor, batch: Batch) -> Tensor:
        return stacked(x, *self.problem.standardised(batch).leaves())

    def by_loop(self, x: Tensor, batch: Batch) -> Tensor:
        return self.stacked.loop(x, *self.problem.standardised(batch).leaves())


def by_channel(scale: Scale, channels: int) -> tuple[Tensor, Tensor] | None:
    """Mean and deviation of each channel; None if they differ between pixels."""
    if any(v.dim() > 3 or math.prod(v.shape[-2:]) != 1 for v in scale):
        return None
    mean, std = (v.expand(channels, 1, 1).reshape(channels) for v in scale)
    return mean, std


@contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Whether float32 products may be rounded to TF32. Its relative error of 1e-3 is larger than the differences that
    variance reduction uses, so the reference gradients never do it. Only algorithms of cuDNN and of attention are taken
    that repeat to the bit: the others add up a gradient in any order."""
    if not torch.cuda.is_available():
        yield
        return
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32 = matmul.allow_tf32 = allowed
    cudnn.deterministic = True
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic = before
