"""Fuses the vector updates of a round into few kernels, so that the vectors between two gradients are read and written
once.

A round is recorded as plain operations. Runs of element-wise operations become Triton kernels with the same rounding
(no multiply-add is contracted, divisions and roots are exact), so that every bit stays the same.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import math
import shutil
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..compiling import side_by_side
from ..recording import TensorMeta

aten = torch.ops.aten
SMALL = 4096  # operations on fewer numbers are not fused (see graphs.SideStream)
MAX_ARRAYS = 20  # arrays of one kernel
BLOCK = 1024
FLOAT = {torch.float32: "float32", torch.float64: "float64"}
# The operations and their Triton code; every argument is an array or a number of the result's dtype.
CODE: dict[Any, str] = {
    aten.add.Tensor: "{0} + {1}",
    aten.sub.Tensor: "{0} - {1}",
    aten.mul.Tensor: "{0} * {1}",
    aten.div.Tensor: "tl.div_rn({0}, {1})",
    aten.neg.default: "{0} * -1.0",  # Triton's minus is 0 - x, which has no -0
    aten.rsub.Scalar: "{1} - {0}",
    aten.sqrt.default: "tl.sqrt_rn({0})",
    aten.abs.default: "tl.abs({0})",
    aten.where.self: "tl.where({0}, {1}, {2})",
    aten.pow.Tensor_Scalar: "{0} * {0}",  # squares only
}
DOUBLE = {aten.div.Tensor: "{0} / {1}", aten.sqrt.default: "tl.sqrt({0})"}  # exact in float64
LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
KERNELS: list[Fused] = []


library = torch.library.Library("fedda", "FRAGMENT")  # see problems/gradients/kernels/operators.py
library.define("fused(Tensor[] inputs, int kernel) -> Tensor[]")


@torch.library.impl(library, "fused", "CompositeExplicitAutograd")
def launch(inputs: list[Tensor], kernel: int) -> list[Tensor]:
    return KERNELS[kernel](*inputs)


def fused(module: GraphModule) -> GraphModule:
    """The same round, with each run of element-wise operations as one kernel."""
    cluster: list[Node] = []
    before = len(KERNELS)
    for node in list(module.graph.nodes):
        if elementwise(node):
            if not fits(cluster, node):
                replace(module.graph, cluster, node)
                cluster = []
            cluster.append(node)
        elif reads(node, cluster) or overwrites(node):
            replace(module.graph, cluster, node)
            cluster = []
    module.graph.eliminate_dead_code()
    module.recompile()
    compile_all(KERNELS[before:])
    return module


def compile_all(kernels: Sequence[Fused]) -> None:
    if any(k.device.type == "cuda" for k in kernels):
        with torch.cuda.device(kernels[0].device), side_by_side():
            for k in kernels:
                k.function.warmup(*k.dtypes, *(dtype for *_, dtype in k.results), grid=k.grid, **LAUNCH)


def elementwise(node: Node) -> bool:
    """Whether the operation can be part of a kernel: a large array of floats from such arrays and numbers."""
    value = node.meta.get("tensor")
    if node.target not in CODE or value is None or value.dtype not in FLOAT or node.kwargs:
        return False
    if value.shape.numel() <= SMALL or len(value.shape) > 3:
        return False
    if node.target is aten.pow.Tensor_Scalar and node.args[1] != 2:
        return False
    arrays: list[Any] = [a.meta.get("tensor") for a in node.args if isinstance(a, Node)]
    numbers = [a for a in node.args if not isinstance(a, Node)]
    condition = node.target is aten.where.self
    if node.target is aten.div.Tensor and any(inverse(n, value.dtype) is None for n in numbers):
        return False
    if len(node.args) > 2 + condition:  # rsub has a third, alpha
        return False
    return all(isinstance(n, int | float) for n in numbers) and all(
        a is not None
        and a.device == value.device
        and (a.dtype == value.dtype or (condition and i == 0 and a.dtype == torch.bool))
        for i, a in enumerate(arrays)
    )


def fits(cluster: list[Node], node: Node) -> bool:
    arrays = {a for member in (*cluster, node) for a in (member, *member.all_input_nodes)}
    try:
        np.broadcast_shapes(*(member.meta["tensor"].shape for member in (*cluster, node)))
    except ValueError:
        return False
    return len(arrays) <= MAX_ARRAYS and all(m.meta["tensor"].dtype == node.meta["tensor"].dtype for m in cluster)


def reads(node: Node, cluster: list[Node]) -> bool:
    return any(source in cluster for source in node.all_input_nodes)


def overwrites(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    # Collectives change their inputs, but their schema does not say so.
    return schema is not None and (schema.is_mutable or node.target.namespace == "c10d")  # type: ignore[union-attr]


def replace(graph: Graph, cluster: list[Node], before: Node) -> None:
    """Replace the nodes of a cluster by one kernel, just before the first of its results is read."""
    members = set(cluster)
    results = [node for node in cluster if any(user not in members for user in node.users)]
    if len(cluster) < 2 or not results:
        return
    sources = list(dict.fromkeys(s for node in cluster for s in node.all_input_nodes if s not in members))
    domain = np.broadcast_shapes(*(node.meta["tensor"].shape for node in cluster))
    text = source_text(cluster, sources, results, (1,) * (3 - len(domain)) + tuple(domain))
    shapes = tuple((tuple(v.shape), v.strides, v.dtype) for v in (r.meta["tensor"] for r in results))
    dtypes = tuple(s.meta["tensor"].dtype for s in sources)
    number = kernel(text, dtypes, shapes, tuple(domain), cluster[0].meta["tensor"].device)
    with graph.inserting_before(before):
        out = graph.call_function(torch.ops.fedda.fused.default, (sources, number))
        for i, node in enumerate(results):
            part = graph.call_function(getitem, (out, i))
            part.meta["tensor"] = node.meta["tensor"]
            node.replace_all_uses_with(part, delete_user_cb=lambda user: user not in members)
    for node in reversed(cluster):
        graph.erase_node(node)


def source_text(cluster: list[Node], sources: list[Node], results: list[Node], domain: tuple[int, ...]) -> str:
    """The kernel: one program per block of a row. Broadcast inputs are read by every row, and written by the first."""
    names: dict[Node, str] = {}
    body = []
    for i, node in enumerate(sources):
        names[node] = f"i{i}"
        at = offset(node.meta["tensor"])
        body.append(f"i{i} = tl.load(I{i} + {at}{', mask=inside' if 'd *' in at else ''})")
    for i, node in enumerate(cluster):
        names[node] = f"v{i}"
        body.append(f"v{i} = {expression(node, names)}")
    for i, node in enumerate(results):
        value = node.meta["tensor"]
        shape = (1,) * (3 - len(value.shape)) + tuple(value.shape)
        fixed = [f" & ({axis} == 0)" for axis, n, whole in zip("rcd", shape, domain, strict=True) if n < whole]
        at = offset(value)
        body.append(f"tl.store(O{i} + {at} + d * 0, {names[node]}, mask=inside{''.join(fixed)})")
    arguments = [f"I{i}" for i in range(len(sources))] + [f"O{i}" for i in range(len(results))]
    head = f"""import triton
