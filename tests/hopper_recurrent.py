"""Compiles the kernels of recurrent layers for an H200, without a GPU, and prints what each of them takes: registers,
bytes of registers that are kept in memory, and bytes of shared memory.

Run by tests/test_recurrent_kernels.py.
"""

import json

import torch
from triton.runtime import driver

from fedda.compiling import side_by_side
from fedda.problems.gradients import recurrent_kernels
from fedda.problems.gradients.kernels.launch import Compiling
from hopper import FakeDriver, usage

CASES = [(kind, precision) for kind in ("lstm", "gru") for precision in ("tf32", "bf16")]


def run_steps(kind, precision, n=10, steps=2, batch=16, size=256):
    gates = recurrent_kernels.GATES[kind] * size
    a, h, w = torch.zeros(n, steps, batch, gates), torch.zeros(n, batch, size), torch.zeros(n, gates, size)
    e, out = h if kind == "lstm" else h[:, :1], torch.zeros(n, steps, batch, size)
    recurrent_kernels.forward(kind, precision, a, h, e, w, out, out.clone(), a.clone())
    recurrent_kernels.backward(kind, precision, out, out, out, out, out, a, e, w, a.clone(), e.clone())


def main():
    driver.set_active(FakeDriver())
    Compiling.now = True
    with side_by_side():
        for case in CASES:
            run_steps(*case)
    functions = recurrent_kernels.step_forward, recurrent_kernels.step_backward
    kernels = [k for f in functions for cache, *_ in f.device_caches.values() for k in cache.values()]
    print(json.dumps([[k.metadata.name, *usage(k), k.metadata.shared] for k in kernels]))


if __name__ == "__main__":
    main()
