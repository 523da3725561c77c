"""Which kernels run, one after the other, for the gradients of a stack of convolutional networks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from . import triton_ops as ops

LARGEST = 2**31 - 2**20  # places in an array: kernels count in 32 bits
# Rows of a program's block and how it is launched: the best of those tried on an H200.
LAUNCH: dict[str, dict[str, int]] = {
    "patches": {"rows": 32, "num_warps": 1},
    "lay_out": {"rows": 2, "num_warps": 4},
    "first": {"rows": 128, "blocks": 4, "num_warps": 4, "num_stages": 3},
    "forward": {"rows": 128, "num_warps": 8, "num_stages": 3},
    "backward": {"rows": 64, "num_warps": 4, "num_stages": 3},
    "weight_gradient": {"rows": 32, "at_once": 264, "num_warps": 4, "num_stages": 3},
    "first_gradient": {"rows": 32, "at_once": 528, "num_warps": 4, "num_stages": 2},
    "classify": {"rows": 128, "num_warps": 4},
}


@dataclass(frozen=True)
class Layer:
    """A convolution, relu and perhaps a 2x2 max-pool; where its parameters stand in the flat vector."""

    channels: int
    filters: int
    height: int
    width: int
    kernel: int
    pad: int
    pool: bool
    weight: int
    bias: int | None

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of the convolution's result, before the pool."""
        return self.height + 2 * self.pad - self.kernel + 1, self.width + 2 * self.pad - self.kernel + 1

    @property
    def result(self) -> tuple[int, int]:
        h, w = self.out
        return (h // 2, w // 2) if self.pool else (h, w)

    def rows(self, batch: int) -> int:
        """Rows of the product that computes a batch; windows come in blocks of 32."""
        n = batch * math.prod(self.result)
        return cdiv(n, 32) * 128 if self.pool else n


@dataclass(frozen=True)
class Dense:
    """A linear layer; all but the last are followed by a relu."""

    inputs: int
    outputs: int
    weight: int
    bias: int | None


@dataclass(frozen=True)
class Plan:
    """Convolutions, then linear layers, then a mean cross-entropy, on groups of parameters x [groups, d]."""

    convolutions: tuple[Layer, ...]
    dense: tuple[Dense, ...]
    parts: int

    def patches(self, inputs: Tensor, scale: tuple[Tensor, Tensor] | None) -> Tensor:
        """What the first layer multiplies, from raw inputs [batches, B, C, H, W]: it depends on no parameter."""
        layer, (n, batch) = self.convolutions[0], inputs.shape[:2]
        m, kp = layer.rows(batch), power(layer.channels * layer.kernel**2 + 1)
        p = torch.empty(self.parts, n, m, kp, dtype=torch.bfloat16, device=inputs.device)
        mean, std = scale if scale is not None else (inputs, inputs)
        rows, how = launch("patches")
        ops.patches[cdiv(m, rows), n](
            inputs, mean, std, p, p[0].numel(), batch, layer.channels, layer.height, layer.width, layer.kernel,
            layer.pad, *layer.out, kp, m, rows, layer.pool, scale is not None, self.parts, **how,
        )  # fmt: skip
        return p

    def gradients(self, x: Tensor, inputs: Tensor, targets: Tensor, scale: tuple[Tensor, Tensor] | None) -> Tensor:
        """[groups, d], from x [groups, d] and raw inputs [batches, B, C, H, W]; group g takes batch g % batches."""
        return Pass(self, x, inputs, scale).gradients(targets)

    def at_once(self, batch: int) -> int:
        """How many groups one call may have."""
        return max(1, LARGEST // (batch * self.numbers))

    @property
    def numbers(self) -> int:
        """The most numbers that an array has for one sample of one group."""
        first = self.convolutions[0]
        patches = first.rows(32) // 32 * power(first.channels * first.kernel**2 + 1)
        return max(patches, *(math.prod(layer.out) * layer.filters for layer in self.convolutions))


class Pass:
    """One pass over a stack: what the way forward leaves for the way back."""

    def __init__(self, plan: Plan, x: Tensor, inputs: Tensor, scale: tuple[Tensor, Tensor] | None):
        self.plan, self.x, self.parts = plan, x, plan.parts
        self.groups, self.d = x.shape
        self.batches, self.batch = inputs.shape[:2]
        self.results: list[Tensor] = []
        self.where: list[Tensor] = []
        self.held: list[Tensor] = []  # what the side stream still uses
        with aside(x.device):
            self.weights = [x, *map(self._laid_out, plan.convolutions[1:])]
        self.patches = plan.patches(inputs, scale)
        self._first(plan.convolutions[0])
        join(x.device)
        for layer, weights in zip(plan.convolutions[1:], self.weights[1:], strict=True):
            self._next(layer, weights)

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.x.device)

    def _places(self, layer: Layer) -> tuple[Tensor, Tensor, Tensor, bool]:
        """Where a layer writes its result, where each maximum stood, and, of the last layer, the flat result."""
        n, (h, w) = self.groups * self.batch, layer.result
        last = layer is self.plan.convolutions[-1]
        y = self.empty(self.parts, n, h, w, layer.filters)
        where = self.empty(n, h, w, layer.filters, dtype=torch.int8) if layer.pool else y
        if last:
            self.flat = self.empty(self.groups, self.batch, layer.filters * h * w, dtype=torch.float32)
        self.results.append(y)
        self.where.append(where)
        return y, where, (self.flat if last else y), last

    def _first(self, layer: Layer) -> None:
        p = self.patches
        m, kp = p.shape[2:]
        y, where, flat, last = self._places(layer)
        rows, how = launch("first")
        blocks = how.pop("blocks")
        ops.first[cdiv(m, rows * blocks), self.groups](
            p, p[0].numel(), self.x, self.d, layer.weight, layer.bias or 0, y, y[0].numel(), where, flat, self.batch, m,
            self.batches, layer.channels * layer.kernel**2, kp, layer.filters, *layer.out, blocks, rows, layer.pool,
            layer.bias is not None, last, self.parts, **how,
        )  # fmt: skip

    def _laid_out(self, layer: Layer) -> Tensor:
        t = layer.kernel**2
        wt = self.empty(self.parts, self.groups, t, layer.filters, layer.channels)
        rows, how = launch("lay_out")
        ops.lay_out[cdiv(layer.filters, rows), self.groups](
            self.x, self.d, layer.weight, wt, wt[0].numel(), layer.filters, layer.channels, t, power(t), rows,
            self.parts, **how,
        )  # fmt: skip
        return wt

    def _next(self, layer: Layer, wt: Tensor) -> None:
        x = self.results[-1]
        y, where, flat, last = self._places(layer)
        rows, how = launch("forward")
        blocks = cdiv(layer.rows(self.batch), rows)
        ops.forward[blocks, self.groups](
            x, x[0].numel(), wt, wt[0].numel(), self.x, self.d, layer.bias or 0, y, y[0].numel(), where, flat,
            self.batch, layer.height, layer.width, layer.channels, layer.filters, layer.kernel, layer.pad, rows,
            layer.pool, layer.bias is not None, last, self.parts, **in_waves(how, blocks * self.groups),
        )  # fmt: skip

    # -- the way back -----------------------------------------------------------------------------------------------
    def gradients(self, targets: Tensor) -> Tensor:
        self.out = torch.empty_like(self.x)
        flat = self._dense(targets)
        layers = self.plan.convolutions
        dy = self._last(layers[-1], flat, dense=len(layers) > 1)
        for i in range(len(layers) - 1, 0, -1):
            with aside(self.x.device):  # the weights' gradient fills what the data's leaves of the device
                self._weight(layers[i], self.results[i - 1], dy)
            self.held.append(dy)
            dy = self._below(layers[i], layers[i - 1], i, dy)
        self._first_weight(layers[0], dy)
        join(self.x.device)
        return self.out

    def _dense(self, targets: Tensor) -> Tensor:
        """Through the linear layers: their gradients, and that of the last convolution's flat result."""
        x, out, kept = self.x, self.out, [self.flat]
        views = [(self._view(x, layer), self._view(out, layer)) for layer in self.plan.dense]
        for (w, b), _ in views[:-1]:
            kept.append(torch.baddbmm(b[:, None], kept[-1], w.mT) if b is not None else kept[-1] @ w.mT)
            kept[-1].relu_()
        last = self.plan.dense[-1]
        d = torch.empty_like(kept[-1])
        rows, how = launch("classify")
        ops.classify[(self.groups,)](
            kept[-1], x, self.d, last.weight, last.bias or 0, targets, out, d, self.batch, self.batches, last.inputs,
            rows, power(self.batch), last.outputs, power(last.outputs), last.bias is not None, **how,
        )  # fmt: skip
        for ((w, _), (dw, db)), a, result in zip(views[-2::-1], kept[-2::-1], kept[:0:-1], strict=True):
            d = torch.where(result == 0, 0.0, d)
            torch.bmm(d.mT, a, out=dw) if dw.is_contiguous() else dw.copy_(d.mT @ a)
            if db is not None:
                db.copy_(d.sum(dim=1))
            d = d @ w
        return d

    def _view(self, x: Tensor, layer: Dense) -> tuple[Tensor, Tensor | None]:
        n = layer.inputs * layer.outputs
        weight = x[:, layer.weight : layer.weight + n].view(self.groups, layer.outputs, layer.inputs)
        return weight, None if layer.bias is None else x[:, layer.bias : layer.bias + layer.outputs]

    def _gradient_of(self, layer: Layer, dense: bool) -> Tensor:
        """A place for the gradient of a convolution's result; a row that no window covers stays zero."""
        (h, w), n = layer.out if dense else layer.result, self.groups * self.batch
        covered = not (dense and layer.pool) or h % 2 == w % 2 == 0
        make = torch.empty if covered else torch.zeros
        return make(self.parts, n, h, w, layer.filters, dtype=torch.bfloat16, device=self.x.device)

    def _last(self, layer: Layer, flat: Tensor, dense: bool) -> Tensor:
        (h, w), y = layer.result, self.results[-1]
        d = self._gradient_of(layer, dense)
        n = self.batch * h * w
        ops.flat_gradient[cdiv(n, 32), self.groups](
            flat, y, y[0].numel(), self.where[-1], d, d[0].numel(), self.batch, n, *layer.out, layer.filters, h * w, 32,
            layer.pool, dense, self.parts,
        )  # fmt: skip
        return d

    def _below(self, layer: Layer, lower: Layer, i: int, dy: Tensor) -> Tensor:
        wt, y = self.weights[i], self.results[i - 1]
        d = self._gradient_of(lower, dense=i > 1)
        rows, how = launch("backward")
        blocks = cdiv(self.batch * layer.height * layer.width, rows)
        ops.backward[blocks, self.groups](
            dy, dy[0].numel(), wt, wt[0].numel(), y, y[0].numel(), self.where[i - 1], d, d[0].numel(), self.batch,
            layer.height, layer.width, layer.channels, layer.filters, layer.kernel, layer.pad, rows, *lower.out,
            lower.pool, i > 1, self.parts, **in_waves(how, blocks * self.groups),
        )  # fmt: skip
        return d

    def _weight(self, layer: Layer, x: Tensor, dy: Tensor) -> None:
        (h, w), k = layer.out, layer.kernel
        m, triples = self.batch * h * w, k * cdiv(k, 3)
        rows, how = launch("weight_gradient")
        shares, share = divided(m, rows, triples * self.groups, how.pop("at_once"))
        dw = self.empty(shares, self.groups, k * k, layer.filters, layer.channels, dtype=torch.float32)
        db = self.empty(shares, self.groups, layer.filters, dtype=torch.float32)
        ops.weight_gradient[triples, shares, self.groups](
            x, x[0].numel(), dy, dy[0].numel(), dw, db, m, self.groups, layer.height, layer.width, layer.channels,
            layer.filters, k, layer.pad, share, rows, self.parts, **how,
        )  # fmt: skip
        self._collect(layer, dw, db, layer.channels, layer.channels, k * k, 1, shares)
        self.held += [dw, db]

    def _first_weight(self, layer: Layer, dy: Tensor) -> None:
        p, n = self.patches, dy[0].numel() // (self.groups * layer.filters)
        kp, nk = p.shape[-1], layer.channels * layer.kernel**2
        rows, how = launch("first_gradient")
        shares, share = divided(n, rows, self.groups, how.pop("at_once"))
        dw = self.empty(shares, self.groups, layer.filters, kp, dtype=torch.float32)
        ops.first_gradient[shares, self.groups](
            p, p[0].numel(), dy, dy[0].numel(), self.where[0], dw, p.shape[2], n, self.batches, self.groups, kp,
            layer.filters, share, rows, layer.pool, self.parts, **how,
        )  # fmt: skip
        self._collect(layer, dw, dw.view(-1)[nk:], nk, kp, 1, kp, shares)

    def _collect(
        self, layer: Layer, dw: Tensor, db: Tensor, c: int, cp: int, taps: int, apart: int, shares: int
    ) -> None:
        ops.collect[layer.filters, self.groups](
            dw, db, self.out, self.d, layer.weight, layer.bias or 0, self.groups, layer.filters, c, cp, taps,
            power(taps, 1), apart, shares, layer.bias is not None, num_warps=1 if taps == 1 else 4,
        )  # fmt: skip


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """On a second stream, after what has been asked for so far."""
    if device.type != "cuda":
        yield
        return
    side = second_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def join(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(second_stream(device))


@cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def launch(kernel: str) -> tuple[int, dict[str, int]]:
    how = dict(LAUNCH[kernel])
    return how.pop("rows"), how


def in_waves(how: dict[str, int], programs: int) -> dict[str, int]:
    """With many programs for each multiprocessor, two at a time hide more than a deeper pipeline of one."""
    return how | {"num_stages": 2} if programs > 1000 else how


def cdiv(n: int, by: int) -> int:
    return -(-n // by)


def power(n: int, least: int = 16) -> int:
    """The least power of two that holds n."""
    return max(least, 1 << (n - 1).bit_length())


def divided(rows: int, block: int, groups: int, at_once: int) -> tuple[int, int]:
    """Into how many shares rows are divided, and the length of one, in whole blocks. `at_once` programs, one for each
    share of each group, run side by side; every share costs a little where it is added up."""
    blocks = cdiv(rows, block)
    cost = {n: cdiv(groups * n, at_once) / n + 0.1 * n * groups / at_once for n in range(1, min(blocks, 64) + 1)}
    each = cdiv(blocks, min(cost, key=lambda n: cost[n]))
    return cdiv(blocks, each), each * block
