"""Fuses the element-wise operations of a round into few kernels, so that arrays between two other operations (products,
sums) are read and written once.

A round is recorded as plain operations. Runs of element-wise operations become Triton kernels with the same rounding
(no multiply-add is contracted, divisions and roots are exact), so that every bit stays the same.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..compiling import side_by_side
from ..recording import TensorMeta, is_view, mutates, record
from .loops import merged
from .triton_code import CHECKED, COPIES, NAMES, expression, held

SMALL = 4096  # operations on fewer numbers, which depend on no earlier step, are not fused (see graphs.SideStream)
MAX_ARRAYS = 20  # arrays of one kernel
MAX_OPERATIONS = 100  # of one kernel
MIN_PIECE = 8  # numbers that a copy in another order writes side by side
BLOCK = 1024
LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
KERNELS: list[Fused] = []
CHECKS = 1 << 16  # numbers on which a function is compared with PyTorch's


library = torch.library.Library("fedda", "FRAGMENT")  # see problems/gradients/kernels/operators.py
library.define("fused(Tensor[] inputs, int kernel) -> Tensor[]")


@torch.library.impl(library, "fused", "CompositeExplicitAutograd")
def launch(inputs: list[Tensor], kernel: int) -> list[Tensor]:
    return KERNELS[kernel](*inputs)


def fused(module: GraphModule) -> GraphModule:
    """The same round, with clusters of element-wise operations as one kernel each.

    A cluster is open until another operation reads one of its results, or overwrites a tensor. Its kernel runs just
    before that operation. So an operation is delayed until it is needed, and meets as many others as possible.
    """
    clusters: list[Cluster] = []  # that are open; none reads a result of another
    aside: set[Node] = set()  # what runs on the side stream
    before = len(KERNELS)
    for node in list(module.graph.nodes):
        if independent(node, aside):
            aside.add(node)
        read = [c for c in clusters if any(source in c.root for source in node.all_input_nodes)]
        if read and (is_view(node) or node.target is getitem):
            read[0].add_view(node)
            continue
        own = None
        if elementwise(node) and (node not in aside or node.meta["tensor"].shape.numel() > SMALL):
            others = [c for c in reversed(clusters) if c not in read]
            own = next((c for c in (*read, *others) if c.takes(node)), None) or Cluster()
            own.add(node)
        for cluster in clusters if overwrites(node) else read:
            if cluster is not own:
                cluster.replace(module.graph, node)
                clusters = [c for c in clusters if c is not cluster]
        if own is not None and own not in clusters:
            clusters.append(own)
    module.graph.eliminate_dead_code()
    module.recompile()
    compile_all(KERNELS[before:])
    return module


def compile_all(kernels: Sequence[Fused]) -> None:
    if any(k.device.type == "cuda" for k in kernels):
        with torch.cuda.device(kernels[0].device), side_by_side():
            for k in kernels:
                k.warm_up()


def elementwise(node: Node) -> bool:
    """Whether the operation can be part of a kernel: its result is a dense array of floats or bool, and every bit of it
    is certain."""
    value = node.meta.get("tensor")
    if value is None or not (value.dtype.is_floating_point or value.dtype == torch.bool) or value.dtype not in NAMES:
        return False
    if not value.shape.numel() or not flat(value, value) or expression(node, lambda source: "x") is None:
        return False
    return node.target not in CHECKED or same_bits(node.target, value.dtype, value.device)


def independent(node: Node, others: set[Node]) -> bool:
    """Whether an operation depends on no earlier step, by the rule of `SideStream`."""
    value = node.meta.get("tensor")
    if node.op == "get_attr" and value is not None:
        return value.shape.numel() <= SMALL or not value.dtype.is_floating_point
    inputs = node.all_input_nodes
    counts = getattr(node.target, "overloadpacket", None) is torch.ops.aten.arange
    return counts or (node.op == "call_function" and bool(inputs) and others.issuperset(inputs) and not mutates(node))


def overwrites(node: Node) -> bool:
    # Collectives change their inputs, but their schema does not say so.
    return mutates(node) or getattr(node.target, "namespace", "") == "c10d"


class Cluster:
    """Element-wise operations on arrays of one length. Number i is the one at place i in the memory of all
    results, except for copies to another order, which no other operation of the cluster reads."""

    def __init__(self) -> None:
        self.members: list[Node] = []
        self.nodes: list[Node] = []  # with the views of their results
        self.root: dict[Node, Node] = {}  # the member whose memory a node shows
        self.moved: dict[Node, TensorMeta] = {}  # copies in another order, with what they copy

    def add(self, node: Node) -> None:
        source = node.all_input_nodes[0] if node.target in COPIES else None
        if source in self.root and not flat(source.meta["tensor"], node.meta["tensor"]):
            self.moved[node] = source.meta["tensor"]
        self.members.append(node)
        self.nodes.append(node)
        self.root[node] = node

    def add_view(self, node: Node) -> None:
        self.nodes.append(node)
        self.root[node] = self.root[node.all_input_nodes[0]]

    def takes(self, node: Node) -> bool:
        """Whether a node fits: it reads results of this cluster at its own place only, or copies one."""
        value, first = node.meta["tensor"], self.members[0].meta["tensor"]
        if value.shape.numel() != first.shape.numel() or value.device != first.device:
            return False
        for a in node.all_input_nodes:
            root, array = self.root.get(a), a.meta["tensor"]
            if root is None:
                continue
            if root in self.moved or array.dtype != root.meta["tensor"].dtype:  # a view as another type
                return False
            if not (flat(array, value) or moves(node)):
                return False
        members = [*self.members, node]
        arrays = len(self.sources(members)) + sum(self.needed(m, {*members}) for m in members)
        return arrays <= MAX_ARRAYS and len(members) <= MAX_OPERATIONS

    def sources(self, members: Sequence[Node]) -> list[Node]:
        return list(dict.fromkeys(a for m in members for a in m.all_input_nodes if a not in self.root))

    def needed(self, node: Node, members: set[Node]) -> bool:
        """Whether a result is read outside of the kernel, maybe through a view."""
        return any(u not in members and (u not in self.root or self.needed(u, members)) for u in node.users)

    def replace(self, graph: Graph, before: Node) -> None:
        """Replace the operations by one kernel before a node, with the views of its results behind it."""
        members = {*self.members}
        results = [node for node in self.members if self.needed(node, members)]
        if len(members) < 2 or not results:
            return
        with graph.inserting_before(before):
            sources = self.sources(self.members)
            out = graph.call_function(torch.ops.fedda.fused.default, (sources, self.kernel(sources, results)))
            for i, node in enumerate(results):
                part = graph.call_function(getitem, (out, i))
                part.meta["tensor"] = node.meta["tensor"]
                node.replace_all_uses_with(part, delete_user_cb=lambda user: user not in members)
        views = [node for node in self.nodes if node not in members]
        for node in reversed(self.nodes):
            if node in members or not node.users:
                graph.erase_node(node)
                views = [view for view in views if view is not node]
        for view in views:
            before.prepend(view)

    def kernel(self, sources: Sequence[Node], results: Sequence[Node]) -> int:
        value = self.members[0].meta["tensor"]
        text = self.text(sources, results)
        shapes = tuple((tuple(v.shape), v.strides, v.dtype) for v in (r.meta["tensor"] for r in results))
        dtypes = tuple(s.meta["tensor"].dtype for s in sources)
        return kernel(text, dtypes, shapes, value.shape.numel(), value.device)

    def text(self, sources: Sequence[Node], results: Sequence[Node]) -> str:
        """The source of the kernel."""
        length = self.members[0].meta["tensor"].shape.numel()
        mask = ", mask=inside" if length % BLOCK else ""
        names: dict[Any, str] = {}
        loads, body, stores = list[str](), list[str](), list[str]()
        far = length > (1 << 31) - BLOCK
        for k, node in enumerate(self.members):
            for source in node.all_input_nodes:
                if source in self.root:
                    names[node, source] = names[self.root[source]]
                    continue
                array = source.meta["tensor"]
                far = far or extent(array) >= 1 << 31
                at = position(array, node.meta["tensor"])
                if (source, at) not in names:
                    names[source, at] = f"x{len(loads)}"
                    wide = f".to(tl.{NAMES[held(array.dtype)]})" if held(array.dtype) != array.dtype else ""
                    where = f"I{sources.index(source)} + {at}{mask if at != '0' else ''}"
                    loads.append(f"x{len(loads)} = tl.load({where}){wide}")
                names[node, source] = names[source, at]
            body.append(f"v{k} = {expression(node, lambda source, node=node: names[node, source])}")  # type: ignore[misc]
            names[node] = f"v{k}"
        for k, node in enumerate(results):
            dtype = node.meta["tensor"].dtype
            narrow = f".to(tl.{NAMES[dtype]})" if held(dtype) != dtype else ""
            at = position(node.meta["tensor"], self.moved[node]) if node in self.moved else "i"
            stores.append(f"tl.store(O{k} + {at}, {names[node]}{narrow}{mask})")
        arguments = [f"I{k}" for k in range(len(sources))] + [f"O{k}" for k in range(len(results))]
        program = "tl.program_id(0)" + (".to(tl.int64)" if far else "")
        head = [f"i = {program} * {BLOCK} + tl.arange(0, {BLOCK})", *([f"inside = i < {length}"] if mask else [])]
        lines = "".join(f"    {line}\n" for line in (*head, *loads, *body, *stores))
        return f"""import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def fused({", ".join(arguments)}):
{lines}"""


def in_memory_order(array: TensorMeta, result: TensorMeta) -> tuple[list[int], list[int]]:
    """The axes of a loop over the memory of `result`, and the strides of an array that broadcasts to it."""
    missing = len(result.shape) - len(array.shape)
    strides = [0] * missing + [s if n > 1 else 0 for s, n in zip(array.strides, array.shape, strict=True)]
    order = sorted(range(len(result.shape)), key=lambda axis: -result.strides[axis])
    sizes, (steps,) = merged([result.shape[axis] for axis in order], [[strides[axis] for axis in order]])
    return sizes, steps


def flat(array: TensorMeta, result: TensorMeta) -> bool:
    """Whether number i in the memory of an array is the one that belongs to number i in the memory of the result."""
    return array.offset == 0 and in_memory_order(array, result) == ([result.shape.numel()], [1])


def moves(node: Node) -> bool:
    """Whether a node copies an array to another order, in pieces that are long enough to be written efficiently."""
    if node.target not in COPIES:
        return False
    array, result = node.all_input_nodes[0].meta["tensor"], node.meta["tensor"]
    sizes, strides = in_memory_order(result, array)
    return flat(array, array) and strides[-1] == 1 and sizes[-1] >= MIN_PIECE


def position(array: TensorMeta, result: TensorMeta) -> str:
    """The place in an array of what belongs to number i in the memory of the result."""
    sizes, strides = in_memory_order(array, result)
    terms, inner = [], math.prod(sizes)
    for n, stride in zip(sizes, strides, strict=True):
        whole, inner = inner, inner // n
        axis = f"i // {inner}" if inner > 1 else "i"
        axis = f"({axis}) % {n}" if whole < math.prod(sizes) else axis
        if stride:
            terms.append(f"({axis}) * {stride}" if stride > 1 else f"({axis})" if axis != "i" else axis)
    return " + ".join(terms) or "0"


def extent(array: TensorMeta) -> int:
    return sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))


@cache
def same_bits(op: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the code of a function gives PyTorch's bits, by a comparison on numbers of all magnitudes."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        inputs = []
        for _ in range(2 if "backward" in op._schema.name else 1):
            bits = torch.randint(-(1 << 31), 1 << 31, (CHECKS // 2,), generator=g).to(torch.int32).view(torch.float32)
            inputs.append(torch.cat([bits, torch.randn(CHECKS // 2, generator=g) * 4]).to(device, dtype))
        expected = op(*inputs)
        cluster = Cluster()
        try:
            for node in record(lambda: [op(*inputs)]).graph.nodes:
                if node.target is op:
                    cluster.add(node)
            sources = cluster.sources(cluster.members)
            (found,) = KERNELS[cluster.kernel(sources, cluster.members)](*inputs)
        except Exception:  # the interpreter has no libdevice, and older versions of Triton have not all functions
            return False
        whole = torch.int32 if dtype == torch.float32 else torch.int16
        equal = (found.view(whole) == expected.view(whole)) | (found.isnan() & expected.isnan())
        return bool(equal.all())


@dataclass(frozen=True)
class Fused:
    """A kernel for inputs of `dtypes`; `results` are (shape, strides, dtype)."""

    function: Any
    dtypes: tuple[torch.dtype, ...]
    results: tuple[tuple[Any, ...], ...]
    grid: tuple[int, ...]
    device: torch.device
    options: dict[str, Any]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        outputs = [torch.empty_strided(*size, dtype=dtype, device=self.device) for *size, dtype in self.results]
        with torch.cuda.device_of(outputs[0]):  # Triton launches on the current device
            self.function[self.grid](*inputs, *outputs, **self.options)
        return outputs

    def warm_up(self) -> None:
        """Compile it before its first launch."""
        self.function.warmup(*self.dtypes, *(dtype for *_, dtype in self.results), grid=self.grid, **self.options)


@cache
def kernel(
    text: str, dtypes: tuple[torch.dtype, ...], results: tuple[tuple[Any, ...], ...], length: int, device: torch.device
) -> int:
    """The number of a kernel in `KERNELS`. Triton reads its source from a file."""
    name = "fused_" + hashlib.sha256(text.encode()).hexdigest()[:16]
    file = folder() / f"{name}.py"
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # PyTorch's functions keep denormal numbers. Older versions of Triton do not have the option.
    options = LAUNCH | ({"enable_reflect_ftz": False} if "libdevice." in text else {})
    KERNELS.append(Fused(module.fused, dtypes, results, (-(-length // BLOCK),), device, options))
    return len(KERNELS) - 1


@cache
def folder() -> Path:
    path = Path(tempfile.mkdtemp(prefix="fedda-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path
