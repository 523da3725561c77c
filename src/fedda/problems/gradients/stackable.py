"""Layers for which vmap has no rule, or a slow one, in a form that it stacks well."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from ..models import cross_entropy as of_classes
from .attention import attention, requires_grad
from .convolution import convolve
from .cross_entropy import cross_entropy, of_last_axis
from .embedding import embedding, plain_embedding
from .linear import linear
from .norms import Norms
from .recurrent import recurrence


class Stackable(TorchFunctionMode):
    """Replaces functions that vmap stacks badly, such as recurrent layers and attention, while it computes a stack.

    The results are the same, up to rounding. Layers in a form that is not known here stay as they are, such as a packed
    sequence. Where the gradient is taken outside of vmap, two things would be lost that are given back here: which
    tensors require a gradient, and what the arguments of an embedding say about its gradient.

    `kernels` is the precision of our Triton kernels, which then compute attention, convolutions, embeddings, linear and
    recurrent layers, norms and losses. If it is empty, there are none. If `last`, the channels of a pixel lie side by
    side in the results of convolutions. What `view` refuses because of this order is copied.
    """

    def __init__(self, kernels: str = "", last: bool = False):
        super().__init__()
        self.kernels, self.last = kernels, last
        self.norms = Norms()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.kernels:
            ours = KERNELS.get(function)
            out = ours(self, *args, **kwargs) if ours else self.norms(function, args, kwargs)
            if out is not None:
                return out
        if function is F.scaled_dot_product_attention:
            return attention(*args, **kwargs, kernels=self.kernels)
        if function is F.multi_head_attention_forward:
            return self.multi_head(*args, **kwargs)
        if function in LAYERS and known(*args, **kwargs):
            return layers(LAYERS[function], *args, **kwargs, kernels=self.kernels)
        if function in CELLS:
            return cell(CELLS[function], *args, **kwargs, kernels=self.kernels)
        if function is F.embedding:
            return embedding(*args, **kwargs, kernels=self.kernels)
        if function is torch.embedding:
            return plain_embedding(*args, **kwargs, kernels=self.kernels)
        if function == torch.Tensor.requires_grad.__get__:  # type: ignore[attr-defined]
            return requires_grad(args[0])
        if self.last and function in AVERAGES and (out := average(AVERAGES[function], *args, **kwargs)) is not None:
            return out
        if self.last and function is torch.Tensor.view:
            try:
                return function(*args, **kwargs)
            except RuntimeError:
                return torch.Tensor.reshape(*args, **kwargs)
        if function is torch.Tensor.data_ptr and torch._C._functorch.is_functorch_wrapped_tensor(args[0]):
            return 0  # on a GPU, recurrent layers leave their weights where they are if these share memory
        return function(*args, **kwargs)

    def multi_head(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """F.multi_head_attention_forward, whose calls we see. If it returns its weights, it has no fused attention;
        ours computes the results then, and a recording drops weights that nobody uses."""
        function = unguarded(F.multi_head_attention_forward)
        with self:
            out, weights = function(*args, **kwargs)
            if self.kernels and weights is not None:
                out, _ = function(*args, **kwargs | {"need_weights": False})
        return out, weights


def stackable(function: Callable[..., Any], kernels: str = "", last: bool = False) -> Callable[..., Any]:
    """The same function with these layers replaced."""

    def replaced(*args: Any) -> Any:
        with Stackable(kernels, last):
            return function(*args)

    return replaced


@cache
def unguarded(function: Any) -> Callable[..., Any]:
    """A copy of a function of `torch.nn.functional` whose own call a mode does not see, only the calls inside."""
    guards = {name: lambda *_: False for name in vars(F) if name.startswith("has_torch_function")}
    copy = FunctionType(
        function.__code__, vars(F) | guards, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def known(input: Tensor, hx: Any, weights: Any, *rest: Any) -> bool:
    """Whether `layers` can compute this: no dropout, and not the arguments of a packed sequence."""
    if not isinstance(weights, list | tuple) or len(rest) != 6:
        return False
    _, number, dropout, training, _, _ = rest
    return not (dropout and training and number > 1)


def layers(
    kind: str, input: Tensor, hx: Any, weights: Sequence[Tensor], has_biases: bool, number: int, dropout: float,
    training: bool, bidirectional: bool, batch_first: bool, *, kernels: str = "",
) -> tuple[Tensor, ...]:  # fmt: skip
    """PyTorch's LSTM, GRU or RNN of several layers and one or two directions; `kernels` as in `recurrence`."""
    states = list(zip(*hx, strict=True)) if kind == "lstm" else [(h,) for h in hx]
    each = len(weights) // (number * (1 + bidirectional))
    parameters = [weights[i : i + each] for i in range(0, len(weights), each)]
    run = [partial(direction, kind, *pair, kernels=kernels) for pair in zip(states, parameters, strict=True)]
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


