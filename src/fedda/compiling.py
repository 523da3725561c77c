"""Triton's kernels compiled side by side, ahead of their first launch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def side_by_side() -> Iterator[None]:
    """What is warmed up in this block is compiled by several threads, and is there at its end.

    A compilation is mostly LLVM's and ptxas's time, during which Python is free. Older Tritons do one after the other.
    One that fails is tried again by its launch, which says why.
    """
    import triton

    if not hasattr(triton, "AsyncCompileMode"):
        yield
        return
    from triton.runtime._async_compile import active_mode

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        try:
            with triton.AsyncCompileMode(pool, ignore_errors=True):
                yield
        finally:
            active_mode.set(None)  # which Triton leaves to the next one, if it is interrupted
