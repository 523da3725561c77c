"""Captures what runs on a GPU as a CUDA graph."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, device: torch.device) -> Iterator[None]:
    """What runs in this block becomes a graph, on a stream of its own. If that fails, PyTorch works as before."""
    pool = torch.cuda.graph_pool_handle()
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):  # puts the stream back
        try:
            with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream(device)):
                yield
        except BaseException:
            # Before 2.12, PyTorch's allocator takes a failed capture for one under way, and no other one may begin.
            with suppress(Exception):  # it has ended
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            raise


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """An operation that waits for the device raises here, before a capture would fail."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the setting is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
