"""One command in several processes (`torchrun -m fedda ...`): who speaks, and how the failure of one ends all."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..processes import local_rank, started_by_torchrun

if TYPE_CHECKING:
    from ..engines import World
    from ..experiments.ranks import Ranks

GRACE = 2.0  # seconds in which a rank may end by itself after another has failed: most mistakes are everybody's
HERE: list[World] = []  # the world, once it is joined


def enter(shard: str) -> Ranks:
    """The ranks of this command: one, or those that torchrun has started."""
    if shard not in ("clients", "replicas"):
        raise ValueError(f"--shard must be 'clients' or 'replicas', got {shard!r}")
    from ..engines import join
    from ..experiments.ranks import SINGLE, Ranks

    if not started_by_torchrun():
        if shard == "replicas":
            raise ValueError("--shard is for several processes: torchrun --nproc-per-node=2 -m fedda ...")
        return SINGLE
    HERE.append(join())
    HERE[0].listen(_ended)
    return Ranks(HERE[0], shard)


def own(device: str | None) -> str | None:
    """Each process of a host takes a GPU of its own."""
    if device != "cuda" or not started_by_torchrun():
        return device
    import torch

    return f"cuda:{local_rank() % max(1, torch.cuda.device_count())}"


def goes_on(ranks: Ranks, resume: bool) -> bool:
    """Whether a run goes on: it was asked to, or torchrun has started this job again after it had begun."""
    return ranks.world.marked() or resume


def speaks() -> bool:
    """Whether this process prints what all would print."""
    return os.environ.get("RANK", "0") == "0" or not started_by_torchrun()


def blame(words: str) -> str | None:
    """What this process says of its failure; nothing where another has said it, or had failed before."""
    if not HERE:
        return words if speaks() else None
    world = HERE[0]
    with suppress(RuntimeError):  # the store may be gone
        world.report_failure(words)
        first = world.failure()
        if first is not None and first[0] != world.rank:
            return None
    return f"rank {world.rank}: {words}" if world.rank else words


def lost(words: str) -> str | None:
    """The same of a process that was left alone: the one that failed may yet say why."""
    deadline = time.monotonic() + GRACE
    while HERE and time.monotonic() < deadline:
        with suppress(RuntimeError):
            heard = HERE[0].failure()
            if heard is not None:
                return because(*heard) if speaks() else None
        time.sleep(0.1)
    return blame(words)


def end(code: Any) -> None:
    """Exit. A process that has failed does not wait for those that wait for it."""
    if HERE and code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
    sys.exit(code)


def _ended(rank: int, words: str) -> None:
    time.sleep(GRACE)
    if speaks():
        print(f"fedda: {because(rank, words)}", file=sys.stderr, flush=True)
    os._exit(1)


def because(rank: int, words: str) -> str:
    return f"stopped, because of rank {rank}: {words}"
