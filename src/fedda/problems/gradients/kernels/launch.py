"""How kernels are launched: sizes of blocks, number of shares, streams."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ....compiling import side_by_side

# Rows in the block of a program, and launch options: the fastest of those tried on an H200.
LAUNCH: dict[str, dict[str, int]] = {
    "patches": {"rows": 32, "num_warps": 1},
    "reorder_weights": {"rows": 2, "num_warps": 4},
    "first_layer": {"rows": 128, "blocks": 4, "num_warps": 4, "num_stages": 3},
    "next_layer": {"rows": 128, "num_warps": 8, "num_stages": 3},
    "input_gradient": {"rows": 64, "num_warps": 4, "num_stages": 3},
    "weight_gradient": {"rows": 32, "num_warps": 4, "num_stages": 3},
    "first_weight_gradient": {"rows": 32, "num_warps": 4, "num_stages": 2},
    "classify": {"rows": 128, "num_warps": 4},
    "norm_pool": {"rows": 16, "num_warps": 4},
    "norm_gradient": {"rows": 32, "num_warps": 4},
}
# Programs that run at once, microseconds per block, and microseconds per share of a group to sum it up.
COSTS = {"weight_gradient": (264, 0.75, 0.028), "first_weight_gradient": (528, 0.5, 0.005)}
COMPILED: set[object] = set()  # the kinds of passes whose kernels are compiled


class Compiling:
    """Whether kernels are only compiled now, and not run."""

    now = False


def launcher(kernel: Any, *grid: int) -> Callable[..., object]:
    """A function that launches a kernel on a grid, or only compiles it for its arguments."""
    return partial(kernel.warmup, grid=grid) if Compiling.now else kernel[grid]


def compile_and_run(key: object, like: Tensor, run: Callable[[], Tensor]) -> Tensor:
    """The result of a pass. Before the first pass of a kind (its `key`), all its kernels are compiled together. A pass
    inside of another is compiled with it."""
    if Compiling.now:
        return run()
    with torch.cuda.device_of(like):  # Triton launches on the current device
        if like.is_cuda and (key, like.device) not in COMPILED:
            Compiling.now = True
            try:
                with side_by_side():
                    run()
            finally:
                Compiling.now = False
            COMPILED.add((key, like.device))
        return run()


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[None]:
    """Launch on a second stream, after everything launched so far."""
    if device.type != "cuda":
        yield
        return
    side = side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def join_side_stream(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(side_stream(device))


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def launch_options(kernel: str) -> tuple[int, dict[str, int]]:
    """The rows of a block and the options of a kernel."""
    options = dict(LAUNCH[kernel])
    return options.pop("rows"), options


def for_many(options: dict[str, int], programs: int) -> dict[str, int]:
    """With many programs, two at a time on a multiprocessor hide more latency than a deeper pipeline of one."""
    return options | {"num_stages": 2} if programs > 1000 else options


def cdiv(n: int, by: int) -> int:
    return -(-n // by)


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two that is at least n and `least`."""
    return max(least, 1 << (n - 1).bit_length())


def split_rows(kernel: str, rows: int, block: int, groups: int) -> tuple[int, int]:
    """The number of shares of the rows and the length of a share, in whole blocks: the fastest by COSTS."""
    at_once, block_us, share_us = COSTS[kernel]
    blocks = cdiv(rows, block)

    def cost(n: int) -> float:
        return cdiv(groups * n, at_once) * cdiv(blocks, n) * block_us + n * groups * share_us

    each = cdiv(blocks, min(range(1, min(blocks, 64) + 1), key=cost))
    return cdiv(blocks, each), each * block
