"""The recurrent layers of a stack of models: one time step of all models is one batched product, and the gradient of
the weights is one product over all time steps.

LSTM (Hochreiter, Schmidhuber 1997), GRU (Cho et al. 2014, in PyTorch's form) and plain RNNs. The products with the
inputs are computed elsewhere, for all time steps together.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .stack import applied, flat, unflat, with_stack_first

CACHE = 1 << 22  # bytes of recurrent weights that a CPU works on at a time: more would leave its cache at every step
# Operators of PyTorch's dispatcher: in a recorded gradient all time steps together are one operation.
library = torch.library.Library("fedda", "FRAGMENT")
library.define("recurrence(Tensor a, Tensor h, Tensor e, Tensor w, str kind, str kernels) -> Tensor[]")
library.define(
    "recurrence_backward(Tensor d_out, Tensor d_extra, Tensor out, Tensor extra, Tensor gates, Tensor h, Tensor e, "
    "Tensor w, str kind, str kernels) -> Tensor[]"
)


def recurrence(a: Tensor, h: Tensor, e: Tensor, w: Tensor, kind: str, kernels: str = "") -> tuple[Tensor, Tensor]:
    """The hidden states after each step, [..., T, B, H], and the cells of an LSTM.

    a [..., T, B, G] are the products of the inputs and their weights, with the biases; G is 4 H for "lstm", 3 H for
    "gru", H for "tanh" and "relu". h [..., B, H] is the first hidden state and w [..., G, H] the recurrent weights.
    e [..., B, H] are the first cells of an LSTM, or the bias [..., 1, H] of a GRU's recurrent product for the new
    state; other kinds ignore it.

    `kernels` is the precision of the products in Triton kernels ("float32", "tf32" or "bf16"), one per time step. If it
    is empty, a time step is several operations of PyTorch, as it always is in float64.
    """
    out, extra, _ = applied(Recurrence, a, h, e, w, kind, kernels)
    return out, extra


class Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return tuple(torch.ops.fedda.recurrence(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
        _, h, e, w, ctx.kind, ctx.kernels = inputs
        ctx.save_for_backward(*output, h, e, w)
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_extra: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        saved = (*ctx.saved_tensors, ctx.kind, ctx.kernels)
        return (*torch.ops.fedda.recurrence_backward(d_out, d_extra, *saved), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, int]:
        return applied(Recurrence, *with_stack_first(info.batch_size, in_dims, args)), 0


@torch.library.impl(library, "recurrence", "CompositeExplicitAutograd")
def _recurrence(a: Tensor, h: Tensor, e: Tensor, w: Tensor, kind: str, kernels: str) -> list[Tensor]:
    """Hidden states, cells (for a GRU the recurrent products of the new state) and gates: all that gradients need."""
    lead = a.shape[:-3]
    a, h, e, w = flat(lead, (a, 3), (h, 2), (e, 2), (w, 2))
    gates = torch.empty_like(a, memory_format=torch.contiguous_format)
    out, extra = a.new_empty(2, *a.shape[:-1], h.shape[-1])
    if takes_kernels(a, kernels):
        from . import recurrent_kernels

        recurrent_kernels.forward(kind, kernels, a, h, e, w, out, extra, gates)
    else:
        gates.copy_(a)  # overwritten, step by step
        for part in chunks(w):
            FORWARD[kind](gates[part], h[part], e[part], w[part].mT, out[part], extra[part])
    return [unflat(lead, v) for v in (out, extra, gates)]


@torch.library.impl(library, "recurrence_backward", "CompositeExplicitAutograd")
def _recurrence_backward(
    d_out: Tensor, d_extra: Tensor, out: Tensor, extra: Tensor, gates: Tensor, h: Tensor, e: Tensor, w: Tensor,
    kind: str, kernels: str,
) -> list[Tensor]:  # fmt: skip
    lead, backward = out.shape[:-3], BACKWARD[kind]
    if takes_kernels(out, kernels):
        from . import recurrent_kernels

        backward = partial(recurrent_kernels.backward, kind, kernels)
    d_out, d_extra, out, extra, gates = flat(lead, *((v, 3) for v in (d_out, d_extra, out, extra, gates)))
    h, e, w = flat(lead, (h, 2), (e, 2), (w, 2))
    results = [torch.empty_like(v, memory_format=torch.contiguous_format) for v in (gates, h, e, w)]
    for part in chunks(w):
        before = torch.cat([h[part, None], out[part, :-1]], dim=1)  # the hidden state before each step
        own = (v[part] for v in (d_out, d_extra, out, extra, gates, e, w))
        d, d_h, d_e, d_w = (v[part] for v in results)
        d_recurrent, first = backward(before, *own, d, d_e)  # writes d and d_e
        d_h.copy_(first)
        torch.bmm(d_recurrent.flatten(1, 2).mT, before.flatten(1, 2), out=d_w)  # over all time steps
    return [unflat(lead, v) for v in results]


def takes_kernels(a: Tensor, kernels: str) -> bool:
    return bool(kernels) and a.dtype != torch.float64


def chunks(w: Tensor) -> list[slice]:
    """All models at once on a GPU; on a CPU, as many as have weights that fit in its cache."""
    size = len(w) if w.is_cuda else max(1, CACHE // (w[0].numel() * w.element_size()))
    return [slice(first, first + size) for first in range(0, len(w), size)]


# -- the kinds; tensors are [n, T, B, ...] -----------------------------------------------------------------------------
def lstm(gates: Tensor, h: Tensor, c: Tensor, wt: Tensor, out: Tensor, cells: Tensor) -> None:
    size = h.shape[-1]
    input_forget, new, output = gates.split([2 * size, size, size], dim=-1)
    i, f = input_forget.split(size, dim=-1)
    for t in range(gates.shape[1]):
        gates[:, t].baddbmm_(h, wt)
        input_forget[:, t].sigmoid_()
        new[:, t].tanh_()
        output[:, t].sigmoid_()
        c = torch.addcmul(f[:, t] * c, i[:, t], new[:, t], out=cells[:, t])
        h = torch.mul(output[:, t], c.tanh(), out=out[:, t])


def lstm_backward(
    before: Tensor, d_out: Tensor, d_cells: Tensor, out: Tensor, cells: Tensor, gates: Tensor, c: Tensor, w: Tensor,
    d: Tensor, d_c: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    i, f, g, o = gates.chunk(4, dim=-1)
    tanh, cells_before = cells.tanh(), torch.cat([c[:, None], cells[:, :-1]], dim=1)
    # The derivatives of each step: of the gates i, f, g by the cells, of the gate o and the cells by the hidden state.
    by_cell = torch.stack([g * i * (1 - i), cells_before * f * (1 - f), i * (1 - g * g)], dim=-2)
    o_by_hidden, cell_by_hidden = tanh * o * (1 - o), o * (1 - tanh * tanh)
    by_gate, d_h = d.unflatten(-1, (4, -1)), d_out[:, -1]
    d_c.zero_()
    for t in reversed(range(gates.shape[1])):
        d_c.add_(d_cells[:, t]).addcmul_(d_h, cell_by_hidden[:, t])
        torch.mul(d_c[..., None, :], by_cell[:, t], out=by_gate[:, t, :, :3])
        torch.mul(d_h, o_by_hidden[:, t], out=by_gate[:, t, :, 3])
        d_c.mul_(f[:, t])
        d_h = step_back(d_out, t, d[:, t], w)
    return d, d_h


def gru(gates: Tensor, h: Tensor, b: Tensor, wt: Tensor, out: Tensor, products: Tensor) -> None:
    size = h.shape[-1]
    reset_update, new = gates.split([2 * size, size], dim=-1)
    r, z = reset_update.split(size, dim=-1)
    for t in range(gates.shape[1]):
        product = torch.bmm(h, wt)
        reset_update[:, t].add_(product[..., : 2 * size]).sigmoid_()
        torch.add(product[..., 2 * size :], b, out=products[:, t])
        new[:, t].addcmul_(r[:, t], products[:, t]).tanh_()
        h = torch.addcmul(new[:, t], z[:, t], h - new[:, t], out=out[:, t])


def gru_backward(
    before: Tensor, d_out: Tensor, _: Tensor, out: Tensor, products: Tensor, gates: Tensor, b: Tensor, w: Tensor,
    d: Tensor, d_b: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r, z, n = gates.chunk(3, dim=-1)
    # The derivatives of each step by the hidden state; the last one is that of the recurrent product.
    new = (1 - z) * (1 - n * n)
    by_hidden = torch.stack([new * products * r * (1 - r), (before - n) * z * (1 - z), new * r], dim=-2)
    d_recurrent, states, d_h = torch.empty_like(by_hidden), torch.empty_like(before), d_out[:, -1]
    for t in reversed(range(gates.shape[1])):
        states[:, t] = d_h
        torch.mul(d_h[..., None, :], by_hidden[:, t], out=d_recurrent[:, t])
        d_h = step_back(d_out, t, d_recurrent[:, t].flatten(-2), w).addcmul_(d_h, z[:, t])
    torch.sum(d_recurrent[..., 2, :], dim=(1, 2), out=d_b[:, 0])
    d_recurrent = d_recurrent.flatten(-2)
    torch.cat([d_recurrent[..., : -b.shape[-1]], states * new], dim=-1, out=d)
    return d_recurrent, d_h


def tanh(a: Tensor, h: Tensor, e: Tensor, wt: Tensor, out: Tensor, _: Tensor) -> None:
    for t in range(a.shape[1]):
        h = torch.tanh(a[:, t].baddbmm_(h, wt), out=out[:, t])


def tanh_backward(before: Tensor, d_out: Tensor, d_extra: Tensor, out: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    return plain_backward(d_out, 1 - out * out, *rest[-3:])


def relu(a: Tensor, h: Tensor, e: Tensor, wt: Tensor, out: Tensor, _: Tensor) -> None:
    for t in range(a.shape[1]):
        h = torch.clamp(a[:, t].baddbmm_(h, wt), min=0, out=out[:, t])


def relu_backward(before: Tensor, d_out: Tensor, d_extra: Tensor, out: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    return plain_backward(d_out, (out > 0).to(out.dtype), *rest[-3:])


def plain_backward(d_out: Tensor, slope: Tensor, w: Tensor, d: Tensor, d_e: Tensor) -> tuple[Tensor, Tensor]:
    d_h = d_out[:, -1]
    for t in reversed(range(d.shape[1])):
        torch.mul(d_h, slope[:, t], out=d[:, t])
        d_h = step_back(d_out, t, d[:, t], w)
    d_e.zero_()
    return d, d_h


def step_back(d_out: Tensor, t: int, d: Tensor, w: Tensor) -> Tensor:
    """The gradient of the hidden state before step t, without what a GRU keeps of it."""
    return torch.baddbmm(d_out[:, t - 1], d, w) if t else torch.bmm(d, w)


FORWARD: dict[str, Callable[..., None]] = {"lstm": lstm, "gru": gru, "tanh": tanh, "relu": relu}
BACKWARD: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "lstm": lstm_backward,
    "gru": gru_backward,
    "tanh": tanh_backward,
    "relu": relu_backward,
}
