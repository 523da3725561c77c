"""Newton's method on one unknown for each row, from the left of the root, and the blocks of rows that it runs on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Elements that are worked on at once: on the CPU so few that float64 copies stay in the cache, on CUDA what keeps
# the copies small beside the model's own memory.
BLOCK = {"cpu": 1 << 18, "cuda": 1 << 26}


def climb(step: Callable[[Tensor], Tensor], m: Tensor, at_most: int, tol: float = 0.0) -> Tensor:
    """m <- max(m, step(m)) until no row moves by more than tol * m.

    `step` is Newton's for a concave increasing (or convex decreasing) function, started left of its root: rows only
    grow, so a row that is done stays, and one whose step is 0 / 0 never moves. A test whether all are done would
    wait for a CUDA device, so there all `at_most` steps are made.
    """
    for _ in range(at_most):
        new = torch.fmax(m, step(m))
        moved = None if m.is_cuda else bool((new > m * (1 + tol)).any())
        m = new
        if moved is False:
            break
    return m


def in_blocks(solve: Callable[..., Tensor], u: Tensor, *rest: Any, buffers: int = 0) -> Tensor:
    """solve(u, *rest, *buffers), block of rows by block of rows, in the dtype of u.

    What is in `rest` broadcasts with u: a number, or a tensor (given to `solve` in float64) whose leading axes are
    those of u, or 1, or missing. The buffers, float64 and as large as the block, are taken once for all blocks: on the
    CPU fresh memory costs more than the arithmetic.
    """
    lead = np.broadcast_shapes(u.shape[:-1], *(t.shape[:-1] for t in rest if isinstance(t, Tensor)))
    u = u.expand(*lead, u.shape[-1])
    room = min(u.numel(), max(_block(u), u.shape[-1]))
    work = torch.empty(buffers, room, dtype=torch.float64, device=u.device)
    out = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    # Tensors that the rows share become float64 once.
    _fill(out, solve, u, [t.double() if isinstance(t, Tensor) and t.numel() < u.numel() else t for t in rest], work)
    return out


def _fill(out: Tensor, solve: Callable[..., Tensor], u: Tensor, rest: list[Any], work: Tensor) -> None:
    if u.numel() <= _block(u) or u.dim() == 1:
        wide = (t.double() if isinstance(t, Tensor) else t for t in rest)
        out.copy_(solve(u, *wide, *(row[: u.numel()].view(u.shape) for row in work)))
    elif u.shape[0] == 1:
        _fill(out[0], solve, u[0], [_part(t, u, 0) for t in rest], work)
    else:
        rows = max(1, u.shape[0] * _block(u) // u.numel())
        for i in range(0, u.shape[0], rows):
            part = slice(i, i + rows)
            _fill(out[part], solve, u[part], [_part(t, u, part) for t in rest], work)


def _block(u: Tensor) -> int:
    return BLOCK.get(u.device.type, 1 << 20)


def _part(t: Any, u: Tensor, part: int | slice) -> Any:
    """The part of t along the first axis of u, if it has that axis."""
    if not isinstance(t, Tensor) or t.dim() < u.dim():
        return t
    return t[part if t.shape[0] > 1 or part == 0 else slice(None)]


def dot(a: Tensor, b: Tensor) -> Tensor:
    """sum_j a_j b_j: [..., 1]."""
    return (a * b).sum(dim=-1, keepdim=True) if a.is_cuda else torch.linalg.vecdot(a, b)[..., None]
