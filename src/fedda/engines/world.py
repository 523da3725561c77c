"""The processes of one program: who they are, what each of them has, and how they talk.

`SingleProcess` is one process alone. `World` is the processes that `torchrun` started. Both have the same methods, so
no code asks which it has.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..processes import Lost

T = TypeVar("T")
PATIENCE = timedelta(minutes=5)  # for a rank that does not answer: longer than any round or compilation seen
LISTEN = 0.5  # seconds between two looks at what the others have told
FAILED = "fedda/failed"


class SingleProcess:
    """One process: all of everything is here."""

    rank, size = 0, 1

    def mine(self, n: int) -> slice:
        """Which of n things in a row are this process's."""
        return self.parts(n)[self.rank]

    def parts(self, n: int) -> list[slice]:
        """Whose n things in a row are, rank after rank: nearly as many each, none for some where n < size.

        >>> SingleProcess().parts(3)
        [slice(0, 3, None)]
        """
        return [slice(p * n // self.size, (p + 1) * n // self.size) for p in range(self.size)]

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over all ranks, in float64; a tensor by itself may be overwritten."""
        return list(tensors)

    def share(self, content: bytes) -> bytes:
        """What rank 0 has, on all."""
        return content

    def collect(self, content: T) -> list[T]:
        """What every rank has, on all."""
        return [content]

    def swap(self, rows: Tensor, give: list[int], take: list[int]) -> Tensor:
        """Rows in the order of the ranks they go to, so many each, for those that come."""
        return rows

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """The parts of all ranks along an axis: whole on rank 0, still the part elsewhere."""
        return part

    def mark(self) -> None:
        """Note, for those who come after a restart, that this job has a folder of its own."""

    def marked(self) -> bool:
        """Whether an earlier start of this job has noted so, as the first rank sees it."""
        return False

    def captured(self, memory: bool) -> bool:
        """Whether what travels in a round, with or without clients' memory, can be part of a CUDA graph."""
        return True


class World(SingleProcess):
    """All processes that were started together; every method is called by all of them, in the same order."""

    def __init__(self, job: dist.Store | None = None) -> None:
        self.job = job  # what outlives a restart
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # What is no model travels by the host, whatever joins the devices.
        self.host: Any = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        self.nccl = "nccl" in str(dist.get_backend_config())
        self.left = threading.Event()
        self.listener: threading.Thread | None = None
        self.store = dist.PrefixStore(FAILED, dist.distributed_c10d._get_default_store())

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        # One message, in place where it is one already. The order of an all-reduce's sums depends on the place in the
        # message and the number of ranks, not on who is first.
        flat = tensors[0].double() if len(tensors) == 1 else torch.cat([v.double().flatten() for v in tensors])
        with answered():
            if flat.device.type == "cpu" or self.nccl:
                dist.all_reduce(flat, group=self.host if flat.device.type == "cpu" else None)
            else:
                there = flat.cpu()
                dist.all_reduce(there, group=self.host)
                flat = there.to(flat.device)
        if len(tensors) == 1:
            return [flat]
        parts = flat.split([v.numel() for v in tensors])
        return [part.view(v.shape) for part, v in zip(parts, tensors, strict=True)]

    def share(self, content: bytes) -> bytes:
        shared = [content]
        with answered():
            dist.broadcast_object_list(shared, 0, group=self.host)
        return shared[0]

    def collect(self, content: T) -> list[T]:
        collected = [content] * self.size
        with answered():
            dist.all_gather_object(collected, content, group=self.host)
        return collected

    def swap(self, rows: Tensor, give: list[int], take: list[int]) -> Tensor:
        by_host = rows.device.type == "cpu" or not self.nccl
        there = rows.cpu() if by_host else rows
        out = there.new_empty(sum(take), *rows.shape[1:])
        with answered():
            dist.all_to_all_single(out, there, take, give, group=self.host if by_host else None)
        return out.to(rows.device)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        part = part.cpu().contiguous()
        lengths = self.collect(part.shape[dim])
        with answered():
            if self.rank:
                dist.send(part, 0, group=self.host)
                return part
            found = [part]
            for rank, n in enumerate(lengths[1:], 1):
                other = part.new_empty(*part.shape[:dim], n, *part.shape[dim:][1:])
                dist.recv(other, rank, group=self.host)
                found.append(other)
        return torch.cat(found, dim=dim)

    def mark(self) -> None:
        if self.job is not None and self.rank == 0:
            self.job.set("begun", "yes")

    def marked(self) -> bool:
        seen = self.job is not None and self.rank == 0 and self.job.check(["begun"])
        return self.share(b"y" if seen else b"n") == b"y"

    def captured(self, memory: bool) -> bool:
        return self.nccl and not memory

    def tell(self, words: str) -> None:
        """Tell the others why this process ends; the first to tell is the one that is heard."""
        self.store.compare_set("why", "", f"{self.rank} {words}")

    def told(self) -> tuple[int, str] | None:
        """The rank that has failed first, and its words."""
        if not self.store.check(["why"]):
            return None
        rank, _, words = self.store.get("why").decode(errors="replace").partition(" ")
        return int(rank), words

    def listen(self, end: Callable[[int, str], None]) -> None:
        """Call `end` when another rank has failed: this one may be waiting for it, and NCCL would wait on."""

        def watch() -> None:
            while not self.left.wait(LISTEN):
                try:
                    heard = self.told()
                except RuntimeError:  # the store has gone, and with it everybody
                    return
                if heard is not None and heard[0] != self.rank:
                    return end(*heard)

        self.listener = threading.Thread(target=watch, daemon=True)
        self.listener.start()

    def leave(self) -> None:
        """Let go of the others; nobody listens any more, or the interpreter would end under the listener's feet."""
        self.left.set()
        if self.listener is not None:
            self.listener.join()
        # Or threads of a group would outlive the interpreter, and abort; a recorded round holds one, in a cycle.
        self.host = None
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


SINGLE_PROCESS = SingleProcess()


@contextmanager
def answered() -> Iterator[None]:
    """What the transport says when a process is gone, in our words."""
    try:
        yield
    except RuntimeError as why:
        raise Lost(f"another process has ended or does not answer ({str(why).strip().splitlines()[-1][:120]})") from why
