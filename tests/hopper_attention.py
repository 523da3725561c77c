"""Compiles the kernels of attention for an H200, without a GPU, and prints what each of them takes: registers, bytes of
registers that are kept in memory, and bytes of shared memory.

Run by tests/test_attention.py.
"""

import json

import torch
from triton.runtime import driver

from fedda.compiling import side_by_side
from fedda.problems.gradients.kernels import attention
from fedda.problems.gradients.kernels.launch import Compiling
from hopper import FakeDriver, usage

# Precision, tokens, numbers of a head, and whether there is a mask. In full precision and with heads of 128 numbers,
# the gradients of queries keep some numbers in memory.
CASES = [
    (precision, *sizes)
    for sizes in ((64, 16, False), (256, 64, False), (256, 128, True))
    for precision in ("float32", "tf32", "bf16")
    if (precision, sizes[1]) != ("float32", 128)
]


def run(precision, tokens, size, masked):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    q, k, v = torch.zeros(2, 2, tokens, 3, 4, size, dtype=dtype).permute(3, 0, 1, 4, 2, 5)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).expand(2, 2, 4, -1, -1) if masked else None
    how = not masked, 0.25, precision
    out, sums = attention.forward(q, k, v, mask, *how)
    attention.backward(out, q, k, v, mask, out, sums, *how)


def main():
    driver.set_active(FakeDriver())
    Compiling.now = True
    with side_by_side():
        for case in CASES:
            run(*case)
    functions = attention.attend, attention.key_gradients, attention.query_gradients
    kernels = {id(k): k for f in functions for cache, *_ in f.device_caches.values() for k in cache.values()}
    print(json.dumps([[k.metadata.name, *usage(k), k.metadata.shared] for k in kernels.values()]))


if __name__ == "__main__":
    main()
