"""The processes of one program: which part each of them has, and how they exchange data.

`SingleProcess` is one process alone. `World` is the processes that `torchrun` started. Both have the same methods, so
no code asks which it has.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..processes import Lost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
PATIENCE = timedelta(minutes=5)  # the wait for a rank that does not answer: longer than any round or compilation seen
POLL = 0.5  # seconds between two looks for a failure of another rank


class SingleProcess:
    """One process, which has all parts."""

    rank, size = 0, 1

    def mine(self, n: int) -> slice:
        """This process's part of n things in a row."""
        return self.parts(n)[self.rank]

    def parts(self, n: int) -> list[slice]:
        """The parts of all ranks. Their lengths differ by at most one; some are empty if n < size.

        >>> SingleProcess().parts(3)
        [slice(0, 3, None)]
        """
        return [slice(p * n // self.size, (p + 1) * n // self.size) for p in range(self.size)]

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over all ranks, in float64. If there is one tensor, it may be overwritten."""
        return list(tensors)

    def share(self, content: bytes) -> bytes:
        """The content of rank 0, on all ranks."""
        return content

    def collect(self, content: T) -> list[T]:
        """The content of every rank, on all ranks."""
        return [content]

    def swap(self, rows: Tensor, give: list[int], take: list[int]) -> Tensor:
        """Send `give[p]` rows to each rank p, in this order, and return the `take[p]` rows that come from each."""
        return rows

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """The parts of all ranks joined along an axis on rank 0; the other ranks get their own part back."""
        return part

    def mark(self) -> None:
        """Note that this job has created its run folder. The note outlives a restart."""

    def marked(self) -> bool:
        """Whether an earlier start of this job has created the run folder, as rank 0 knows it."""
        return False

    def can_capture(self, memory: bool) -> bool:
        """Whether the messages of a round, with or without clients' memory, can be part of a CUDA graph."""
        return True


class World(SingleProcess):
    """All processes that were started together. Every rank calls every method, in the same order."""

    def __init__(self, job: Store | None = None) -> None:
        self.job = job  # the store that outlives a restart
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Everything but the models goes through the host, whatever joins the devices.
        self.host: Any = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        self.nccl = "nccl" in str(dist.get_backend_config())
        self.left = threading.Event()
        self.listener: threading.Thread | None = None
        self.store = prefixed("fedda/failed", dist.distributed_c10d._get_default_store())

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        # One message. The order of the additions depends on the position in the message and the number of ranks only.
        flat = tensors[0].double() if len(tensors) == 1 else torch.cat([v.double().flatten() for v in tensors])
        with lost_if_no_answer():
            if flat.device.type == "cpu" or self.nccl:
                dist.all_reduce(flat, group=self.host if flat.device.type == "cpu" else None)
            else:
                on_host = flat.cpu()
                dist.all_reduce(on_host, group=self.host)
                flat = on_host.to(flat.device)
        if len(tensors) == 1:
            return [flat]
        parts = flat.split([v.numel() for v in tensors])
        return [part.view(v.shape) for part, v in zip(parts, tensors, strict=True)]

    def share(self, content: bytes) -> bytes:
        shared = [content]
        with lost_if_no_answer():
            dist.broadcast_object_list(shared, 0, group=self.host)
        return shared[0]

    def collect(self, content: T) -> list[T]:
        collected = [content] * self.size
        with lost_if_no_answer():
            dist.all_gather_object(collected, content, group=self.host)
        return collected

    def swap(self, rows: Tensor, give: list[int], take: list[int]) -> Tensor:
        by_host = rows.device.type == "cpu" or not self.nccl
        sent = rows.cpu() if by_host else rows
        out = sent.new_empty(sum(take), *rows.shape[1:])
        with lost_if_no_answer():
            dist.all_to_all_single(out, sent, take, give, group=self.host if by_host else None)
        return out.to(rows.device)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        part = part.cpu().contiguous()
        lengths = self.collect(part.shape[dim])
        with lost_if_no_answer():
            if self.rank:
                dist.send(part, 0, group=self.host)
                return part
            parts = [part]
            for rank, n in enumerate(lengths[1:], 1):
                other = part.new_empty(*part.shape[:dim], n, *part.shape[dim:][1:])
                dist.recv(other, rank, group=self.host)
                parts.append(other)
        return torch.cat(parts, dim=dim)

    def mark(self) -> None:
        if self.job is not None and self.rank == 0:
            self.job.set("begun", "yes")

    def marked(self) -> bool:
        seen = self.job is not None and self.rank == 0 and self.job.check(["begun"])
        return self.share(b"y" if seen else b"n") == b"y"

    def can_capture(self, memory: bool) -> bool:
        return self.nccl and not memory

    def report_failure(self, message: str) -> None:
        """Tell the other ranks why this process ends. Only the first report is kept."""
        self.store.compare_set("why", "", f"{self.rank} {message}")

    def failure(self) -> tuple[int, str] | None:
        """The rank that failed first, and its message."""
        if not self.store.check(["why"]):
            return None
        rank, _, message = self.store.get("why").decode(errors="replace").partition(" ")
        return int(rank), message

    def listen(self, end: Callable[[int, str], None]) -> None:
        """Call `end` if another rank fails: this rank may be waiting for it, and NCCL would wait forever."""

        def watch() -> None:
            while not self.left.wait(POLL):
                try:
                    failure = self.failure()
                except RuntimeError:  # the store has ended, and with it all ranks
                    return
                if failure is not None and failure[0] != self.rank:
                    return end(*failure)

        self.listener = threading.Thread(target=watch, daemon=True)
        self.listener.start()

    def leave(self) -> None:
        """Stop the listener and leave the process group, so that no thread outlives the interpreter."""
        self.left.set()
        if self.listener is not None:
            self.listener.join()
        self.host = None
        gc.collect()  # a recorded round holds the group, in a cycle
        if dist.is_initialized():
            dist.destroy_process_group()


SINGLE_PROCESS = SingleProcess()


@contextmanager
def lost_if_no_answer() -> Iterator[None]:
    """Raise `Lost` for whatever error the transport has when a process is gone."""
    try:
        yield
    except RuntimeError as why:
        raise Lost(f"another process has ended or does not answer ({str(why).strip().splitlines()[-1][:120]})") from why


@cache
def join() -> World:
    """The world that `torchrun` (or `init_process_group`) has started."""
    if dist.is_initialized():
        return World()
    if "RANK" not in os.environ:
        raise ValueError(
            "engine 'distributed' is for several processes: start them with "
            "torchrun --nproc-per-node=2 -m fedda run ..., or call torch.distributed.init_process_group first"
        )
    from torch.distributed.rendezvous import rendezvous

    # NCCL needs one GPU per process; several processes on one GPU use the host.
    one_each = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
    nccl = torch.cuda.is_available() and dist.is_nccl_available() and one_each
    store, rank, size = next(rendezvous("env://", timeout=PATIENCE))
    job = prefixed("fedda", store)
    ours = prefixed(rendezvous_name(job, rank, size), store)
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    dist.init_process_group(backend, store=ours, rank=rank, world_size=size, timeout=PATIENCE)
    world = World(job)
    atexit.register(world.leave)
    return world


def rendezvous_name(store: Store, rank: int, size: int) -> str:
    """A name that is new at every start of the ranks.

    torchrun's store outlives its workers and still holds the addresses of those that ended, and the agents of several
    hosts count restarts differently. So every process registers under a random name, and rank 0 answers with its own.
    """
    name, deadline = uuid.uuid4().hex, time.monotonic() + PATIENCE.total_seconds()
    if rank:
        store.set(f"hello/{rank}", name)
        answer = store.get(f"answer/{name}").decode()  # waits for it
        store.set(f"received/{answer}/{rank}", "")
        return answer
    waiting = set(range(1, size))
    while waiting:
        for other in sorted(waiting):
            if store.check([f"hello/{other}"]):
                store.set(f"answer/{store.get(f'hello/{other}').decode()}", name)
            if store.check([f"received/{name}/{other}"]):
                waiting.remove(other)
        if time.monotonic() > deadline:
            raise Lost(f"ranks {sorted(waiting)} have not come within {PATIENCE.total_seconds():.0f} s")
        time.sleep(0.02)
    return name


def prefixed(prefix: str, store: Store) -> Store:
    """A part of the store, for keys of one kind."""
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(prefix, store)
