"""Random layers whose numbers come from a counter: the same bits in every engine and in a resumed run.

While `CounterRandom(key)` is active, dropout and PyTorch's other random functions take their numbers from a hash of
three things: the key (which stands for seed, round, client and draw), the number of the call within the forward pass,
and the position in the tensor. Under `vmap` the key is batched, so each client of a stack gets its own numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import rng
from .gradients.stackable import attention, unguarded

STEPS = 1 << 31  # a random integer has 31 bits


class CounterRandom(TorchFunctionMode):
    """Replace PyTorch's random functions by functions of `key`, an int64 tensor with one number.

    >>> with CounterRandom(torch.tensor(1)):
    ...     first = F.dropout(torch.ones(4), 0.5)
    >>> with CounterRandom(torch.tensor(1)):
    ...     torch.equal(first, F.dropout(torch.ones(4), 0.5))
    True
    """

    def __init__(self, key: Tensor):
        super().__init__()
        self.key, self.calls = key, 0

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in REFUSED:
            name = getattr(function, "__name__", str(function))
            raise ValueError(
                f"the model calls {name}, which has no counter-based form here; use dropout, rand, randn or bernoulli"
            )
        if function in REPLACED:
            return REPLACED[function](self, *args, **kwargs)
        if getattr(function, "__globals__", None) is vars(F):  # it may call random functions itself
            with self:
                return unguarded(function)(*args, **kwargs)
        return function(*args, **kwargs)

    # -- the numbers --------------------------------------------------------------------------------------------
    def keys(self, shape: Sequence[int]) -> Tensor:
        """A hash for every position of a tensor, from the next call number."""
        self.calls += 1
        position = torch.arange(math.prod(shape), device=self.key.device).view(tuple(shape))
        return rng.fold_traced(rng.fold_traced(self.key, self.calls), position)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return rng.uniform(self.keys(shape)).to(dtype)

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return rng.box_muller(*(rng.uniform(self.keys(shape)) for _ in range(2))).to(dtype)

    def kept(self, shape: Sequence[int], p: float) -> Tensor:
        """True with probability 1 - p."""
        return rng.bits(self.keys(shape)) >= round(p * STEPS)

    # -- PyTorch's functions, with their signatures --------------------------------------------------------------
    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self.masked(input, p, training, input.shape)

    def channel_dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self.masked(input, p, training, _channels(input))

    def masked(self, input: Tensor, p: float, training: bool, shape: Sequence[int]) -> Tensor:
        if not training or p == 0:
            return input
        return torch.where(self.kept(shape, p), input / (1 - p) if p < 1 else input, 0.0)

    def alpha_dropout(self, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        return self.alpha_masked(input, p, training, input.shape)

    def channel_alpha_dropout(
        self, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> Tensor:
        return self.alpha_masked(input, p, training, _channels(input))

    def alpha_masked(self, input: Tensor, p: float, training: bool, shape: Sequence[int]) -> Tensor:
        """SELU's dropout (Klambauer et al. 2017): dropped units take SELU's lowest value; mean and variance stay."""
        if not training or p == 0:
            return input
        a = (1 / math.sqrt((1 - p) * (1 + p * SELU**2))) if p < 1 else 0.0
        return torch.where(self.kept(shape, p), input, -SELU) * a + a * p * SELU

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if dropout_p == 0:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        return attention(
            query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
            dropout=lambda weights: self.dropout(weights, dropout_p),
        )  # fmt: skip

    def recurrent(
        self, function: Callable[..., Any], input: Tensor, hx: Any, weights: Sequence[Tensor], has_biases: bool,
        layers: int, dropout: float, training: bool, bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        """An LSTM, GRU or RNN layer by layer, with our dropout between the layers."""
        states = hx if isinstance(hx, tuple | list) else (hx,)
        directions, each = 1 + bidirectional, len(weights) // layers
        last: list[tuple[Tensor, ...]] = []
        for i in range(layers):
            own = [state[directions * i : directions * (i + 1)] for state in states]
            first = own if isinstance(hx, tuple | list) else own[0]
            parameters = weights[each * i : each * (i + 1)]
            input, *state = function(input, first, parameters, has_biases, 1, 0.0, training, bidirectional, batch_first)
            last.append(tuple(state))
            if i + 1 < layers:
                input = self.dropout(input, dropout, training)
        return (input, *(torch.cat(state) for state in zip(*last, strict=True)))

    def rand(self, *size: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return self.uniform(_size(size), dtype or torch.get_default_dtype())

    def randn(self, *size: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return self.normal(_size(size), dtype or torch.get_default_dtype())

    def rand_like(self, input: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return self.uniform(input.shape, dtype or input.dtype)

    def randn_like(self, input: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return self.normal(input.shape, dtype or input.dtype)

    def bernoulli(self, input: Tensor, p: float | None = None, **_: Any) -> Tensor:
        return (rng.uniform(self.keys(input.shape)) < (input if p is None else p)).to(input.dtype)


SELU = 1.7580993408473766  # minus the lowest value of SELU
REPLACED: dict[Any, Callable[..., Any]] = {
    F.dropout: CounterRandom.dropout,
    torch.dropout: CounterRandom.dropout,
    F.dropout1d: CounterRandom.channel_dropout,
    F.dropout2d: CounterRandom.channel_dropout,
    F.dropout3d: CounterRandom.channel_dropout,
    torch.feature_dropout: CounterRandom.channel_dropout,
    F.alpha_dropout: CounterRandom.alpha_dropout,
    torch.alpha_dropout: CounterRandom.alpha_dropout,
    F.feature_alpha_dropout: CounterRandom.channel_alpha_dropout,
    torch.feature_alpha_dropout: CounterRandom.channel_alpha_dropout,
    F.scaled_dot_product_attention: CounterRandom.attention,
    torch.rand: CounterRandom.rand,
    torch.randn: CounterRandom.randn,
    torch.rand_like: CounterRandom.rand_like,
    torch.randn_like: CounterRandom.randn_like,
    torch.bernoulli: CounterRandom.bernoulli,
    Tensor.bernoulli: CounterRandom.bernoulli,
}
for _cell in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
    REPLACED[_cell] = lambda mode, *args, _cell=_cell, **kwargs: mode.recurrent(_cell, *args, **kwargs)
REFUSED = {
    torch.randint, torch.randint_like, torch.randperm, torch.normal, torch.multinomial, torch.poisson, torch.rrelu,
    F.rrelu,
    Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_, Tensor.random_, Tensor.exponential_, Tensor.multinomial,
    Tensor.geometric_, Tensor.log_normal_, Tensor.cauchy_, F.gumbel_softmax, F.fractional_max_pool2d,
    F.fractional_max_pool3d,
}  # fmt: skip


def _channels(input: Tensor) -> tuple[int, ...]:
    """One number for each channel of each sample."""
    return (*input.shape[:2], *[1] * (input.dim() - 2))


def _size(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
