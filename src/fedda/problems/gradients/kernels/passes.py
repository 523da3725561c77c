"""One forward and backward pass over a stack of networks: the sequence of kernels."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import backward, forward, linear, norm
from .launch import cdiv, for_many, join_side_stream, launch_options, launcher, on_side_stream, power_of_two, split_rows
from .plan import ConvolutionPlan, LinearPlan, NetworkPlan


class Pass:
    """One pass at x [groups, d] for inputs [batches, B, C, H, W], or [batches, B, ...] of a perceptron; group g uses
    batch g % batches. `scale` (mean, std) standardises each channel of images. BatchNorms use the statistics of the
    batch, or given `statistics`: a mean and a variance [groups, filters] for each. The constructor runs the
    convolutions, and keeps what the backward pass needs."""

    def __init__(
        self, plan: NetworkPlan, x: Tensor, inputs: Tensor, scale: tuple[Tensor, Tensor] | None,
        statistics: Sequence[Tensor] = (),
    ):  # fmt: skip
        self.plan, self.x, self.parts, self.statistics = plan, x, plan.parts, list(statistics)
        self.groups, self.d = x.shape
        self.batches, self.batch = inputs.shape[:2]
        self.activations: list[Tensor] = []  # after each convolution, relu and pool
        self.maxima: list[Tensor] = []  # which pixel of each window is the largest
        self.unnormed: dict[ConvolutionPlan, Tensor] = {}  # the output before each BatchNorm
        self.norms: dict[ConvolutionPlan, Tensor] = {}  # the coefficients of each BatchNorm
        self.sums: dict[ConvolutionPlan, Tensor] = {}  # sums that its coefficients or gradients need (`store_sums`)
        self.raw: dict[ConvolutionPlan, Tensor] = {}  # what its pool took from each window
        self.in_use: list[Tensor] = []  # memory that the side stream may still use
        if not plan.convolutions:
            self.flat = inputs.flatten(2)
            return
        with on_side_stream(x.device):
            self.weights = [x, *map(self._reorder_weights, plan.convolutions[1:])]
        self.patches = self._patches(plan.convolutions[0], inputs, scale)
        self._first_layer(plan.convolutions[0])
        join_side_stream(x.device)
        for layer, weights in zip(plan.convolutions[1:], self.weights[1:], strict=True):
            self._next_layer(layer, weights)

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.x.device)

    def _new_outputs(self, layer: ConvolutionPlan) -> tuple[Tensor, Tensor, Tensor, bool]:
        """Memory for the activations of a layer, its maxima and its flat output; whether it is the last layer."""
        n, (h, w) = self.groups * self.batch, layer.pooled
        last = layer is self.plan.convolutions[-1]
        y = self.empty(self.parts, n, h, w, layer.filters)
        maxima = self.empty(n, h, w, layer.filters, dtype=torch.int8) if layer.pool else y
        if last:
            self.flat = self.empty(self.groups, self.batch, layer.filters * h * w, dtype=torch.float32)
        self.activations.append(y)
        self.maxima.append(maxima)
        return y, maxima, (self.flat if last else y), last

    def _patches(self, layer: ConvolutionPlan, inputs: Tensor, scale: tuple[Tensor, Tensor] | None) -> Tensor:
        m, kp = layer.rows(self.batch), power_of_two(layer.channels * layer.kernel**2 + 1)
        p = self.empty(self.parts, self.batches, m, kp)
        mean, std = scale if scale is not None else (inputs, inputs)
        rows, options = launch_options("patches")
        launcher(forward.patches, cdiv(m, rows), self.batches)(
            inputs, mean, std, p, p[0].numel(), self.batch, layer.channels, layer.height, layer.width, layer.kernel,
            layer.pad, *layer.out, kp, m, rows, layer.pools, scale is not None, self.parts, **options,
        )  # fmt: skip
        return p

    def _first_layer(self, layer: ConvolutionPlan) -> None:
        p = self.patches
        m, kp = p.shape[2:]
        rows, options = launch_options("first_layer")
        blocks = options.pop("blocks")
        y, maxima, flat, last = self._convolution_outputs(layer)
        s = self._new_statistics(layer, cdiv(m, rows * blocks) * blocks)
        launcher(forward.first_layer, cdiv(m, rows * blocks), self.groups)(
            p, p[0].numel(), self.x, self.d, layer.weight, layer.bias or 0, y, y[0].numel(), maxima, flat, s,
            self.batch, m, self.batches, layer.channels * layer.kernel**2, kp, layer.filters, *layer.out, blocks, rows,
            layer.pools, layer.bias is not None, last, self.parts, **options,
        )  # fmt: skip
        self._norm(layer)

    def _reorder_weights(self, layer: ConvolutionPlan) -> Tensor:
        t = layer.kernel**2
        wt = self.empty(self.parts, self.groups, t, layer.filters, layer.channels)
        rows, options = launch_options("reorder_weights")
        launcher(forward.reorder_weights, cdiv(layer.filters, rows), self.groups)(
            self.x, self.d, layer.weight, wt, wt[0].numel(), layer.filters, layer.channels, t, power_of_two(t), rows,
            self.parts, **options,
        )  # fmt: skip
        return wt

    def _next_layer(self, layer: ConvolutionPlan, wt: Tensor) -> None:
        x = self.activations[-1]
        rows, options = launch_options("next_layer")
        blocks = cdiv(layer.rows(self.batch), rows)
        y, maxima, flat, last = self._convolution_outputs(layer)
        s = self._new_statistics(layer, blocks)
        launcher(forward.next_layer, blocks, self.groups)(
            x, x[0].numel(), wt, wt[0].numel(), self.x, self.d, layer.bias or 0, y, y[0].numel(), maxima, flat, s,
            self.batch, layer.height, layer.width, layer.channels, layer.filters, layer.kernel, layer.pad, rows,
            layer.pools, layer.bias is not None, last, self.parts, **for_many(options, blocks * self.groups),
        )  # fmt: skip
        self._norm(layer)

    def _convolution_outputs(self, layer: ConvolutionPlan) -> tuple[Tensor, Tensor, Tensor, bool]:
        """The same for the kernel of a convolution, which a BatchNorm may follow."""
        if layer.norm is None:
            return self._new_outputs(layer)
        y = self.unnormed[layer] = self.empty(self.parts, self.groups * self.batch, *layer.out, layer.filters)
        return y, y, y, False

    def _norm(self, layer: ConvolutionPlan) -> None:
        """Normalise the output of a convolution and pool it, if a BatchNorm follows it."""
        if layer.norm is None:
            return
        y, s = self.unnormed[layer], self.sums.get(layer)
        self.norms[layer] = t = self._given(layer) if s is None else self._batch_statistics(layer, s)
        z, maxima, flat, last = self._new_outputs(layer)
        raw = None if s is None else torch.empty_like(z)
        if raw is not None:
            self.raw[layer] = raw
        n, (rows, options) = self.batch * math.prod(layer.pooled), launch_options("norm_pool")
        launcher(norm.norm_pool, cdiv(n, rows), self.groups)(
            y, y[0].numel(), t, z, z[0].numel(), raw, maxima, flat, n, self.groups, *layer.out, layer.filters, rows,
            last, self.parts, **options,
        )  # fmt: skip

    def _new_statistics(self, layer: ConvolutionPlan, blocks: int) -> Tensor | None:
        """Memory for the sums over each block of rows, if a BatchNorm takes its statistics from the batch."""
        if layer.norm is None or self.statistics:
            return None
        self.sums[layer] = s = self.empty(blocks, self.groups, 2, layer.filters, dtype=torch.float32)
        return s

    def _batch_statistics(self, layer: ConvolutionPlan, s: Tensor) -> Tensor:
        assert layer.norm is not None
        m, f, norm_plan = self.batch * math.prod(layer.out), layer.filters, layer.norm
        t = self.empty(4, self.groups, f, dtype=torch.float32)
        launcher(norm.norm_coefficients, self.groups)(
            s, self.x, self.d, norm_plan.weight, norm_plan.bias, norm_plan.eps, t, m, self.groups, f, len(s),
            min(32, power_of_two(len(s), 1)), num_warps=4,
        )  # fmt: skip
        return t

    def _given(self, layer: ConvolutionPlan) -> Tensor:
        """The coefficients from the next of the given statistics."""
        assert layer.norm is not None
        mean, variance = self.statistics.pop(0), self.statistics.pop(0)
        weight, bias = (self.x[:, i : i + layer.filters] for i in (layer.norm.weight, layer.norm.bias))
        inverse = (variance + layer.norm.eps).rsqrt()
        return torch.stack([mean, inverse, weight * inverse, bias - mean * weight * inverse])

    # -- backward ---------------------------------------------------------------------------------------------------
    def gradients(self, targets: Tensor) -> Tensor:
        """The gradients [groups, d] for targets [batches, B]."""
        self.out = torch.empty_like(self.x)
        flat = self._linear_gradients(targets)
        layers = self.plan.convolutions
        if not layers:
            return self.out
        dy = self._last_gradient(layers[-1], flat, dense=len(layers) > 1)
        for i in range(len(layers) - 1, 0, -1):
            with on_side_stream(self.x.device):  # the gradient of the weights runs next to that of the input
                self._weight_gradient(layers[i], self.activations[i - 1], dy)
            self.in_use.append(dy)
            dy = self._input_gradient(layers[i], layers[i - 1], i, dy)
        self._first_weight_gradient(layers[0], dy)
        join_side_stream(self.x.device)
        return self.out

    def outputs(self) -> Tensor:
        """The outputs [groups, B, classes]."""
        *_, last = self._linear_inputs()
        if len(last) < self.groups:
            last = last.expand(self.groups, *last.shape[1:])  # one batch for all
        return linear_layer(last, *self._view(self.x, self.plan.linear[-1]))

    def _linear_inputs(self) -> list[Tensor]:
        """The inputs of the linear layers."""
        inputs = [self.flat]
        for layer in self.plan.linear[:-1]:
            a, out = inputs[-1], self.empty(self.groups, self.batch, layer.outputs, dtype=torch.float32)
            samples = min(power_of_two(self.batch), 64)
            rows = cdiv(self.batch, samples) * self.groups
            outputs = 16 if cdiv(layer.outputs, 16) * rows <= 528 else 64  # few programs: small ones
            launcher(linear.hidden_layer, cdiv(layer.outputs, outputs), cdiv(self.batch, samples), self.groups)(
                a, len(a), self.x, self.d, layer.weight, layer.bias or 0, out, self.batch, layer.inputs,
                layer.outputs, samples, outputs, min(power_of_two(layer.inputs), 128 if samples < 64 else 64),
                layer.bias is not None, self.plan.linear_precision, num_warps=4, num_stages=3,
            )  # fmt: skip
            inputs.append(out)
        return inputs

    def _linear_gradients(self, targets: Tensor) -> Tensor:
        """Compute the gradients of the linear layers; return that of the flat output of the last convolution."""
        x, inputs, layers = self.x, self._linear_inputs(), self.plan.linear
        last, a = layers[-1], inputs[-1]
        d = self.empty(self.groups, self.batch, last.inputs, dtype=torch.float32)
        rows, options = launch_options("classify")
        if max(self.batch, last.outputs) > 32:
            rows = 32  # larger blocks would not fit in the memory of a multiprocessor
        launcher(backward.classify, self.groups)(
            a, len(a), x, self.d, last.weight, last.bias or 0, targets, self.out, d, self.batch, self.batches,
            last.inputs, rows, power_of_two(self.batch), last.outputs, power_of_two(last.outputs),
            last.bias is not None, **options,
        )  # fmt: skip
        samples = min(power_of_two(self.batch), 32)
        for layer, a, h in zip(layers[-2::-1], inputs[-2::-1], inputs[:0:-1], strict=True):
            launcher(linear.hidden_gradient, cdiv(layer.outputs, 32), cdiv(layer.inputs, 128), self.groups)(
                a, len(a), h, d, self.out, self.d, layer.weight, layer.bias or 0, self.batch, layer.inputs,
                layer.outputs, samples, 32, 128, layer.bias is not None, self.plan.linear_precision, num_warps=4,
            )  # fmt: skip
            if self.plan.convolutions or layer is not layers[0]:
                d = torch.where(h == 0, 0.0, d) @ self._view(x, layer)[0]
        return d

    def _view(self, x: Tensor, layer: LinearPlan) -> tuple[Tensor, Tensor | None]:
        """The weight [groups, outputs, inputs] and the bias [groups, outputs] of a layer as views of x [groups, d]."""
        n = layer.inputs * layer.outputs
        weight = x[:, layer.weight : layer.weight + n].view(self.groups, layer.outputs, layer.inputs)
        return weight, None if layer.bias is None else x[:, layer.bias : layer.bias + layer.outputs]

    def _new_gradient(self, layer: ConvolutionPlan, dense: bool) -> Tensor:
        """Memory for the gradient of a convolution's output; rows that no window covers stay zero."""
        (h, w), n = layer.out if dense else layer.pooled, self.groups * self.batch
        covered = not (dense and layer.pool) or h % 2 == w % 2 == 0
        make = torch.empty if covered else torch.zeros
        return make(self.parts, n, h, w, layer.filters, dtype=torch.bfloat16, device=self.x.device)

    def _last_gradient(self, layer: ConvolutionPlan, flat: Tensor, dense: bool) -> Tensor:
        (h, w), y = layer.pooled, self.activations[-1]
        dense = dense and layer.norm is None
        d = self._new_gradient(layer, dense)
        n = self.batch * h * w
        launcher(backward.flat_gradient, cdiv(n, 32), self.groups)(
            flat, y, y[0].numel(), self.maxima[-1], *self._new_sums(layer, cdiv(n, 32)), d, d[0].numel(), self.batch,
            n, *layer.out, layer.filters, h * w, 32, layer.pool, dense, self.parts,
        )  # fmt: skip
        return self._norm_gradient(layer, d, self.maxima[-1])

    def _input_gradient(self, layer: ConvolutionPlan, lower: ConvolutionPlan, i: int, dy: Tensor) -> Tensor:
        wt, y = self.weights[i], self.activations[i - 1]
        dense = i > 1 and lower.norm is None
        d = self._new_gradient(lower, dense)
        rows, options = launch_options("input_gradient")
        blocks = cdiv(self.batch * layer.height * layer.width, rows)
        launcher(backward.input_gradient, blocks, self.groups)(
            dy, dy[0].numel(), wt, wt[0].numel(), y, y[0].numel(), self.maxima[i - 1], *self._new_sums(lower, blocks),
            d, d[0].numel(), self.batch, layer.height, layer.width, layer.channels, layer.filters, layer.kernel,
            layer.pad, rows, *lower.out, lower.pool, dense, self.parts, **for_many(options, blocks * self.groups),
        )  # fmt: skip
        return self._norm_gradient(lower, d, self.maxima[i - 1])

    def _new_sums(self, layer: ConvolutionPlan, blocks: int) -> tuple[Tensor | None, Tensor | None]:
        """What the pool behind a BatchNorm took, and memory for the sums over each block of windows."""
        if layer.norm is None:
            return None, None
        self.sums[layer] = s = self.empty(blocks, self.groups, 2, layer.filters, dtype=torch.float32)
        return self.raw[layer], s

    def _norm_gradient(self, layer: ConvolutionPlan, d: Tensor, maxima: Tensor) -> Tensor:
        """From the gradient after the pool to that of the convolution's output, if a BatchNorm is in between."""
        if layer.norm is None:
            return d
        y, t, s, f = self.unnormed[layer], self.norms[layer], self.sums[layer], layer.filters
        m, n = (self.batch * math.prod(size) for size in (layer.out, layer.pooled))
        c = self.empty(3, self.groups, f, dtype=torch.float32)
        launcher(norm.norm_parameters, self.groups)(
            s, t, self.out, self.d, layer.norm.weight, layer.norm.bias, c, m, self.groups, f, len(s),
            min(32, power_of_two(len(s), 1)), num_warps=4,
        )  # fmt: skip
        rows, options = launch_options("norm_gradient")
        dy = self.empty(self.parts, self.groups * self.batch, *layer.out, f)
        launcher(norm.norm_gradient, cdiv(m, rows), self.groups)(
            d, d[0].numel(), maxima, y, y[0].numel(), c, dy, dy[0].numel(), m, n, self.groups, *layer.out, f, rows,
            self.parts, **options,
        )  # fmt: skip
        return dy

    def _weight_gradient(self, layer: ConvolutionPlan, x: Tensor, dy: Tensor) -> None:
        (h, w), k = layer.out, layer.kernel
        m, triples = self.batch * h * w, k * cdiv(k, 3)
        rows, options = launch_options("weight_gradient")
        shares, share = split_rows("weight_gradient", m, rows, triples * self.groups)
        dw = self.empty(shares, self.groups, k * k, layer.filters, layer.channels, dtype=torch.float32)
        db = self.empty(shares, self.groups, layer.filters, dtype=torch.float32)
        launcher(backward.weight_gradient, triples, shares, self.groups)(
            x, x[0].numel(), dy, dy[0].numel(), dw, db, m, self.groups, layer.height, layer.width, layer.channels,
            layer.filters, k, layer.pad, share, rows, self.parts, **options,
        )  # fmt: skip
        self._sum_shares(layer, dw, db, layer.channels, layer.channels, k * k, 1, shares)
        self.in_use += [dw, db]

    def _first_weight_gradient(self, layer: ConvolutionPlan, dy: Tensor) -> None:
        p, n = self.patches, dy[0].numel() // (self.groups * layer.filters)
        kp, nk = p.shape[-1], layer.channels * layer.kernel**2
        rows, options = launch_options("first_weight_gradient")
        shares, share = split_rows("first_weight_gradient", n, rows, self.groups)
        dw = self.empty(shares, self.groups, layer.filters, kp, dtype=torch.float32)
        launcher(backward.first_weight_gradient, shares, self.groups)(
            p, p[0].numel(), dy, dy[0].numel(), self.maxima[0], dw, p.shape[2], n, self.batches, self.groups, kp,
            layer.filters, share, rows, layer.pools, self.parts, **options,
        )  # fmt: skip
        self._sum_shares(layer, dw, dw.view(-1)[nk:], nk, kp, 1, kp, shares)

    def _sum_shares(
        self, layer: ConvolutionPlan, dw: Tensor, db: Tensor, c: int, cp: int, taps: int, apart: int, shares: int
    ) -> None:
        launcher(backward.sum_shares, layer.filters, self.groups)(
            dw, db, self.out, self.d, layer.weight, layer.bias or 0, self.groups, layer.filters, c, cp, taps,
            power_of_two(taps, 1), apart, shares, layer.bias is not None, num_warps=1 if taps == 1 else 4,
        )  # fmt: skip


def linear_layer(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.bmm(a, weight.mT) if bias is None else torch.baddbmm(bias[:, None], a, weight.mT)
