"""One pass over a stack: which kernels run, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from . import backward, forward
from .launch import aside, cdiv, divided, in_waves, join, launch, on, power
from .plan import Dense, Layer, NetworkPlan


class Pass:
    """One pass over a stack, from x [groups, d] and inputs [batches, B, C, H, W], of which group g takes batch
    g % batches; `scale` standardises them by channel. What the way forward leaves is there for the way back."""

    def __init__(self, plan: NetworkPlan, x: Tensor, inputs: Tensor, scale: tuple[Tensor, Tensor] | None):
        self.plan, self.x, self.parts = plan, x, plan.parts
        self.groups, self.d = x.shape
        self.batches, self.batch = inputs.shape[:2]
        self.results: list[Tensor] = []
        self.where: list[Tensor] = []
        self.held: list[Tensor] = []  # what the side stream still uses
        with aside(x.device):
            self.weights = [x, *map(self._laid_out, plan.convolutions[1:])]
        self.patches = self._patches(plan.convolutions[0], inputs, scale)
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

    def _patches(self, layer: Layer, inputs: Tensor, scale: tuple[Tensor, Tensor] | None) -> Tensor:
        m, kp = layer.rows(self.batch), power(layer.channels * layer.kernel**2 + 1)
        p = self.empty(self.parts, self.batches, m, kp)
        mean, std = scale if scale is not None else (inputs, inputs)
        rows, how = launch("patches")
        on(forward.patches, cdiv(m, rows), self.batches)(
            inputs, mean, std, p, p[0].numel(), self.batch, layer.channels, layer.height, layer.width, layer.kernel,
            layer.pad, *layer.out, kp, m, rows, layer.pool, scale is not None, self.parts, **how,
        )  # fmt: skip
        return p

    def _first(self, layer: Layer) -> None:
        p = self.patches
        m, kp = p.shape[2:]
        y, where, flat, last = self._places(layer)
        rows, how = launch("first")
        blocks = how.pop("blocks")
        on(forward.first, cdiv(m, rows * blocks), self.groups)(
            p, p[0].numel(), self.x, self.d, layer.weight, layer.bias or 0, y, y[0].numel(), where, flat, self.batch, m,
            self.batches, layer.channels * layer.kernel**2, kp, layer.filters, *layer.out, blocks, rows, layer.pool,
            layer.bias is not None, last, self.parts, **how,
        )  # fmt: skip

    def _laid_out(self, layer: Layer) -> Tensor:
        t = layer.kernel**2
        wt = self.empty(self.parts, self.groups, t, layer.filters, layer.channels)
        rows, how = launch("lay_out")
        on(forward.lay_out, cdiv(layer.filters, rows), self.groups)(
            self.x, self.d, layer.weight, wt, wt[0].numel(), layer.filters, layer.channels, t, power(t), rows,
            self.parts, **how,
        )  # fmt: skip
        return wt

    def _next(self, layer: Layer, wt: Tensor) -> None:
        x = self.results[-1]
        y, where, flat, last = self._places(layer)
        rows, how = launch("forward")
        blocks = cdiv(layer.rows(self.batch), rows)
        on(forward.forward, blocks, self.groups)(
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

    def outputs(self) -> Tensor:
        *_, last = self._hidden()
        return linear(last, *self._view(self.x, self.plan.dense[-1]))

    def _hidden(self) -> list[Tensor]:
        """What goes into each of the linear layers."""
        kept = [self.flat]
        for layer in self.plan.dense[:-1]:
            kept.append(linear(kept[-1], *self._view(self.x, layer)).relu_())
        return kept

    def _dense(self, targets: Tensor) -> Tensor:
        """Through the linear layers: their gradients, and that of the last convolution's flat result."""
        x, out, kept = self.x, self.out, self._hidden()
        views = [(self._view(x, layer), self._view(out, layer)) for layer in self.plan.dense]
        last = self.plan.dense[-1]
        d = torch.empty_like(kept[-1])
        rows, how = launch("classify")
        if max(self.batch, last.outputs) > 32:
            rows = 32  # larger blocks of larger matrices would not fit in a multiprocessor's memory
        on(backward.classify, self.groups)(
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
        on(backward.flat_gradient, cdiv(n, 32), self.groups)(
            flat, y, y[0].numel(), self.where[-1], d, d[0].numel(), self.batch, n, *layer.out, layer.filters, h * w, 32,
            layer.pool, dense, self.parts,
        )  # fmt: skip
        return d

    def _below(self, layer: Layer, lower: Layer, i: int, dy: Tensor) -> Tensor:
        wt, y = self.weights[i], self.results[i - 1]
        d = self._gradient_of(lower, dense=i > 1)
        rows, how = launch("backward")
        blocks = cdiv(self.batch * layer.height * layer.width, rows)
        on(backward.backward, blocks, self.groups)(
            dy, dy[0].numel(), wt, wt[0].numel(), y, y[0].numel(), self.where[i - 1], d, d[0].numel(), self.batch,
            layer.height, layer.width, layer.channels, layer.filters, layer.kernel, layer.pad, rows, *lower.out,
            lower.pool, i > 1, self.parts, **in_waves(how, blocks * self.groups),
        )  # fmt: skip
        return d

    def _weight(self, layer: Layer, x: Tensor, dy: Tensor) -> None:
        (h, w), k = layer.out, layer.kernel
        m, triples = self.batch * h * w, k * cdiv(k, 3)
        rows, how = launch("weight_gradient")
        shares, share = divided(m, rows, triples * self.groups, how)
        dw = self.empty(shares, self.groups, k * k, layer.filters, layer.channels, dtype=torch.float32)
        db = self.empty(shares, self.groups, layer.filters, dtype=torch.float32)
        on(backward.weight_gradient, triples, shares, self.groups)(
            x, x[0].numel(), dy, dy[0].numel(), dw, db, m, self.groups, layer.height, layer.width, layer.channels,
            layer.filters, k, layer.pad, share, rows, self.parts, **how,
        )  # fmt: skip
        self._collect(layer, dw, db, layer.channels, layer.channels, k * k, 1, shares)
        self.held += [dw, db]

    def _first_weight(self, layer: Layer, dy: Tensor) -> None:
        p, n = self.patches, dy[0].numel() // (self.groups * layer.filters)
        kp, nk = p.shape[-1], layer.channels * layer.kernel**2
        rows, how = launch("first_gradient")
        shares, share = divided(n, rows, self.groups, how)
        dw = self.empty(shares, self.groups, layer.filters, kp, dtype=torch.float32)
        on(backward.first_gradient, shares, self.groups)(
            p, p[0].numel(), dy, dy[0].numel(), self.where[0], dw, p.shape[2], n, self.batches, self.groups, kp,
            layer.filters, share, rows, layer.pool, self.parts, **how,
        )  # fmt: skip
        self._collect(layer, dw, dw.view(-1)[nk:], nk, kp, 1, kp, shares)

    def _collect(
        self, layer: Layer, dw: Tensor, db: Tensor, c: int, cp: int, taps: int, apart: int, shares: int
    ) -> None:
        on(backward.collect, layer.filters, self.groups)(
            dw, db, self.out, self.d, layer.weight, layer.bias or 0, self.groups, layer.filters, c, cp, taps,
            power(taps, 1), apart, shares, layer.bias is not None, num_warps=1 if taps == 1 else 4,
        )  # fmt: skip


def linear(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.bmm(a, weight.mT) if bias is None else torch.baddbmm(bias[:, None], a, weight.mT)
