"""A function of tensors run once and written down as plain operations, which are run again on other numbers.

What make_fx of PyTorch does, for functions that look at no number, without its compiler's seconds to import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class TensorMeta:
    """What is known of an operation's result before it is run again: everything but its numbers."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def recorded(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """The operations of `function(*inputs)`, a tensor or a list of them, as a module of the same arguments.

    Tensors that it uses and neither gets nor makes are held, not copied: what they hold then, counts. The function must
    not look at a number of a tensor, since that number would stay.

    >>> scale = torch.tensor([2.0])
    >>> module = recorded(lambda x: [x * scale + 1], torch.tensor([1.0]))
    >>> scale.fill_(3.0), module(torch.tensor([10.0]))
    (tensor([3.]), [tensor([31.])])
    """
    recorder = Recorder(inputs)
    with recorder:
        results = function(*inputs)
    return recorder.module(results)


class Mode(TorchDispatchMode):
    """Sees every operation. Without the first line PyTorch would import its compiler, to keep it out of here."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Recorder(Mode):
    def __init__(self, inputs: Sequence[Tensor]):
        super().__init__()
        self.graph, self.held = Graph(), torch.nn.Module()
        self.nodes: Any = WeakTensorKeyDictionary()  # a tensor that is gone gives its id to another
        for i, v in enumerate(inputs):
            self.nodes[v] = self.known(self.graph.placeholder(f"input{i}"), v)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in op.tags:
            raise ValueError(f"{op} looks at a number")
        kwargs = kwargs or {}
        out = op(*args, **kwargs)
        known = tree_map_only((Tensor, torch.ScriptObject), self.node, (tuple(args), dict(kwargs)))
        self.remember(self.graph.call_function(op, *known), out)
        return out

    def remember(self, node: Node, out: Any) -> None:
        """The tensors of a result, which may be a list in a list: an all-reduce gives back what it has changed."""
        if isinstance(out, Tensor):
            self.nodes[out] = self.known(node, out)
        elif isinstance(out, list | tuple):
            for i, v in enumerate(out):
                if isinstance(v, Tensor | list | tuple):
                    self.remember(self.graph.call_function(getitem, (node, i)), v)

    def node(self, v: Any) -> Node:
        """Where a tensor comes from; one that nothing here has made is held, as is a group of processes."""
        if not isinstance(v, Tensor):
            setattr(self.held, name := f"group{len(self.graph.nodes)}", v)
            return self.graph.get_attr(name)
        if v not in self.nodes:
            name = f"held{len(self.held._buffers)}"
            self.held.register_buffer(name, v)
            self.nodes[v] = self.known(self.graph.get_attr(name), v)
        found: Node = self.nodes[v]
        return found

    @staticmethod
    def known(node: Node, v: Tensor) -> Node:
        node.meta["kind"] = TensorMeta(v.shape, v.stride(), v.dtype, v.device)
        return node

    def module(self, results: Any) -> GraphModule:
        self.graph.output(tree_map_only(Tensor, self.node, results))
        return GraphModule(self.held, self.graph)
