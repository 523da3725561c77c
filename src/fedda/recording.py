"""Records a function of tensors as plain operations, which can then run on other numbers.

It does what PyTorch's make_fx does, for functions that read no number of a tensor, without the seconds that importing
PyTorch's compiler takes.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from operator import getitem
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class TensorMeta:
    """Shape, strides, place in its memory, dtype and device of an operation's result."""

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


def record(function: Callable[..., Any], *inputs: Tensor, most: int | None = None) -> GraphModule:
    """The operations of `function(*inputs)`, which returns a tensor or a list of tensors, as a module of the same
    arguments. If it has more than `most` operations, it is interrupted by a ValueError.

    Tensors from outside are held by reference: the module uses the values that they have when it runs. The function
    must not read a number of a tensor, because that number would be constant in the module.

    >>> scale = torch.tensor([2.0])
    >>> module = record(lambda x: [x * scale + 1], torch.tensor([1.0]))
    >>> scale.fill_(3.0), module(torch.tensor([10.0]))
    (tensor([3.]), [tensor([31.])])
    """
    # Two arguments that are one tensor here may be two when the module runs.
    inputs = tuple(v.view_as(v) if any(v is other for other in inputs[:i]) else v for i, v in enumerate(inputs))
    recorder = Recorder(inputs, most)
    with recorder:
        results = function(*inputs)
    return recorder.module(results)


def is_recording() -> bool:
    """Whether the operations of this thread are recorded."""
    return Recorder.depth.get() > 0


class Mode(TorchDispatchMode):
    """A mode that sees every operation. Without this method PyTorch would import its compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Recorder(Mode):
    depth: ClassVar[ContextVar[int]] = ContextVar("recordings under way", default=0)

    def __init__(self, inputs: Sequence[Tensor], most: int | None = None):
        super().__init__()
        self.most = most
        self.graph, self.held = Graph(), torch.nn.Module()
        self.nodes: Any = WeakTensorKeyDictionary()  # not by id: a new tensor may get the id of a deleted one
        for i, v in enumerate(inputs):
            self.nodes[v] = self.with_meta(self.graph.placeholder(f"input{i}"), v)

    def __enter__(self) -> Any:
        self.depth.set(self.depth.get() + 1)
        return super().__enter__()

    def __exit__(self, *why: Any) -> None:
        self.depth.set(self.depth.get() - 1)
        super().__exit__(*why)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in op.tags:
            raise ValueError(f"{op} reads a number")
        if self.most is not None and len(self.graph.nodes) > self.most:
            raise ValueError(f"there are more than {self.most:,} operations")
        kwargs = kwargs or {}
        depth = self.depth.set(0)  # an operator of ours computes as usual
        try:
            out = op(*args, **kwargs)
        finally:
            self.depth.reset(depth)
        nodes = tree_map_only((Tensor, torch.ScriptObject), self.node, (tuple(args), dict(kwargs)))
        self.remember(self.graph.call_function(op, *nodes), out)
        return out

    def remember(self, node: Node, out: Any) -> None:
        """Note the node of every tensor in a result, which may be a nested list (that of an all-reduce is)."""
        if isinstance(out, Tensor):
            self.nodes[out] = self.with_meta(node, out)
        elif isinstance(out, list | tuple):
            for i, v in enumerate(out):
                if isinstance(v, Tensor | list | tuple):
                    self.remember(self.graph.call_function(getitem, (node, i)), v)

    def node(self, v: Any) -> Node:
        """The node of a tensor. A tensor from outside is held, and so is a process group."""
        if not isinstance(v, Tensor):
            setattr(self.held, name := f"group{len(self.graph.nodes)}", v)
            return self.graph.get_attr(name)
        if v not in self.nodes:
            name = f"held{len(self.held._buffers)}"
            self.held.register_buffer(name, v)
            self.nodes[v] = self.with_meta(self.graph.get_attr(name), v)
        node: Node = self.nodes[v]
        return node

    @staticmethod
    def with_meta(node: Node, v: Tensor) -> Node:
        node.meta["tensor"] = TensorMeta(v.shape, v.stride(), int(v.storage_offset()), v.dtype, v.device)
        return node

    def module(self, results: Any) -> GraphModule:
        self.graph.output(tree_map_only(Tensor, self.node, results))
        return GraphModule(self.held, self.graph)


# -- what recorded operations do to memory -----------------------------------------------------------------------------
aten = torch.ops.aten
VIEWS = (
    aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
)  # fmt: skip


def mutates(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def changed_by(node: Node) -> list[Node]:
    """The arrays that an operation changes in place, or to which it writes its results, in their order."""
    if not mutates(node):
        return []
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {a.name: value for a, value in zip(arguments, node.args, strict=False)} | dict(node.kwargs)
    changed: Any = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [array for array in tree_leaves(changed) if isinstance(array, Node)]


def is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return node.target in VIEWS or any(result.alias_info is not None for result in schema.returns)


def out_of_place(op: Any) -> Any:
    """The operation that computes what `op` writes to its first argument; None if there is none."""
    name = op._schema.name.removeprefix("aten::")
    if op.namespace != "aten" or not name.endswith("_") or name.endswith("__"):
        return None
    return getattr(getattr(aten, name[:-1], None), op._overloadname, None)
