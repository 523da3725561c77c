"""The last step of a recorded gradient: a Triton kernel adds up the remaining shares and writes all gradients into one
vector. Otherwise each layer needs a kernel of its own, and a copy follows."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ...recording import is_view, mutates

# Operators of PyTorch's dispatcher, so that recordings and graphs include them.
library = torch.library.Library("fedda", "FRAGMENT")
library.define("join(Tensor[] parts, int[] axes, int[] lead) -> Tensor")
aten = torch.ops.aten
MAX_SHARES = 256  # of a part: one program adds them up, one after the other


def added(shares: Tensor, axis: int) -> Tensor:
    """The sum of the shares along an axis."""
    return shares.select(axis, 0) if shares.shape[axis] == 1 else shares.sum(axis)


def join_parts(graph: GraphModule) -> None:
    """Replace the concatenation [..., d] that a gradient ends with, and the sums whose results it copies. Sums stay
    where they are if some operation changes memory: they might read it too late."""
    (output,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
    join = behind_views(output)
    if join is None or join.target is not aten.cat.default:
        return
    *lead, _ = join.meta["tensor"].shape
    parts: Any = join.args[0]
    if join.args[1:] not in ((len(lead),), (-1,)) or any(part.meta["tensor"].dtype != torch.float32 for part in parts):
        return
    fixed = any(mutates(node) for node in graph.graph.nodes)
    sources, axes = zip(*((part, -1) if fixed else shares_of(part) for part in parts), strict=True)
    with graph.graph.inserting_before(join):
        new = graph.graph.call_function(torch.ops.fedda.join.default, (list(sources), list(axes), lead))
    new.meta = join.meta
    join.replace_all_uses_with(new)


def shares_of(part: Node) -> tuple[Node, int]:
    """What a part is the sum of, and along which axis; the part itself and -1 if it is no such sum."""
    total = behind_views(part)
    if total is None or total.target is not aten.sum.dim_IntList or len(total.args) != 2 or total.kwargs:
        return part, -1
    source, axes = total.args
    if not isinstance(source, Node) or not isinstance(axes, list | tuple) or len(axes) != 1:
        return part, -1
    like, axis = source.meta["tensor"], int(axes[0])  # type: ignore[arg-type]
    axis %= len(like.shape)
    return (source, axis) if like.dtype == torch.float32 and 0 < like.shape[axis] <= MAX_SHARES else (part, -1)


def behind_views(node: Any) -> Node | None:
    """What a node is a view of, with all its numbers in the same order."""
    while isinstance(node, Node) and node.target in (aten.view.default, aten._unsafe_view.default) and is_view(node):
        node = node.args[0]
    return node if isinstance(node, Node) else None


@torch.library.impl(library, "join", "CompositeExplicitAutograd")
def _join(parts: list[Tensor], axes: list[int], lead: list[int]) -> Tensor:
    from .kernels import join

    n = math.prod(lead)
    shares = [v.movedim(axis, 0) if axis >= 0 else v[None] for v, axis in zip(parts, axes, strict=True)]
    shares = [v.reshape(len(v), n, v[0].numel() // n) for v in shares]
    with torch.cuda.device_of(shares[0]):  # Triton launches on the current device
        out = join.joined([v if v.stride(2) == 1 else v.contiguous() for v in shares])
    return out.view(*lead, -1)
