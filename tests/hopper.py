"""Compiles kernels for an H200, without a GPU: Triton gets a driver that only names the device.

    python tests/hopper.py               the paper's CNN and a perceptron: prints how many kernels there are
    python tests/hopper.py fused         those that engines/fusing.py makes: prints how many there are
    python tests/hopper.py layers [few]  convolutions of ResNet-8 and ResNet-18, or a few of them, in both orders of memory:
                                         prints the bytes of copies to shared memory, registers, shared memory, warps
                                         and bytes of stack, which spills would need
    python tests/hopper.py norms         norms of usual shapes: prints registers, the kinds of loads, and bytes of stack
    python tests/hopper.py stacked       embeddings, linear layers and losses: prints registers, shared memory, warps and bytes
                                         of stack

Run by tests/test_kernels.py, tests/test_fusing.py, tests/test_layers.py, tests/test_norms.py and
tests/test_stacked_layers.py.
"""

import itertools
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from fedda.compiling import side_by_side
from fedda.engines import fusing
from fedda.problems.gradients.chain import Chain
from fedda.problems.gradients.convolution import Window
from fedda.problems.gradients.kernels import (
    backward,
    cross_entropy,
    embedding,
    forward,
    implicit_gemm,
    join,
    linear,
    norm,
    plan_of,
    products,
    row_norm,
)
from fedda.problems.gradients.kernels.launch import Compiling
from fedda.problems.gradients.kernels.passes import Pass
from fedda.problems.models import cnn, mlp
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
        f
        for module in (forward, backward, norm, linear)
        for f in vars(module).values()
        if isinstance(f, jit.JITFunction)
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


CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# Channels, filters, pixels in a row, kernel and stride of each layer of two networks for CIFAR-10.
RESNETS = {
    width: [
        (3, width, 32, 3, 1), (width, width, 32, 3, 1),
        *(
            layer for i in range(1, stages) for layer in (
                (width << i - 1, width << i, 64 >> i, 3, 2), (width << i, width << i, 32 >> i, 3, 1),
                (width << i - 1, width << i, 64 >> i, 1, 2),
            )
        ),
    ]
    for width, stages in ((16, 3), (64, 4))
}  # fmt: skip
FEW = [RESNETS[16][0], RESNETS[16][2], RESNETS[64][9]]


def compile_layer(channels, filters, size, kernel, stride, precision, last=False):
    """The three kernels of a convolution, by what they compute. If `last`, the channels of a pixel lie side by side."""
    pad = kernel // 2
    out = (size + 2 * pad - kernel) // stride + 1
    window = Window(kernel, kernel, stride, stride, pad, pad, 1, 1, 1)
    weights = filters * channels * kernel**2
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    like = torch.zeros(())
    x = implicit_gemm.activations((10, 16, channels, size, size), dtype, like, last)
    x = x if channels > 3 else torch.zeros(x.shape)  # images
    w = torch.zeros(10, weights + 3)[:, :weights].view(10, filters, channels, kernel, kernel)
    d = implicit_gemm.activations((10, 16, filters, out, out), dtype, like, last)
    compiled = {}

    def launcher(function, *grid):
        def warmup(*arguments, **options):
            name = "input" if function is implicit_gemm.convolve and "output" in compiled else NAMES[function]
            compiled[name] = function.warmup(*arguments, grid=grid, **options)

        return warmup

    implicit_gemm.launcher = launcher
    implicit_gemm.forward(x, w, None, (out, out), window, precision, last)
    if channels > 3:
        implicit_gemm.input_gradient(d, w, (size, size), window, precision, x.dtype, last)
    implicit_gemm.weight_gradient(x, d, window, precision)
    return compiled


NAMES = {implicit_gemm.convolve: "output", implicit_gemm.sum_pixels: "weight", implicit_gemm.reorder: "reorder"}


