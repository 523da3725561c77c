"""Compiles kernels for an H200, without a GPU, and prints how many there are: those of the paper's CNN or, with the
argument `fused`, those that engines/fusing.py makes.

Run by tests/test_kernels.py and tests/test_fusing.py. Triton gets a driver that only names the device.
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from fedda.compiling import side_by_side
from fedda.engines import fusing
from fedda.problems.gradients.chain import Chain
from fedda.problems.gradients.kernels import backward, forward, norm, plan_of
from fedda.problems.gradients.kernels.launch import Compiling
from fedda.problems.gradients.kernels.passes import Pass
from fedda.problems.models import cnn
from fedda.recording import record
from recorded_functions import ELEMENTWISE, arguments, network_gradient


class FakeDriver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compiled_kernels():
    """The number of compiled kernels."""
    functions = [
        f for module in (forward, backward, norm) for f in vars(module).values() if isinstance(f, jit.JITFunction)
    ]
    return sum(len(kernels) for f in functions for kernels, *_ in f.device_caches.values())


def compile_fused():
    """All operations, and the gradients of small networks."""
    fusing.SMALL, fusing.same_bits = 1, lambda *about: True
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        a, b, *rest = arguments(dtype, "permuted")
        checked = [op for op in fusing.CHECKED if dtype != torch.float64]

        def step(a=a, b=b, rest=rest, checked=checked):
            binary = [op for op in checked if "backward" in str(op)]
            return [
                *(function(a, b, *rest) for function in ELEMENTWISE.values()),
                *(op(a, b) if op in binary else op(a) for op in checked),
            ]

        fusing.fused(record(step))
    for kind in ("resnet", "transformer"):
        for precision in (torch.float32, torch.bfloat16):
            gradient, inputs = network_gradient(kind, precision)
            fusing.fused(record(gradient, *inputs))
    with side_by_side():
        for kernel in fusing.KERNELS:
            kernel.warm_up()
    compiled = [
        k for fused in fusing.KERNELS for found, *_ in fused.function.device_caches.values() for k in found.values()
    ]
    for kernel in compiled:  # multiply-adds are those of libdevice, or are asked for
        assert "fma" not in kernel.asm["ptx"] or "__nv" in kernel.asm["ttir"] or "fma" in kernel.asm["ttir"]
    print(len(compiled))


def main():
    driver.set_active(FakeDriver())
    if sys.argv[1:] == ["fused"]:
        compile_fused()
        return
    shape = (3, 32, 32)
    inputs, targets = torch.zeros(10, 16, *shape, dtype=torch.uint8), torch.zeros(10, 16, dtype=torch.long)

    def run_pass():
        for kind in ("none", "batch"):
            model, loss = cnn(shape, 10, norm=kind, layers=4 if kind == "none" else 2)
            plan = plan_of(Chain.of(model, loss, shape, norms=True), shape, "tf32")
            x = torch.zeros(20, sum(p.numel() for p in model.parameters()))
            Pass(plan, x, inputs, (torch.zeros(3), torch.ones(3))).gradients(targets)

    Compiling.now = True
    with side_by_side():
        run_pass()
    first = compiled_kernels()
    run_pass()
    print(first, compiled_kernels() - first)


if __name__ == "__main__":
    main()
