"""Compiles Triton kernels in parallel, before their first launch."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def side_by_side() -> Iterator[None]:
    """Kernels that are warmed up in this block are compiled by several threads, and ready at its end.

    A compilation is mostly the time of LLVM and ptxas, during which Python is free. Older versions of Triton compile
    one kernel at a time. If a compilation fails, the launch tries again and shows the error.
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
            active_mode.set(None)  # Triton does not reset it after an interrupt