def direction(
    kind: str, state: tuple[Tensor, ...], parameters: Sequence[Tensor], x: Tensor, kernels: str = ""
) -> tuple[Tensor, ...]:
    """One layer in one direction, on x [T, B, features]: its outputs and its last state."""
    w_input, w, *biases = parameters
    h, *cells = state
    inputs = x.flatten(0, 1)  # one product for all time steps, and for the gradient of the weights
    a = linear(kernels, inputs, w_input) if kernels else None
    a = (F.linear(inputs, w_input) if a is None else a).unflatten(0, x.shape[:2])
    if len(parameters) % 2:
        return projected(state, a, w, *biases)
    size = h.shape[-1]
    extra = cells[0] if cells else torch.zeros_like(w[:1])
    if biases and kind == "gru":  # the bias of the new state is inside the reset gate
        gates, extra = biases[1].split([2 * size, size])
        a, extra = a + biases[0] + F.pad(gates, (0, size)), extra[None]
    elif biases:
        a = a + (biases[0] + biases[1])
    h, extra, w = (v.to(a.dtype) for v in (h, extra, w))  # autocast has rounded a alone
    out, after = recurrence(a, h, extra, w, kind, kernels)
    return (out, out[-1], after[-1]) if cells else (out, out[-1])


def projected(state: tuple[Tensor, ...], a: Tensor, w: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """An LSTM whose hidden states are projected to fewer numbers, one time step after the other."""
    *biases, projection = others
    h, c = state
    out = []
    for gates in sum(biases, a):
        i, f, g, o = (gates + F.linear(h, w)).chunk(4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = F.linear(o.sigmoid() * c.tanh(), projection)
        out.append(h)
    return torch.stack(out), h, c


def cell(kind: str, input: Tensor, hx: Any, *parameters: Tensor | None, kernels: str = "") -> Any:
    """PyTorch's LSTMCell, GRUCell or RNNCell: one time step."""
    state = tuple(hx) if kind == "lstm" else (hx,)
    _, *after = direction(kind, state, [p for p in parameters if p is not None], input[None], kernels)
    return tuple(after) if kind == "lstm" else after[0]


def average(axes: tuple[int, ...], input: Tensor, output_size: Any) -> Tensor | None:
    """The means over all pixels, if this is asked for. PyTorch would change the strides of the result in place, which
    vmap does for one client at a time."""
    return input.mean(axes, keepdim=True) if output_size in (1, (1,), (1, 1), [1], [1, 1]) else None


AVERAGES: dict[Any, tuple[int, ...]] = {F.adaptive_avg_pool1d: (-1,), F.adaptive_avg_pool2d: (-2, -1)}
# Functions that our kernels may take. They give None where they do not fit; norms are in `Norms`.
KERNELS: dict[Any, Callable[..., Tensor | None]] = {
    torch.conv1d: lambda mode, *args, **kwargs: convolve(mode.kernels, *args, **kwargs, last=mode.last),
    torch.conv2d: lambda mode, *args, **kwargs: convolve(mode.kernels, *args, **kwargs, last=mode.last),
    F.linear: lambda mode, *args, **kwargs: linear(mode.kernels, *args, **kwargs),
    F.cross_entropy: lambda mode, *args, **kwargs: cross_entropy(*args, **kwargs),
    of_classes: lambda mode, *args, **kwargs: of_last_axis(*args, **kwargs),
}


CONVOLUTIONAL = (nn.Conv1d, nn.Conv2d)
KINDS = (
    *CONVOLUTIONAL, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Embedding, nn.GroupNorm, nn.LayerNorm,
    _BatchNorm,
)  # fmt: skip


def has_kernels(model: nn.Module, kinds: tuple[type[nn.Module], ...] = KINDS) -> bool:
    """Whether a network has layers of these kinds with trainable weights, which our Triton kernels may compute."""
    return any(isinstance(m, kinds) and any(p.requires_grad for p in m.parameters()) for m in model.modules())


LAYERS = {torch.lstm: "lstm", torch.gru: "gru", torch.rnn_tanh: "tanh", torch.rnn_relu: "relu"}
CELLS = {
    torch.lstm_cell: "lstm",
    torch.gru_cell: "gru",
    torch.rnn_tanh_cell: "tanh",
    torch.rnn_relu_cell: "relu",
}
