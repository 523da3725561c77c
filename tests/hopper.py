"""Compiles the kernels of the paper's CNN for an H200, without a GPU, and prints how many there are.

Run by tests/test_kernels.py. Triton gets a driver that only names the device.
"""

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from fedda.compiling import side_by_side
from fedda.problems.gradients.chain import Chain
from fedda.problems.gradients.kernels import backward, forward, norm, plan_of
from fedda.problems.gradients.kernels.launch import Compiling
from fedda.problems.gradients.kernels.passes import Pass
from fedda.problems.models import cnn


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


def main():
    driver.set_active(FakeDriver())
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