import triton.language as tl


@triton.jit
def fused({", ".join(arguments)}):
    program = tl.program_id(0)
    d = program % {blocks(domain)} * {BLOCK} + tl.arange(0, {BLOCK})
    row = (program // {blocks(domain)}).to(tl.int64)
    r = row // {domain[1]}
    c = row % {domain[1]}
    inside = d < {domain[2]}
"""
    return head + "".join(f"    {line}\n" for line in body)


def expression(node: Node, names: dict[Node, str]) -> str:
    dtype = node.meta["tensor"].dtype
    values = [names[a] if isinstance(a, Node) else literal(a, dtype) for a in node.args]
    cuda = node.meta["tensor"].device.type == "cuda"
    if cuda and node.target is aten.div.Tensor and not isinstance(node.args[1], Node):
        return f"{values[0]} * {literal(inverse(node.args[1], dtype), dtype)}"
    code = CODE | DOUBLE if dtype == torch.float64 else CODE
    return code[node.target].format(*values)


def inverse(number: Any, dtype: torch.dtype) -> float | None:
    """On a GPU PyTorch divides by a number by multiplying with its inverse: this inverse, or None if it is not certain.
    In single precision PyTorch 2.11 inverts the exact number, older versions the rounded one.

    >>> inverse(3, torch.float32) == single(1 / 3), inverse(1 - 0.999, torch.float32), inverse(0, torch.float64)
    (True, None, None)
    """
    if not number or dtype == torch.float64:
        return 1.0 / number if number else None
    exact, rounded = single(1.0 / number), single(1.0 / single(float(number)))
    return exact if exact == rounded else None


def literal(number: Any, dtype: torch.dtype) -> str:
    value = single(float(number)) if dtype == torch.float32 else float(number)
    text = repr(value) if math.isfinite(value) else f'float("{value}")'
    return f"tl.full((), {text}, tl.{FLOAT[dtype]})"


def single(number: float) -> float:
    """Rounded to float32."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def offset(array: TensorMeta) -> str:
    """The offset of row (r, c) and column d of the domain in an array that broadcasts to it."""
    strides = [s if n > 1 else 0 for s, n in zip(array.strides, array.shape, strict=True)]
    strides = [0] * (3 - len(strides)) + strides
    return " + ".join(f"{axis} * {stride}" for axis, stride in zip("rcd", strides, strict=True) if stride) or "0"


@dataclass(frozen=True)
class Fused:
    """A kernel for inputs of `dtypes`; `results` are (shape, strides, dtype)."""

    function: Any
    dtypes: tuple[torch.dtype, ...]
    results: tuple[tuple[Any, ...], ...]
    grid: tuple[int, ...]
    device: torch.device

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        outputs = [torch.empty_strided(*size, dtype=dtype, device=self.device) for *size, dtype in self.results]
        with torch.cuda.device_of(outputs[0]):  # Triton launches on the current device
            self.function[self.grid](*inputs, *outputs, **LAUNCH)
        return outputs


@cache
def kernel(
    text: str, dtypes: tuple[torch.dtype, ...], results: tuple[tuple[Any, ...], ...], domain: tuple[int, ...],
    device: torch.device,
) -> int:  # fmt: skip
    """The number of a kernel in `KERNELS`. Triton reads its source from a file."""
    name = "fused_" + hashlib.sha256(text.encode()).hexdigest()[:16]
    file = folder() / f"{name}.py"
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    grid = (blocks(domain) * math.prod(domain[:-1]),)  # one axis, because the others have at most 65,535 blocks
    KERNELS.append(Fused(module.fused, dtypes, results, grid, device))
    return len(KERNELS) - 1


def blocks(domain: tuple[int, ...]) -> int:
    """Blocks per row."""
    return -(-domain[-1] // BLOCK)


@cache
def folder() -> Path:
    path = Path(tempfile.mkdtemp(prefix="fedda-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path
