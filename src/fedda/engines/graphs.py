"""A round as one CUDA graph: captured once, then replayed; the host launches no kernel and looks at no number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..checks import one_line


class NoGraph(Exception):
    """Why a round cannot be captured."""


def captured(
    step: Callable[[], Sequence[Tensor]], state: Sequence[Tensor], kept: Sequence[Tensor]
) -> torch.cuda.CUDAGraph:
    """A graph whose replay makes `state` what `step` makes of it; `kept` are tensors that `step` changes in place.

    The step runs twice to warm up (kernels are chosen, caches are filled), then everything is put back.
    """
    device = state[0].device
    before = [v.clone() for v in (*state, *kept)]
    places = {v.data_ptr() for v in state}

    def body() -> None:
        # A value that is another's old place (x_old = x) must be taken before that place gets its new value.
        new = [v.clone() if v.data_ptr() in places else v for v in step()]
        for old, value in zip(state, new, strict=True):
            old.copy_(value)

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(side), no_waiting():
            body()
            body()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
    except RuntimeError as why:
        torch.cuda.synchronize(device)
        raise NoGraph(one_line(why)) from None
    finally:
        for v, old in zip((*state, *kept), before, strict=True):
            v.copy_(old)
    return graph


@contextmanager
def no_waiting() -> Iterator[None]:
    """An operation that waits for the device raises: found out here, and not by a capture that breaks off."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
