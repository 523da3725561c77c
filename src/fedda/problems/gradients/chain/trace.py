"""The layers of a module with a `forward` of its own, if it applies one known layer after the other.

PyTorch's symbolic tracing runs `forward` with a stand-in for the input and notes the calls. They are then repeated on
random inputs, and each layer is compared with its call. At the end the outputs and gradients of the module are compared
with those of its layers, for batches of several sizes: a module that does something else is not taken.
"""

import copy
import operator
import pickle
import random
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node, Tracer
from torch.nn import functional as F

LAYERS = (nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.ReLU, nn.Flatten, nn.Identity, nn.Dropout)
RELU = {F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"}
POOL = {F.max_pool2d, torch.max_pool2d}
RESHAPE = {torch.flatten, torch.reshape, torch.squeeze, operator.getitem, "flatten", "view", "reshape", "squeeze"}
POOL_ARGUMENTS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
COLUMNS = [(slice(None), 0), (slice(None), -1), (..., 0), (..., -1)]  # y[:, 0]: the one output of each sample
SAMPLES = 3
OTHER_SIZES = (1, 4)  # a `forward` can depend on the size of the batch


def layers_of(model: nn.Module, sample: tuple[int, ...]) -> list[nn.Module] | None:
    """The layers that `model` applies to samples of this shape, in order; None if it is not a chain of known ones."""
    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    first = next(model.parameters(), None)
    if first is None or not all(type(leaf) in LAYERS for leaf in leaves) or has_own_buffers(model):
        return None
    generator = torch.Generator().manual_seed(0)

    def inputs(samples: int) -> Tensor:
        return torch.randn(samples, *sample, generator=generator).to(first.dtype)

    before = random_state()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            own, *others = copies = [copy.deepcopy(model).cpu() for _ in range(3)]
            others[0].train(), others[1].eval()
            attributes = [dict(vars(module)) for module in own.modules()]
            graphs = [Tracer().trace(one) for one in copies]
            if len({str(graph) for graph in graphs}) > 1:  # in training or evaluation it does something else
                return None
            collector = Collector(GraphModule(others[1], graphs[2]))
            with torch.no_grad():
                collector.run(inputs(SAMPLES))
            layers = [own.get_submodule(name) if name else layer for name, layer in collector.layers]
            alike = all(acts_like(own, layers, inputs(samples)) for samples in OTHER_SIZES)
            # A `forward` that changes its module or draws random numbers can do something else the next time.
            kept = all(unchanged(old, vars(module)) for old, module in zip(attributes, own.modules(), strict=True))
            if not (alike and kept and random_state() == before):
                return None
    except Exception:  # `forward` cannot be traced, is not a chain, or does not take such samples
        return None
    return [model.get_submodule(name) if name else layer for name, layer in collector.layers]


def has_own_buffers(model: nn.Module) -> bool:
    """Whether a module that is not a known layer has buffers: its `forward` could depend on them."""
    return any(next(m.buffers(recurse=False), None) is not None for m in model.modules() if type(m) not in LAYERS)


def acts_like(model: nn.Module, layers: list[nn.Module], inputs: Tensor) -> bool:
    """Whether a module and its layers, one after the other, have the same gradients and the same outputs, with autograd
    and without."""
    results = []
    for function in (model, nn.Sequential(*layers)):
        with torch.no_grad():
            plain = function(inputs.clone())
        output = function(inputs.clone())
        gradients = torch.autograd.grad(output.square().sum(), list(model.parameters()))
        results.append((plain, output, *gradients))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def unchanged(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return before.keys() == now.keys() and all(now[name] is value for name, value in before.items())


def random_state() -> bytes:
    """Of all generators that a `forward` is likely to use."""
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy()))


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
        elif not isinstance(result, int | torch.Size):  # sizes are arguments of a reshape
            raise ValueError("not a chain")
        return result

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
        if node.target is operator.getitem and node.args[1] not in COLUMNS:
            raise ValueError("a part of the batch")
        if node.target in RESHAPE:  # to features or, for one output, to a number per sample
            return None, nn.Flatten() if result.dim() > 1 else nn.Flatten(0)
        raise ValueError(f"unknown call {node.target}")
