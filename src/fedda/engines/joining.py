"""How the processes that were started together find each other."""

from __future__ import annotations

import atexit
import os
import time
import uuid
from functools import cache

import torch
import torch.distributed as dist

from ..processes import Lost
from .world import PATIENCE, World


@cache
def join() -> World:
    """The world that `torchrun` (or `init_process_group`) has made."""
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise ValueError(
                "engine 'distributed' is for several processes: start them with "
                "torchrun --nproc-per-node=2 -m fedda run ..., or call torch.distributed.init_process_group first"
            )
        # NCCL wants a GPU for each process; several on one GPU go by the host.
        each = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
        gpu = torch.cuda.is_available() and dist.is_nccl_available() and each
        store, rank, size = next(dist.rendezvous("env://", timeout=PATIENCE))
        job = dist.PrefixStore("fedda", store)
        name = rendezvous_name(job, rank, size)
        backend, own = "cpu:gloo,cuda:nccl" if gpu else "gloo", dist.PrefixStore(name, store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=PATIENCE)
        world = World(job)
        atexit.register(world.leave)
        return world
    return World()


def rendezvous_name(store: dist.Store, rank: int, size: int) -> str:
    """A name that this start of the ranks alone has.

    torchrun's store outlives its workers, and the addresses of those that are gone lie in it; nor do the agents of
    several hosts count restarts alike. So every process says hello by a name of its own, which the first one answers.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + PATIENCE.total_seconds()
    if rank:
        store.set(f"hello/{rank}", own)
        answer = store.get(f"answer/{own}").decode()  # waits for it
        store.set(f"heard/{answer}/{rank}", "")
    else:
        answer = own
        waiting = set(range(1, size))
        while waiting:
            for other in sorted(waiting):
                if store.check([f"hello/{other}"]):
                    store.set(f"answer/{store.get(f'hello/{other}').decode()}", answer)
                if store.check([f"heard/{answer}/{other}"]):
                    waiting.remove(other)
            if time.monotonic() > deadline:
                raise Lost(f"ranks {sorted(waiting)} have not come within {PATIENCE.total_seconds():.0f} s")
            time.sleep(0.02)
    return answer
