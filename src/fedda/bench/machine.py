"""The context of a time: machine, versions, command and date."""

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from typing import Any

import torch

from .. import __version__


def machine(device: torch.device) -> dict[str, Any]:
    return {
        "command": shlex.join(["fedda", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "fedda": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def processor() -> str:
    """The CPU's name. Only Linux has it in a file."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def process_peak_mb() -> float | None:
    """The peak memory of this process, over everything that was measured. None on Windows, which does not report it."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)  # bytes on macOS, kB elsewhere
