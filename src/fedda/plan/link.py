"""What joins the processes: a message between two of them takes a latency, and its bytes a bandwidth.

Run as a program it is one of the local processes between which `measured_link` times all-reduces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SMALL, LARGE = 1 << 10, 1 << 20  # numbers in the two messages: 8 kB, 8 MB
REPEATS, PROCESSES, PATIENCE = 40, 2, 120.0  # seconds


@dataclass(frozen=True)
class Link:
    """Seconds for a step of a message, bytes a second; `local` where processes of this machine are joined, whose cores
    do the work.

    >>> round(Link(latency=1e-3, bandwidth=1e6).all_reduce(4e6, 4), 9)  # 6 steps of 1 MB
    6.006
    """

    latency: float
    bandwidth: float
    local: bool = False

    def all_reduce(self, size: float, world: int) -> float:
        """A ring: 2 (W - 1) steps, each with 1/W of the message."""
        return 2 * (world - 1) * (self.latency + size / world / self.bandwidth)

    def swap(self, size: float, world: int) -> float:
        """Every process to every other, `size` bytes from the busiest."""
        return (world - 1) * self.latency + size / self.bandwidth


def measured_link() -> Link:
    """Real all-reduces between two processes on this machine, by gloo, of two sizes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        # By its path it needs PyTorch alone; -P keeps our modules from passing for those of Python.
        command = [sys.executable, "-P", __file__, str(Path(folder) / "store"), str(out)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            for rank in range(PROCESSES)
        ]
        try:
            said = [rank.communicate(timeout=PATIENCE)[1].decode(errors="replace") for rank in ranks]
        except subprocess.TimeoutExpired:
            said = [f"no answer within {PATIENCE:.0f} s"]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        try:
            small, large = json.loads(out.read_text())
        except (OSError, ValueError):
            why = next((words.strip().splitlines()[-1][:200] for words in said if words.strip()), "no reason given")
            raise ValueError(
                f"plan: all-reduces between local processes cannot be timed ({why}): give --link and --latency"
            ) from None
    return through(small, large)


def through(small: float, large: float) -> Link:
    """The link on which all-reduces of both sizes between two processes take so long.

    >>> known = Link(latency=2e-4, bandwidth=1e9)
    >>> found = through(known.all_reduce(8 * SMALL, 2), known.all_reduce(8 * LARGE, 2))
    >>> round(found.latency, 9), round(found.bandwidth)
    (0.0002, 1000000000)
    """
    rate = 8 * (LARGE - SMALL) / max(large - small, 1e-9)
    return Link(max((small - 8 * SMALL / rate) / 2, 1e-7), rate, local=True)


def main(store: str, out: str, rank: int) -> None:
    """The seconds of both messages from when the last process has come, after work as in a round: a quarter of them is
    faster."""
    torch.set_num_threads(1)
    kept = dist.FileStore(store, PROCESSES)
    dist.init_process_group("gloo", store=kept, rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=PATIENCE))
    messages = [torch.zeros(n, dtype=torch.float64) for n in (SMALL, LARGE)]
    work, times = torch.randn(128, 128), torch.zeros(len(messages), REPEATS, dtype=torch.float64)
    for repeat in range(REPEATS):
        for i, message in enumerate(messages):
            for _ in range(10):
                work = (work @ work).clamp(-1, 1)
            began = time.perf_counter()
            dist.all_reduce(message)
            times[i, repeat] = time.perf_counter() - began
    dist.all_reduce(times, op=dist.ReduceOp.MIN)
    if rank == 0:
        Path(out).write_text(json.dumps(times.quantile(0.25, dim=1).tolist()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
