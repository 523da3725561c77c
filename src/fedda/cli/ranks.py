"""One command in several processes (`torchrun -m fedda ...`): which one prints, and how one failure ends all."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..processes import local_rank, started_by_torchrun

if TYPE_CHECKING:
    from ..engines.world import World
    from ..experiments.ranks import Ranks

GRACE = 2.0  # seconds for a rank to end by itself after another has failed: most mistakes happen on all ranks
JOINED: list[World] = []  # the world, after `join_ranks`


def join_ranks(shard: str) -> Ranks:
    """The ranks of this command: one process, or those that torchrun started."""
    from ..engines import join
    from ..experiments.ranks import SINGLE, Ranks

    if not started_by_torchrun():
        if shard == "replicas":
            raise ValueError("--shard is for several processes: torchrun --nproc-per-node=2 -m fedda ...")
        return SINGLE
    JOINED.append(join())
    JOINED[0].listen(_ended)
    return Ranks(JOINED[0], shard)


def device_of_rank(device: str | None) -> str | None:
    """The device of this process: each process of a host takes another GPU."""
    if device != "cuda" or not started_by_torchrun():
        return device
    import torch

    return f"cuda:{local_rank() % max(1, torch.cuda.device_count())}"


def should_resume(ranks: Ranks, resume: bool) -> bool:
    """Whether to resume: on --resume, or if torchrun has restarted this job."""
    return ranks.world.marked() or resume


def is_first_rank() -> bool:
    """Whether this is the only process or the first rank, which alone prints."""
    return os.environ.get("RANK", "0") == "0" or not started_by_torchrun()


def blame(message: str) -> str | None:
    """The message of this process about its failure; None if another rank failed first."""
    if not JOINED:
        return message if is_first_rank() else None
    world = JOINED[0]
    with suppress(RuntimeError):  # the store may be closed
        world.report_failure(message)
        first = world.failure()
        if first is not None and first[0] != world.rank:
            return None
    return f"rank {world.rank}: {message}" if world.rank else message


def lost(message: str) -> str | None:
    """The message of a process that lost the others: waits a moment for the reason of the rank that failed."""
    deadline = time.monotonic() + GRACE
    while JOINED and time.monotonic() < deadline:
        with suppress(RuntimeError):
            first = JOINED[0].failure()
            if first is not None:
                return because(*first) if is_first_rank() else None
        time.sleep(0.1)
    return blame(message)


def end(code: Any) -> None:
    """Exit. After a failure the process does not wait for the other ranks."""
    if JOINED and code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
    sys.exit(code)


def _ended(rank: int, message: str) -> None:
    time.sleep(GRACE)
    if is_first_rank():
        print(f"fedda: {because(rank, message)}", file=sys.stderr, flush=True)
    os._exit(1)


def because(rank: int, message: str) -> str:
    return f"stopped, because of rank {rank}: {message}"
