"""What a process knows of itself before torch is imported: who started it, and how it may end early."""

from __future__ import annotations

import os
import signal


class Lost(RuntimeError):
    """Another process has ended, or does not answer."""


class Stopped(Exception):
    """Somebody stopped the run (Ctrl-C, SIGTERM, a closed terminal); it can go on from its checkpoint."""

    def __init__(self, signal_number: int, words: str):
        super().__init__(f"stopped by {signal.Signals(signal_number).name}, {words}")
        self.signal = signal_number


def started_by_torchrun() -> bool:
    """Whether this is one of several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
