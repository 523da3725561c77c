"""A hash of a problem's data: a run is not resumed on other data."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from .neural import Neural

WHOLE = 1 << 28  # bytes of samples: of larger arrays, rows are hashed that are spread evenly over the array
SPREAD = 1 << 26  # bytes of these rows
CHUNK = 1 << 24


def fingerprint(problem: Neural) -> str:
    """The SHA-256 of all targets, of the number of samples of each client, and of the samples (if they are large, of
    some of them)."""
    digest = hashlib.sha256()
    add(digest, problem.sizes)
    for part in (problem.data, *problem.held_out.values()):
        for leaf in tree_leaves(part.y):
            add(digest, leaf)
        for leaf in tree_leaves(part.x):
            rows = problem.rows if part is problem.data and problem.rows is not None else torch.arange(len(leaf))
            row_bytes = max(1, leaf[:1].nbytes)
            if len(rows) * row_bytes > WHOLE:
                digest.update(str(len(rows)).encode())
                rows = rows[torch.linspace(0, len(rows) - 1, max(1, SPREAD // row_bytes), dtype=torch.float64).long()]
            add(digest, leaf, rows.to(leaf.device))
    return digest.hexdigest()


def add(digest: hashlib._Hash, values: Tensor, rows: Tensor | None = None) -> None:
    """Hash some rows of an array, all by default; only a few are in memory at a time."""
    count = len(values) if rows is None else len(rows)
    digest.update(f"{values.dtype} {[count, *values.shape[1:]]}".encode())
    step = max(1, CHUNK // max(1, values[:1].nbytes))
    for first in range(0, count, step):
        part = slice(first, first + step)
        chunk = values[part] if rows is None else values.index_select(0, rows[part])
        digest.update(chunk.cpu().contiguous().view(torch.uint8).numpy().data)