def usage(kernel):
    """Registers of a thread, and bytes of memory that spilled ones would need."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def print_layers(layers):
    Compiling.now = True
    for precision, last in itertools.product(("tf32", "bf16"), (False, True)):
        for layer in layers:
            for name, kernel in compile_layer(*layer, precision, last).items():
                registers, stack = usage(kernel)
                copies = {int(v, 16) for v in re.findall(r"cp\.async.*?\[.*?\], \[.*?\], 0x(\w+)", kernel.asm["ptx"])}
                sizes = ",".join(map(str, sorted(copies))) or "-"
                order = "last" if last else "usual"
                print(
                    precision, order, *layer, name, sizes, registers, kernel.metadata.shared, kernel.metadata.num_warps,
                    stack,
                )  # fmt: skip


NORMS = [(10, 16, 8, 2, 1024), (10, 16, 8, 8, 1024), (10, 16, 8, 64, 16), (10, 1024, 1, 64, 1)]  # [n, B, G, K, S]


def print_norms():
    compiled, kinds = [], []
    row_norm.launcher = lambda function, *grid: (
        lambda *arguments, **options: compiled.append(function.warmup(*arguments, grid=grid, **options))
    )
    Compiling.now = True
    for dtype in (torch.float32, torch.bfloat16):
        for shape in NORMS:
            for by_row, last in ((False, False), (True, False), *[(False, True)] * (shape[4] > 1)):
                sizes = (1, shape[2], shape[1], shape[4]) if by_row else shape[1:]
                x, w = torch.zeros(shape[0], math.prod(sizes), dtype=dtype), torch.zeros(shape[0], shape[2] * shape[3])
                y, *statistics = row_norm.forward(x, w, w, x, sizes, by_row, last, 1e-5, True, dtype)
                row_norm.backward(y, x, y, w, *statistics, sizes, by_row, last, True, True)
                kinds += 2 * ["pairs" if last and shape[3] == 2 else "rows"]
    for kind, kernel in zip(kinds, compiled, strict=True):
        registers, stack = usage(kernel)
        print(kind, registers, *sorted({*re.findall(r"ld\.global[.\w]*", kernel.asm["ptx"])}), stack)


def print_stacked():
    """The kernels of a small and a large table, of three linear layers, of three losses and of a join."""
    Compiling.now = True
    for module in (embedding, products, cross_entropy, join):
        module.launcher = lambda function, *grid: (
            lambda *args, **how: kernels.append(function.warmup(*args, grid=grid, **how))
        )
    for precision in ("float32", "tf32", "bf16"):
        kernels = []
        rows, d = torch.zeros(10, 200, dtype=torch.long), torch.zeros(10, 200, 64)
        for number in (80, 3000):
            embedding.weight_gradient(d, rows, number, precision)
        for inputs, outputs in ((64, 256), (256, 64), (33, 3)):
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            x, d = torch.zeros(10, 200, inputs, dtype=dtype), torch.zeros(10, 200, outputs, dtype=dtype)
            w = torch.zeros(10, 1 << 17)[:, 1 : 1 + outputs * inputs].view(10, outputs, inputs)  # inside of a model
            products.weight_gradient(x, d, True, precision)
            products.multiplied(x, w.mT, w[:, :, 0], precision, dtype)
            products.multiplied(d, w, None, precision, dtype)
        for rows, classes in ((16, 10), (1024, 80), (64, 8192)):
            x = torch.zeros(10, rows, classes, dtype=dtype)
            cross_entropy.gradient(torch.zeros(10), x, torch.zeros(10, rows, dtype=torch.long), -100, 0.1)
        join.joined([torch.zeros(1 + i % 4, 10, 100 * i) for i in range(1, 64)])
        for kernel in kernels:
            registers, stack = usage(kernel)
            print(precision, registers, kernel.metadata.shared, kernel.metadata.num_warps, stack)


def main():
    driver.set_active(FakeDriver())
    if sys.argv[1:] == ["fused"]:
        compile_fused()
        return
    if sys.argv[1:] == ["norms"]:
        print_norms()
        return
    if sys.argv[1:2] == ["layers"]:
        print_layers(FEW if "few" in sys.argv else RESNETS[16] + RESNETS[64])
        return
    if sys.argv[1:] == ["stacked"]:
        print_stacked()
        return
    shape = (3, 32, 32)
    inputs, targets = torch.zeros(10, 16, *shape), torch.zeros(10, 16, dtype=torch.long)

    def run_pass():
        networks = (cnn(shape, 10), cnn(shape, 10, norm="batch", layers=2), mlp(shape, 10, hidden=200))
        for model, loss in networks:
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
