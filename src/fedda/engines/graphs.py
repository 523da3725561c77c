"""A round as one CUDA graph: captured once, then replayed; the host launches no kernel and looks at no number."""

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
from ..recording import Mode, recorded
from .fusing import SMALL, fused

logger = logging.getLogger(__name__)


class NoGraph(Exception):
    """Why a round cannot be captured."""


def captured(
    step: Callable[[], Sequence[Tensor]], state: Sequence[Tensor], kept: Sequence[Tensor]
) -> torch.cuda.CUDAGraph:
    """A graph whose replay makes `state` what `step` makes of it; `kept` are tensors that `step` changes in place.

    The step runs once to warm up (kernels are chosen, caches are filled), is recorded and its vector updates are fused,
    and runs again; then the graph once, which must do what the step did; then everything is put back.
    """
    device = state[0].device
    before = [v.clone() for v in (*state, *kept)]

    def put_back() -> None:
        for v, old in zip((*state, *kept), before, strict=True):
            v.copy_(old)

    places = {_place(v) for v in state}

    def body(step: Callable[[], Sequence[Tensor]]) -> None:
        # A value that is another's old place (x_old = x) must be taken before that place gets its new value.
        new = [v.clone() if _place(v) in places else v for v in step()]
        for old, value in zip(state, new, strict=True):
            old.copy_(value)

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(side), no_waiting():
            body(step)
            expected = [v.clone() for v in (*state, *kept)]
            quick = with_fused_updates(step)
            body(quick)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(graph, stream=torch.cuda.Stream(device)), SideStream(device):
            body(quick)
        # A graph holds no tensor. What else the round reads, the run has.
        graph.reads = list(quick.buffers()) if isinstance(quick, GraphModule) else []  # type: ignore[attr-defined]
        put_back()
        graph.replay()
        if not all(_like(*three) for three in zip((*state, *kept), expected, before, strict=True)):
            raise NoGraph("its replay differs from the round itself")
    except Exception as why:  # of PyTorch, of Triton's compiler, of the round: which then shows its own when it runs
        torch.cuda.synchronize(device)
        raise NoGraph(one_line(why)) from None
    finally:
        put_back()
    return graph


def with_fused_updates(step: Callable[[], Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
    """The step with its vector updates fused, where it can be recorded and Triton is there."""
    if find_spec("triton") is None:
        return step
    try:
        return fused(recorded(lambda: list(step())))
    except Exception as why:  # whatever an operation says to being recorded, the step itself is right
        logger.info("vector updates are not fused: %s", why)
        return step


def _like(a: Tensor, b: Tensor, before: Tensor) -> bool:
    """Whether two results are one but for the order of sums, which some operations leave open: to a hundredth of how
    far they have moved, and rounding. Counts are exact."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    a, b, moved = a.double(), b.double(), (b.double() - before.double()).nan_to_num(0, 0, 0).abs().max()
    return bool(torch.allclose(a, b, rtol=1e-6, atol=1e-2 * float(moved), equal_nan=True))


class SideStream(Mode):
    """What depends on no step before (step sizes, keys, batches) on a stream of its own: in the graph it is a branch
    beside the steps, which wait for it only where they use its results.

    Such are operations on what was there before the capture, if it is small or whole numbers (data), and on what was
    made of it. Seen is what goes through PyTorch's dispatcher: kernels must be wrapped as custom operators.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.main, self.side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        self.aside: dict[int, bool] = {}  # whether something was made aside, by where it lies
        self.unseen: set[int] = set()  # made aside since the steps last waited
        self.held: list[Tensor] = []  # what the side gives back, the steps may still have to read

    def __enter__(self) -> SideStream:
        self.side.wait_stream(self.main)
        super().__enter__()
        return self

    def __exit__(self, *why: Any) -> None:
        super().__exit__(*why)
        self.main.wait_stream(self.side)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [v for v in tree_leaves((args, kwargs or {})) if isinstance(v, Tensor)]
        places = {_place(v) for v in inputs}
        mutates = op._schema.is_mutable
        counts = op.overloadpacket is torch.ops.aten.arange
        aside = (bool(inputs) or counts) and not mutates and all(map(self.independent, inputs))
        # What is overwritten, the side may still have to read.
        if not aside and (mutates or places & self.unseen):
            self.main.wait_stream(self.side)
            self.unseen.clear()
        with torch.cuda.stream(self.side if aside else self.main):
            out = op(*args, **kwargs or {})
        for v in tree_leaves(out) if op._schema.returns else inputs:  # _foreach_add_ and its like return nothing
            if isinstance(v, Tensor) and (mutates or _place(v) not in places):  # a view is nothing new
                self.aside[_place(v)] = aside
                if aside:
                    self.unseen.add(_place(v))
                    self.held.append(v)
        return out

    def independent(self, v: Tensor) -> bool:
        return self.aside.get(_place(v), v.numel() <= SMALL or not v.is_floating_point())


def _place(v: Tensor) -> int:
    return v.untyped_storage().data_ptr()


@contextmanager
def no_waiting() -> Iterator[None]:
    """An operation that waits for the device raises: found out here, and not by a capture that breaks off."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
