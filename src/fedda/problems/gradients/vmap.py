"""The gradients of a stack of clients in one call, by vmap over the gradient of one client."""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import grad, vmap

from ...checks import one_line, warn
from ...recording import record
from .kernels.launch import compile_and_run
from .stackable import stackable

logger = logging.getLogger(__name__)
# An operation without a batching rule runs one client at a time: PyTorch would ask our users to file an issue.
getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled", bool)(False)
Objective = Callable[..., Tensor]  # (x [d], inputs [b, ...], targets [b, ...]) -> loss []


class StackedGradient:
    """The gradients [points * n, d] of an objective at x [points * n, d] for batches [n, ...], which all points share.

    `vmap(grad(...))` is recorded once for each shape as plain tensor operations: on small models its dispatch costs
    more than the arithmetic. If vmap fails, the clients run in a loop, with one warning.

    With `frozen`, parts of the model are constant. What depends on the batch alone is then computed once for all
    points, and a constant layer is one operation for all clients.

    With `kernels`, a precision, our Triton layers take the place of PyTorch's where they fit. Errors are then raised.
    """

    def __init__(self, objective: Objective, frozen: bool = False, kernels: str | None = None):
        self.objective, self.frozen, self.kernels = objective, frozen, kernels
        self.of_clients: Callable[..., Tensor] = vmap(grad(stackable(objective, kernels)))
        self.by_shape: dict[object, Callable[..., Tensor]] = {}
        self.warned = False

    def __call__(self, x: Tensor, *batch: Tensor) -> Tensor:
        x = x.contiguous()  # a recording holds for the layout it was made with; at first all clients share one row
        shapes = tuple((v.shape, v.dtype, v.device) for v in (x, *batch))
        if shapes not in self.by_shape:
            self.by_shape[shapes] = self.record(x, *batch)
        return self.by_shape[shapes](x, *batch)

    def record(self, x: Tensor, *batch: Tensor) -> Callable[..., Tensor]:
        """A function for arguments of these shapes."""
        if self.kernels is not None:
            key = "layers", id(self), *((v.shape, v.dtype) for v in (x, *batch))
            # All in this thread: others would compile one kernel after the other.
            with torch.autograd.set_multithreading_enabled(False):
                compile_and_run(key, x, lambda: self.vmapped(x, *batch))
            return simplify(record(self.vmapped, x, *batch))
        try:
            self.vmapped(x, *batch)
        except Exception as why:  # a user's module may raise anything under vmap; the loop is always right
            if not self.warned:
                self.warned = True
                message = "vmap cannot take this model, its clients run one by one"
                warn(f"{message}: {one_line(why)}")
            return self.loop
        try:
            return simplify(record(self.vmapped, x, *batch))
        except Exception as why:  # a module that cannot be recorded still runs under vmap, but more slowly
            logger.info("not recorded, so slower: %s", why)
            return self.vmapped

    def vmapped(self, x: Tensor, *batch: Tensor) -> Tensor:
        n = len(batch[0])
        if not self.frozen or len(x) == n:
            return self.of_clients(x, *repeated(x, batch))
        of_points = vmap(self.of_clients, (0, *[None] * len(batch)))
        gradients: Tensor = of_points(x.unflatten(0, (-1, n)), *batch)
        return gradients.flatten(0, 1)

    def loop(self, x: Tensor, *batch: Tensor) -> Tensor:
        data = repeated(x, batch)
        return torch.stack([gradient(self.objective, *one) for one in zip(x, *data, strict=True)])


def repeated(x: Tensor, batch: Sequence[Tensor]) -> list[Tensor]:
    """The batches [n, ...], once for each point of x [points * n, d]."""
    points = len(x) // len(batch[0])
    if points == 1:
        return list(batch)
    return [v.expand(points, *v.shape).flatten(0, 1) for v in batch]


aten = torch.ops.aten
RESHAPES = (aten.expand.default, aten.view.default, aten._unsafe_view.default)
FILLS = {aten.ones_like.default: 1, aten.zeros_like.default: 0, aten.new_zeros.default: 0}


def simplify(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Remove operations that change nothing, that are done twice, or that have a constant result: on small models each
    of them costs as much as the arithmetic. A graph that mutates tensors or draws random numbers stays as it is."""
    calls = [node for node in graph.graph.nodes if node.op == "call_function" and hasattr(node.target, "_schema")]
    if any(n.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in n.target.tags for n in calls):
        return graph
    seen: dict[object, torch.fx.Node] = {}
    constants: dict[torch.fx.Node, Tensor] = {}
    for node in calls:
        same = _find_equal(node, seen)
        if same is not node:
            node.replace_all_uses_with(same)
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


def _find_equal(node: torch.fx.Node, seen: dict[object, torch.fx.Node]) -> torch.fx.Node:
    """An earlier node with the same result, or the node itself."""
    source = node.args[0] if node.args else None
    if isinstance(source, torch.fx.Node):
        if node.target in RESHAPES and node.meta["tensor"].shape == source.meta["tensor"].shape:
            return source
        if node.target is aten.mul.Scalar and node.args[1] == 1:
            return source
        transposes = node.target is aten.transpose.int and source.target is aten.transpose.int
        if transposes and node.args[1:] == source.args[1:] and isinstance(source.args[0], torch.fx.Node):
            return source.args[0]  # transposed twice
    # Node names are unique, so equal texts mean equal arguments.
    return seen.setdefault((node.target, str(node.args), str(node.kwargs)), node)


def _constant(node: torch.fx.Node, constants: dict[torch.fx.Node, Tensor]) -> Tensor | None:
    """The result of a node that does not depend on the inputs: shapes are fixed in a recording."""
    like = node.meta.get("tensor")
    if like is None:
        return None
    if node.target in FILLS:
        return torch.full(like.shape, FILLS[node.target], dtype=like.dtype, device=like.device)
    inputs = node.all_input_nodes
    if inputs and all(source in constants for source in inputs):
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda source: constants[source])
        value: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
        return value
    return None


def gradient(objective: Objective, x: Tensor, *data: Tensor) -> Tensor:
    """The gradient of one client by ordinary autograd: the reference."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(objective(x, *data), x)[0]
