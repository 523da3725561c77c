"""Facts about this process that need no torch: whether torchrun started it, and the errors with which it may end."""

import os
import signal


class Lost(RuntimeError):
    """Another process has ended, or does not answer."""


class Stopped(Exception):
    """The run was stopped (Ctrl-C, SIGTERM, a closed terminal). It can be resumed from its checkpoint."""

    def __init__(self, signal_number: int, message: str):
        super().__init__(f"stopped by {signal.Signals(signal_number).name}, {message}")
        self.signal = signal_number


def started_by_torchrun() -> bool:
    """Whether this process is one of several that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
