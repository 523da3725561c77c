"""A round as one CUDA graph: captured once, then replayed. The host launches no kernel and reads no number."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from ..checks import one_line
from ..recording import Mode, record
from .fusing import SMALL, fused

logger = logging.getLogger(__name__)


class NoGraph(Exception):
    """Why a round cannot be captured."""


def capture(
    step: Callable[[], Sequence[Tensor]], state: Sequence[Tensor], kept: Sequence[Tensor]
) -> torch.cuda.CUDAGraph:
    """A graph whose replay writes the results of `step` to `state`; `kept` are tensors that `step` changes in place.

    The step runs once to warm up (kernels are chosen, caches are filled). It is recorded, its element-wise operations
    are fused, and it runs again. Then the graph is captured and replayed once, which must give the results of the
    step. At the end all tensors get their old values back.
    """
    device = state[0].device
    before = [v.clone() for v in (*state, *kept)]

    def restore() -> None:
        for v, old in zip((*state, *kept), before, strict=True):
            v.copy_(old)

    storages = {_storage(v) for v in state}

    def body(step: Callable[[], Sequence[Tensor]]) -> None:
        # A result may be an old tensor of the state (x_old = x): it is copied before that tensor is overwritten.
        new = [v.clone() if _storage(v) in storages else v for v in step()]
        for old, value in zip(state, new, strict=True):
            old.copy_(value)

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(side), no_synchronisation():
            body(step)
            expected = [v.clone() for v in (*state, *kept)]
            fast = with_fused_operations(step)
            body(fast)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(graph, stream=torch.cuda.Stream(device)), SideStream(device):
            body(fast)
        # A graph keeps no tensor alive. The run holds all other tensors that the round reads.
        graph.reads = list(fast.buffers()) if isinstance(fast, GraphModule) else []  # type: ignore[attr-defined]
        restore()
        graph.replay()
        if not all(_nearly_equal(*three) for three in zip((*state, *kept), expected, before, strict=True)):
            raise NoGraph("its replay differs from the round itself")
    except Exception as why:  # from PyTorch or Triton; an error of the round itself shows again when it runs eagerly
        torch.cuda.synchronize(device)
        raise NoGraph(one_line(why)) from None
    finally:
        restore()
    return graph


def with_fused_operations(step: Callable[[], Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
    """The step with fused element-wise operations; the step itself if it cannot be recorded or there is no Triton."""
    if find_spec("triton") is None:
        return step
    try:
        return fused(record(lambda: list(step())))
    except Exception as why:  # any operation may refuse to be recorded
        logger.info("element-wise operations are not fused: %s", why)
        return step


def _nearly_equal(a: Tensor, b: Tensor, before: Tensor) -> bool:
    """Whether two results are equal up to the order of sums, which some operations do not fix: to a hundredth of the
    change from `before`, and rounding. Integers must be equal."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    a, b, moved = a.double(), b.double(), (b.double() - before.double()).nan_to_num(0, 0, 0).abs().max()
    return bool(torch.allclose(a, b, rtol=1e-6, atol=1e-2 * float(moved), equal_nan=True))


class SideStream(Mode):
    """Puts operations that depend on no earlier step (step sizes, keys, batches) on a second stream. In the graph they
    are a branch beside the steps, which wait for it only when they use its results.

    These are the operations on tensors from before the capture, if those are small or integers (data), and on their
    results. Only operations of PyTorch's dispatcher are seen, so kernels must be custom operators.
    """

    def __init__(self, device: torch.device):
        super().__init__()  # type: ignore[no-untyped-call]
        self.main, self.side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        self.aside: dict[int, bool] = {}  # whether a storage was written on the side stream
        self.unseen: set[int] = set()  # the storages written there since the steps last waited
        self.held: list[Tensor] = []  # results of the side stream, kept alive because the steps may still read them

    def __enter__(self) -> SideStream:
        self.side.wait_stream(self.main)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *why: Any) -> None:
        super().__exit__(*why)  # type: ignore[no-untyped-call]
        self.main.wait_stream(self.side)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [v for v in tree_leaves((args, kwargs or {})) if isinstance(v, Tensor)]
        storages = {_storage(v) for v in inputs}
        mutates = op._schema.is_mutable
        counts = op.overloadpacket is torch.ops.aten.arange
        aside = (bool(inputs) or counts) and not mutates and all(map(self.independent, inputs))
        # The side stream may still have to read a tensor that is overwritten.
        if not aside and (mutates or storages & self.unseen):
            self.main.wait_stream(self.side)
            self.unseen.clear()
        with torch.cuda.stream(self.side if aside else self.main):
            out = op(*args, **kwargs or {})
        for v in tree_leaves(out) if op._schema.returns else inputs:  # operations such as _foreach_add_ return nothing
            if isinstance(v, Tensor) and (mutates or _storage(v) not in storages):  # not a view of an input
                self.aside[_storage(v)] = aside
                if aside:
                    self.unseen.add(_storage(v))
                    self.held.append(v)
        return out

    def independent(self, v: Tensor) -> bool:
        return self.aside.get(_storage(v), v.numel() <= SMALL or not v.is_floating_point())


def _storage(v: Tensor) -> int:
    return v.untyped_storage().data_ptr()


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """An operation that waits for the device raises here, before a capture would fail."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
