"""How kernels are launched: in blocks of which size, in how many shares, on which stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ....compiling import side_by_side

# Rows of a program's block and how it is launched: the best of those tried on an H200.
LAUNCH: dict[str, dict[str, Any]] = {
    "patches": {"rows": 32, "num_warps": 1},
    "lay_out": {"rows": 2, "num_warps": 4},
    "first": {"rows": 128, "blocks": 4, "num_warps": 4, "num_stages": 3},
    "forward": {"rows": 128, "num_warps": 8, "num_stages": 3},
    "backward": {"rows": 64, "num_warps": 4, "num_stages": 3},
    "weight_gradient": {
        "rows": 32,
        "at_once": 264,
        "block_us": 0.75,
        "share_us": 0.028,
        "num_warps": 4,
        "num_stages": 3,
    },
    "first_gradient": {"rows": 32, "at_once": 528, "block_us": 0.5, "share_us": 0.005, "num_warps": 4, "num_stages": 2},
    "classify": {"rows": 128, "num_warps": 4},
}
COMPILED: set[Any] = set()  # kinds of passes whose kernels are there


class Compiling:
    """Whether kernels are compiled now and not run."""

    now = False


def on(kernel: Any, *grid: int) -> Callable[..., Any]:
    """Launches a kernel on a grid, or has it compiled for its arguments."""
    return partial(kernel.warmup, grid=grid) if Compiling.now else kernel[grid]


def compiled(key: Any, like: Tensor, passed: Callable[[], Tensor]) -> Tensor:
    """What a pass gives; its kernels are compiled together before the first one of its kind, whose `key` says it."""
    with torch.cuda.device_of(like):  # Triton launches on the current one
        if like.is_cuda and (key, like.device) not in COMPILED:
            Compiling.now = True
            try:
                with side_by_side():
                    passed()
            finally:
                Compiling.now = False
            COMPILED.add((key, like.device))
        return passed()


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """On a second stream, after what has been asked for so far."""
    if device.type != "cuda":
        yield
        return
    side = second_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def join(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(second_stream(device))


@cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def launch(kernel: str) -> tuple[int, dict[str, Any]]:
    how = dict(LAUNCH[kernel])
    return how.pop("rows"), how


def in_waves(how: dict[str, Any], programs: int) -> dict[str, Any]:
    """With many programs for each multiprocessor, two at a time hide more than a deeper pipeline of one."""
    return how | {"num_stages": 2} if programs > 1000 else how


def cdiv(n: int, by: int) -> int:
    return -(-n // by)


def power(n: int, least: int = 16) -> int:
    """The least power of two that holds n."""
    return max(least, 1 << (n - 1).bit_length())


def divided(rows: int, block: int, groups: int, how: dict[str, Any]) -> tuple[int, int]:
    """Into how many shares rows are divided, and the length of one, in whole blocks: what takes least, where so many
    programs run at once, a block takes `block_us`, and a share of a group `share_us` more where it is added up."""
    at_once, block_us, share_us = (how.pop(word) for word in ("at_once", "block_us", "share_us"))
    blocks = cdiv(rows, block)

    def cost(n: int) -> float:
        return cdiv(groups * n, at_once) * cdiv(blocks, n) * block_us + n * groups * share_us

    each = cdiv(blocks, min(range(1, min(blocks, 64) + 1), key=cost))
    return cdiv(blocks, each), each * block
