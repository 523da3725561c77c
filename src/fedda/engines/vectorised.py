"""All clients of the cohort at once, as [clients, d] or [replicas, clients, d], in chunks that fit in memory."""

import ctypes
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..checks import POSITIVE, check, number
from ..core import ClientTask, Problem
from ..registry import engines
from .simulated import ClientStack, Engine, Replies, SimulatedCohort, concatenate

KEPT = 1 << 30  # bytes of freed memory that the process keeps on a CPU
OLD_LIMIT = 4 * 1024 * 1024 * ctypes.sizeof(ctypes.c_long)  # the largest threshold that glibc before 2.35 takes
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of glibc's mallopt


@engines.register("vectorised")
@dataclass(frozen=True)
class Vectorised(Engine):
    """All clients of a round at once on one device.

    Args:
        chunk: clients at a time; by default as many as the memory holds.
        memory_gb: the memory for their vectors and activations; by default 2 GB on a CPU, a quarter of what is free on
            a GPU.
        graph: on a GPU, capture a round as one CUDA graph and replay it; on a CPU, compile it after a second of rounds.
        path: how the gradients of a stack of clients are computed (docs/performance.md); "auto" measures.
        precision: "float32", "tf32" or "bf16"; "auto" is the most precise of the fast ones.
    """

    chunk: int | None = None
    memory_gb: float | None = None
    graph: bool = True
    path: str = "auto"
    precision: str = "auto"

    def __post_init__(self) -> None:
        if self.chunk is not None:
            check("Vectorised", chunk=self.chunk)
        if self.memory_gb is not None:
            number("Vectorised", "memory_gb", self.memory_gb, POSITIVE)

    def prepare(self, problem: Problem, clients: int) -> Problem:
        if problem.device.type == "cpu":
            keep_freed_memory()
        return problem.with_path(self.path, self.precision, clients)

    def average(self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        totals, weight, dtypes = self.sums(cohort, slice(0, cohort.size), task, down)
        return tuple((total / weight).to(dtype) for total, dtype in zip(totals, dtypes, strict=True))

    def replies(self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]) -> Replies:
        return concatenate(self.chunks(cohort, slice(0, cohort.size), task, down))

    def sums(
        self, cohort: SimulatedCohort, part: slice, task: ClientTask, down: tuple[Tensor, ...]
    ) -> tuple[list[Tensor], Tensor, list[torch.dtype]]:
        """The weighted sums of the replies of a slice of the cohort, the sum of the weights, and the replies' dtypes.

        Args:
            cohort: the clients of the round.
            part: the slice.
            task: the task of the clients, with its name and mark.
            down: the tensors that are sent.
        """
        totals: list[Tensor] = []
        total_weight: Any = 0.0
        for replies, weight in self.chunks(cohort, part, task, down):
            sums = [(weight * reply).sum(dim=-2, keepdim=True) for reply in replies]
            totals = [a + b for a, b in zip(totals, sums, strict=True)] if totals else sums
            total_weight = total_weight + weight.sum(dim=-2, keepdim=True)
        return totals, total_weight, [reply.dtype for reply in replies]

    def chunks(
        self, cohort: SimulatedCohort, part: slice, task: ClientTask, down: tuple[Tensor, ...]
    ) -> Iterator[Replies]:
        """Replies and weights, chunk after chunk. If the slice is empty, the task runs on an empty stack: this process
        then knows the shapes of the replies.

        Args:
            cohort: the clients of the round.
            part: the slice of it that is run here.
            task: the task of the clients, with its name and mark.
            down: the tensors that are sent.
        """
        chunk = self.chunk or self.chunk_size(cohort)
        for k in range(part.start, max(part.stop, part.start + 1), chunk):
            clients = ClientStack(cohort, slice(k, min(k + chunk, part.stop)), stacked=True)
            yield cohort.accept_replies(clients, task(clients, *down))

    def chunk_size(self, cohort: SimulatedCohort) -> int:
        """How many clients' vectors and activations fit in the memory allowed: a quarter of the free memory of a GPU,
        2 GB on a CPU, where larger chunks only leave the caches.

        Args:
            cohort: the clients of the round.
        """
        problem = cohort.simulation.problem
        if self.memory_gb is not None:
            allowed = self.memory_gb * 1e9
        elif problem.device.type == "cuda":
            allowed = torch.cuda.mem_get_info(problem.device)[0] / 4
        else:
            allowed = 2e9
        replicas = cohort.ids.shape[:-1].numel()
        return max(1, min(cohort.size, int(allowed // (problem.bytes_per_client() * replicas))))


@cache
def keep_freed_memory() -> None:
    """Let this process keep memory that it frees, up to `KEPT`. glibc would give large pieces back to the system, and
    every operation on a stack would then wait for new pages. Settings of the user (MALLOC_..., GLIBC_TUNABLES) are left
    alone."""
    set_by_user = any(name.startswith("MALLOC_") for name in os.environ)
    if platform.libc_ver()[0] != "glibc" or set_by_user or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = ctypes.CDLL(None).mallopt
    # The second call alone would do harm: after it, glibc no longer adapts the threshold of the first.
    if mallopt(MMAP_THRESHOLD, KEPT) or mallopt(MMAP_THRESHOLD, OLD_LIMIT):
        mallopt(TRIM_THRESHOLD, KEPT)
