"""How long a round takes: contenders in turn, block by block, so that all of them meet the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..problems.gradients.tuning import seconds as seconds_of

BLOCKS = 5  # timed parts of a contender; its figure is their median
PATIENCE = 3  # times the seconds asked for: what a slow contender may take, and a round that is slow


@dataclass
class Contender:
    """Something that does rounds. `startup` is how long it took to make and to do its first round, in seconds, `peak`
    the memory that this took on a GPU, in bytes, `blocks` the seconds of a round in each block."""

    name: str
    advance: Callable[[], object]
    startup: float
    peak: int | None
    once: float  # a first guess at the seconds of a round
    blocks: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(self.blocks)

    def speed_to(self, other: Contender) -> float:
        """How many times faster than the other: the median of what each block says."""
        return statistics.median(b / a for a, b in zip(self.blocks, other.blocks, strict=False))


def started(name: str, make: Callable[[], Callable[[], object]], device: torch.device) -> Contender:
    """Made and warm: traces, captures and caches are part of no timed round."""
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
    """Time each for about so many seconds, in turn; a slow one for two rounds, or for one that takes long."""
    for block in range(BLOCKS):
        shift = block % len(contenders)  # nobody always comes after the same
        for one in contenders[shift:] + contenders[:shift]:
            affordable = int(PATIENCE * seconds / one.once)
            if block < max(2 if affordable else 1, min(BLOCKS, affordable)):
                rounds = max(1, int(seconds / BLOCKS / one.once))
                one.blocks.append(timed(one.advance, rounds, device) / rounds)
                one.once = min(one.once, one.blocks[-1])  # the guess may have met a busy moment


def timed(advance: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Seconds of so many rounds, to their end on the device."""

    def block() -> None:
        for _ in range(rounds):
            advance()

    return seconds_of(block, device)
