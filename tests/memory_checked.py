"""A memory checker for Triton's interpreter: a kernel that reads or writes outside of its arguments' memory fails."""

import contextlib

import numpy as np
import torch


@contextlib.contextmanager
def memory_checked():
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    begin, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    allowed = np.zeros((0, 2), np.uint64)

    def noted(self, args, kwargs):
        nonlocal allowed
        on_host, more = begin(self, args, kwargs)
        values = [v for some in (*on_host, *more.values()) for v in (some if isinstance(some, tuple) else (some,))]
        memory = [v.untyped_storage() for v in values if isinstance(v, torch.Tensor)]
        ranges = sorted({(m.data_ptr(), m.data_ptr() + m.nbytes()) for m in memory})
        allowed = np.array(ranges, np.uint64).reshape(-1, 2)
        return on_host, more

    def check(pointers, mask, what):
        used = np.broadcast_to(pointers.data, np.broadcast(pointers.data, mask.data).shape)
        used = used[np.broadcast_to(mask.data, used.shape).astype(bool)].astype(np.uint64).ravel()
        if not used.size:
            return
        size = pointers.get_element_ty().primitive_bitwidth // 8
        at = np.searchsorted(allowed[:, 0], used, side="right").astype(np.int64) - 1
        inside = (at >= 0) & (used + np.uint64(max(1, size)) <= allowed[np.maximum(at, 0), 1])
        assert inside.all(), f"{np.count_nonzero(~inside)} numbers are {what} outside of the kernel's arguments"

    def checked_load(self, pointers, mask, *rest):
        check(pointers, mask, "read")
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        check(pointers, mask, "written")
        return store(self, pointers, value, mask, *rest)

    executor._init_args_hst, builder.create_masked_load, builder.create_masked_store = (
        noted,
        checked_load,
        checked_store,
    )
    try:
        yield
    finally:
        executor._init_args_hst, builder.create_masked_load, builder.create_masked_store = begin, load, store
