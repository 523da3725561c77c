"""Layers for which vmap has no rule, or a slow one, in a form that it stacks well."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .convolution import convolve
from .recurrent import recurrence

Dropout = Callable[[Tensor], Tensor]


class Stackable(TorchFunctionMode):
    """Replaces PyTorch's recurrent layers and its fused attention while a stack of models is computed under vmap.

    The results are the same, up to rounding. Layers in a form that is not known here stay as they are: a packed
    sequence, or an LSTM with projections.

    `kernels` is the precision of our Triton kernels, which then compute the layers that they fit; None: without them.
    """

    def __init__(self, kernels: str | None = None):
        super().__init__()
        self.kernels = kernels

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.kernels is not None and function in CONVOLUTIONS:
            out = convolve(self.kernels, *args, **kwargs)
            return function(*args, **kwargs) if out is None else out
        if function is F.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        if function in LAYERS and known(*args, **kwargs):
            return layers(LAYERS[function], *args, **kwargs)
        if function in CELLS:
            return cell(CELLS[function], *args, **kwargs)
        return function(*args, **kwargs)


def stackable(function: Callable[..., Any], kernels: str | None = None) -> Callable[..., Any]:
    """The same function with these layers replaced."""

    def replaced(*args: Any) -> Any:
        with Stackable(kernels):
            return function(*args)

    return replaced


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False, dropout: Dropout | None = None,
) -> Tensor:  # fmt: skip
    """Attention as two products and a softmax; `dropout` is applied to the weights."""
    if enable_gqa:
        key, value = (v.repeat_interleave(query.shape[-3] // v.shape[-3], -3) for v in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        scores = torch.where(attn_mask, scores, -math.inf) if hidden else scores + attn_mask
    weights = scores.softmax(-1)
    return (weights if dropout is None else dropout(weights)) @ value


def known(input: Tensor, hx: Any, weights: Any, *rest: Any) -> bool:
    """Whether `layers` can compute this: no dropout, no projections, and not the arguments of a packed sequence."""
    if not isinstance(weights, list | tuple) or len(rest) != 6:
        return False
    has_biases, number, dropout, training, bidirectional, _ = rest
    each = 4 if has_biases else 2
    return len(weights) == number * (1 + bidirectional) * each and not (dropout and training and number > 1)


def layers(
    kind: str, input: Tensor, hx: Any, weights: Sequence[Tensor], has_biases: bool, number: int, dropout: float,
    training: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """PyTorch's LSTM, GRU or RNN of several layers and one or two directions."""
    states = list(zip(*hx, strict=True)) if kind == "lstm" else [(h,) for h in hx]
    each = 4 if has_biases else 2
    parameters = [weights[i : i + each] for i in range(0, len(weights), each)]
    run = [partial(direction, kind, *pair) for pair in zip(states, parameters, strict=True)]
    x = input.transpose(0, 1) if batch_first else input
    last: list[tuple[Tensor, ...]] = []
    for i in range(number):
        if bidirectional:
            (ahead, *end), (back, *start) = run[2 * i](x), run[2 * i + 1](x.flip(0))
            x, last = torch.cat([ahead, back.flip(0)], dim=-1), [*last, tuple(end), tuple(start)]
        else:
            x, *end = run[i](x)
            last.append(tuple(end))
    return (x.transpose(0, 1) if batch_first else x, *(torch.stack(v) for v in zip(*last, strict=True)))


def direction(kind: str, state: tuple[Tensor, ...], parameters: Sequence[Tensor], x: Tensor) -> tuple[Tensor, ...]:
    """One layer in one direction, on x [T, B, features]: its outputs and its last state."""
    w_input, w, *biases = parameters
    h, *cells = state
    size = h.shape[-1]
    a = F.linear(x, w_input)
    extra = cells[0] if cells else torch.zeros_like(w[:1])
    if biases and kind == "gru":  # the bias of the new state is inside the reset gate
        gates, extra = biases[1].split([2 * size, size])
        a, extra = a + biases[0] + F.pad(gates, (0, size)), extra[None]
    elif biases:
        a = a + (biases[0] + biases[1])
    h, extra, w = (v.to(a.dtype) for v in (h, extra, w))  # autocast has rounded a alone
    out, after = recurrence(a, h, extra, w, kind)
    return (out, out[-1], after[-1]) if cells else (out, out[-1])


def cell(kind: str, input: Tensor, hx: Any, *parameters: Tensor | None) -> Any:
    """PyTorch's LSTMCell, GRUCell or RNNCell: one time step."""
    state = tuple(hx) if kind == "lstm" else (hx,)
    _, *after = direction(kind, state, [p for p in parameters if p is not None], input[None])
    return tuple(after) if kind == "lstm" else after[0]


CONVOLUTIONS = (torch.conv1d, torch.conv2d)
LAYERS = {torch.lstm: "lstm", torch.gru: "gru", torch.rnn_tanh: "tanh", torch.rnn_relu: "relu"}
CELLS = {
    torch.lstm_cell: "lstm",
    torch.gru_cell: "gru",
    torch.rnn_tanh_cell: "tanh",
    torch.rnn_relu_cell: "relu",
}
