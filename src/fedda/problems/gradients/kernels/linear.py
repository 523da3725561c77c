"""Hidden linear layers of a stack of models. X [groups, d] are the flat vectors of parameters; inputs A [n, B, N] are
shared if there are fewer than groups: group g has those of g % n."""

import triton
import triton.language as tl


@triton.jit
def hidden_layer(A, n, X, d, weight, bias, OUT, B, N: tl.constexpr, L: tl.constexpr, BB: tl.constexpr,
                 BL: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """OUT [groups, B, L], the outputs of a linear layer after relu."""
    g = tl.program_id(2).to(tl.int64)
    b = tl.program_id(1) * BB + tl.arange(0, BB)[:, None]
    j = tl.program_id(0) * BL + tl.arange(0, BL)
    k = tl.arange(0, BK)[None, :]
    a = A + ((g % n) * B + b) * N + k
    w = X + g * d + weight + j[:, None] * N + k
    acc = tl.zeros((BB, BL), tl.float32)
    for i in range(0, N, BK):
        samples = tl.load(a + i, mask=(b < B) & (i + k < N), other=0.0)
        weights = tl.load(w + i, mask=(j < L)[:, None] & (i + k < N), other=0.0)
        acc = tl.dot(samples, tl.trans(weights), acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(X + g * d + bias + j, mask=j < L, other=0.0)[None, :]
    # A NaN stays NaN.
    tl.store(OUT + (g * B + b) * L + j[None, :], tl.where(acc <= 0, 0.0, acc), mask=(b < B) & (j < L)[None, :])


@triton.jit
def hidden_gradient(A, n, H, D, OUT, d, weight, bias, B: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
                    BB: tl.constexpr, BL: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    """The gradients of weights and biases in OUT, from the outputs H [groups, B, L] of the layer and their gradient
    D."""
    g = tl.program_id(2).to(tl.int64)
    j = tl.program_id(0) * BL + tl.arange(0, BL)
    i = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    acc = tl.zeros((BL, BN), tl.float32)
    total = tl.zeros((BL,), tl.float32)
    for first in range(0, B, BB):
        b = first + tl.arange(0, BB)[:, None]
        at = (g * B + b) * L + j[None, :]
        ok = (b < B) & (j < L)[None, :]
        active = tl.load(H + at, mask=ok, other=0.0) != 0
        value = tl.where(active, tl.load(D + at, mask=ok, other=0.0), 0.0)
        a = tl.load(A + ((g % n) * B + b) * N + i, mask=(b < B) & (i < N), other=0.0)
        acc = tl.dot(tl.trans(value), a, acc, input_precision=PRECISION)
        total += tl.sum(value, axis=0)
    out = OUT + g * d
    tl.store(out + weight + j[:, None] * N + i, acc, mask=(j < L)[:, None] & (i < N))
    if BIAS:  # noqa: SIM102 (known when the kernel is compiled, unlike the number of the program)
        if tl.program_id(1) == 0:
            tl.store(out + bias + j, total, mask=j < L)
