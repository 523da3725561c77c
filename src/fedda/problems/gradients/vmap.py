"""One client's gradient made into that of a whole stack of clients, in one call."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from ...checks import one_line
from ...recording import recorded

logger = logging.getLogger(__name__)
Objective = Callable[..., Tensor]  # (x [d], inputs [b, ...], targets [b, ...]) -> loss []


class StackedGradient:
    """grad(objective) over a leading axis of every argument.

    `vmap(grad(...))` is recorded once for each shape as plain tensor operations: on small models its dispatch costs
    more than the arithmetic. What vmap cannot take is done in a loop, which is said once.
    """

    def __init__(self, objective: Objective):
        self.objective = objective
        self.stacked: Callable[..., Tensor] = vmap(grad(objective))
        self.traced: dict[Any, Callable[..., Tensor]] = {}
        self.said = False

    def __call__(self, x: Tensor, *data: Tensor) -> Tensor:
        shapes = tuple((v.shape, v.dtype, v.device) for v in (x, *data))
        if shapes not in self.traced:
            self.traced[shapes] = self.trace(x, *data)
        return self.traced[shapes](x, *data)

    def trace(self, x: Tensor, *data: Tensor) -> Callable[..., Tensor]:
        try:
            self.stacked(x, *data)
        except Exception as why:  # whatever the user's module raises under vmap, the loop is right
            if not self.said:
                self.said = True
                words = "vmap cannot take this model, its clients run one by one"
                warnings.warn(f"{words}: {one_line(why)}", stacklevel=2)
            return self.loop
        try:
            return simplified(recorded(self.stacked, x, *data))
        except Exception as why:  # a module that cannot be recorded still runs under vmap, only slower
            logger.info("not recorded, so slower: %s", why)
            return self.stacked

    def loop(self, x: Tensor, *data: Tensor) -> Tensor:
        return torch.stack([gradient(self.objective, *one) for one in zip(x, *data, strict=True)])


aten = torch.ops.aten
RESHAPES = (aten.expand.default, aten.view.default, aten._unsafe_view.default)
FILLS = {aten.ones_like.default: 1, aten.zeros_like.default: 0, aten.new_zeros.default: 0}


def simplified(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same graph without operations that change nothing, are done twice, or have a constant result: on small models
    each costs as much as the arithmetic. A graph that mutates or draws random numbers is left alone."""
    calls = [node for node in graph.graph.nodes if node.op == "call_function" and hasattr(node.target, "_schema")]
    if any(n.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in n.target.tags for n in calls):
        return graph
    seen: dict[Any, torch.fx.Node] = {}
    constants: dict[torch.fx.Node, Tensor] = {}
    for node in calls:
        twin = _twin(node, seen)
        if twin is not node:
            node.replace_all_uses_with(twin)
            graph.graph.erase_node(node)
            continue
        value = _constant(node, constants)
        if value is not None:
            constants[node] = value
    for i, (node, value) in enumerate(constants.items()):
        if any(user not in constants for user in node.users):
            graph.register_buffer(f"constant{i}", value)
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.get_attr(f"constant{i}"))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _twin(node: torch.fx.Node, seen: dict[Any, torch.fx.Node]) -> torch.fx.Node:
    """An earlier node with the same result, or the node itself."""
    source: Any = node.args[0] if node.args else None
    if node.target in RESHAPES and node.meta["kind"].shape == source.meta["kind"].shape:
        return source
    if node.target is aten.mul.Scalar and node.args[1] == 1:
        return source
    if node.target is aten.transpose.int and source.target is aten.transpose.int and node.args[1:] == source.args[1:]:
        return source.args[0]  # there and back
    # Nodes are named uniquely in the arguments' text, so equal texts mean equal arguments.
    return seen.setdefault((node.target, str(node.args), str(node.kwargs)), node)


def _constant(node: torch.fx.Node, constants: dict[torch.fx.Node, Tensor]) -> Tensor | None:
    """The result of a node that depends on no input: shapes are fixed in a trace."""
    like = node.meta.get("kind")
    if like is None:
        return None
    if node.target in FILLS:
        return torch.full(like.shape, FILLS[node.target], dtype=like.dtype, device=like.device)
    inputs = node.all_input_nodes
    if inputs and all(source in constants for source in inputs):
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda source: constants[source])
        return node.target(*args, **kwargs)  # type: ignore[operator]
    return None


def gradient(objective: Objective, x: Tensor, *data: Tensor) -> Tensor:
    """One client's gradient by ordinary autograd: the truth."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(objective(x, *data), x)[0]
