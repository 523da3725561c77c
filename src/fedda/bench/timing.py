"""The time of a round: contenders take turns, block by block, so all meet the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..problems.gradients.tuning import seconds as seconds_of

Maker = Callable[[], Callable[[], object]]  # builds a program and returns its next round

BLOCKS = 5  # timed parts of a contender; the result is their median
PATIENCE = 3  # a slow contender may take this many times the given seconds


@dataclass
class Contender:
    """Something that runs rounds. `startup` is the time to build it and to run its first round, in seconds; `peak` is
    the GPU memory of that, in bytes; `blocks` are the seconds per round of each block."""

    name: str
    advance: Callable[[], object]
    startup: float
    peak: int | None
    once: float  # an estimate of the seconds of a round
    blocks: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(self.blocks)

    def speed_to(self, other: Contender) -> float:
        """How many times faster than the other: the median over blocks."""
        return statistics.median(b / a for a, b in zip(self.blocks, other.blocks, strict=False))


def started(name: str, make: Maker, device: torch.device) -> Contender:
    """A contender that is built and warm: timed rounds contain no tracing, capturing or filling of caches."""
    cuda = device.type == "cuda"
    before = 0
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    began = time.perf_counter()
    advance = make()
    first = timed(advance, 1, device)
    startup = time.perf_counter() - began
    once = timed(advance, 1, device) if first < 1.0 else first
    peak = torch.cuda.max_memory_allocated(device) - before if cuda else None
    return Contender(name, advance, startup, peak, once)


def race(contenders: list[Contender], seconds: float, device: torch.device) -> None:
    """Time each for about `seconds`, in turn; a slow one for two rounds, or for one."""
    for block in range(BLOCKS):
        shift = block % len(contenders)  # the order changes
        for one in contenders[shift:] + contenders[:shift]:
            affordable = int(PATIENCE * seconds / one.once)
            if block < max(2 if affordable else 1, min(BLOCKS, affordable)):
                rounds = max(1, int(seconds / BLOCKS / one.once))
                one.blocks.append(timed(one.advance, rounds, device) / rounds)
                one.once = min(one.once, one.blocks[-1])  # the estimate may have been disturbed


def timed(advance: Callable[[], object], rounds: int, device: torch.device) -> float:
    """The seconds of `rounds` rounds, until the device has finished."""

    def block() -> None:
        for _ in range(rounds):
            advance()

    return seconds_of(block, device)
