"""The layers of a module with a `forward` of its own, if it applies one known layer after the other.

PyTorch's symbolic tracing runs `forward` with a stand-in for the input and notes the calls. They are then repeated on
random inputs, and each layer is compared with its call: a module that does something else is not taken.
"""

import copy
import operator
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node, Tracer
from torch.nn import functional as F

LAYERS = (nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.ReLU, nn.Flatten, nn.Identity, nn.Dropout)
RELU = {F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"}
POOL = {F.max_pool2d, torch.max_pool2d}
RESHAPE = {torch.flatten, torch.reshape, torch.squeeze, operator.getitem, "flatten", "view", "reshape", "squeeze"}
POOL_ARGUMENTS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
SAMPLES = 3


def layers_of(model: nn.Module, sample: tuple[int, ...]) -> list[nn.Module] | None:
    """The layers that `model` applies to samples of this shape, in order; None if it is not a chain of known ones."""
    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    first = next(model.parameters(), None)
    if first is None or not all(type(leaf) in LAYERS for leaf in leaves):
        return None
    try:
        with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            copies = [copy.deepcopy(model).train(mode) for mode in (True, False)]
            graphs = [Tracer().trace(own) for own in copies]
            if str(graphs[0]) != str(graphs[1]):  # in evaluation it does something else
                return None
            collector = Collector(GraphModule(copies[1], graphs[1]))
            collector.run(torch.randn(SAMPLES, *sample, dtype=first.dtype, device=first.device))
    except Exception:  # `forward` cannot be traced, is not a chain, or does not take such samples
        return None
    return [layer if name is None else model.get_submodule(name) for name, layer in collector.layers]


class Collector(Interpreter):
    """Runs the calls one after the other, and collects a layer for each: its name in the module, if it has one."""

    def __init__(self, module: GraphModule):
        super().__init__(module)
        self.layers: list[tuple[str | None, nn.Module]] = []
        self.node: Node | None = None  # the last call, and its result
        self.value: Any = None

    def run_node(self, node: Node) -> Any:
        result = super().run_node(node)
        if node.op == "placeholder":
            if self.node is None:
                self.node, self.value = node, result
            elif node.users:
                raise ValueError("a second input")
        elif node.op == "output":
            if node.args != (self.node,):
                raise ValueError("the output is not the result of the last layer")
        elif isinstance(result, Tensor):
            if not node.args or node.args[0] is not self.node:
                raise ValueError("not a chain")
            name, layer = self.layer(node, result)
            if not torch.equal(layer(self.value), result):
                raise ValueError("another function")
            self.layers.append((name, layer))
            self.node, self.value = node, result
        return result  # the size of a batch is not a tensor: it is an argument of a reshape

    def layer(self, node: Node, result: Tensor) -> tuple[str | None, nn.Module]:
        """The layer of one call."""
        if node.op == "call_module":
            return str(node.target), self.module.get_submodule(str(node.target))
        if node.target in RELU:
            return None, nn.ReLU()
        if node.target in POOL:
            given = dict(zip(POOL_ARGUMENTS, node.args[1:], strict=False)) | dict(node.kwargs)
            options: dict[str, Any] = {name: v for name, v in given.items() if name in POOL_ARGUMENTS}
            return None, nn.MaxPool2d(**options)
        if node.target in RESHAPE:  # to features or, for one output, to a number per sample
            return None, nn.Flatten() if result.dim() > 1 else nn.Flatten(0)
        raise ValueError(f"unknown call {node.target}")
