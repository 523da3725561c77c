"""The gradients of a stack of clients in one call, by vmap over the loss of one client."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.fx import GraphModule, Node

from ...checks import one_line, warn
from ...recording import changed_by, is_view, mutates, out_of_place, record
from .joining import join_parts
from .kernels.launch import compile_and_run
from .stackable import stackable

logger = logging.getLogger(__name__)
# An operation without a batching rule runs one client at a time: PyTorch would ask our users to file an issue.
getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled", bool)(False)
Objective = Callable[..., Tensor]  # (x [d], inputs [b, ...], targets [b, ...]) -> loss []


class StackedGradient:
    """The gradients [points * n, d] of an objective at x [points * n, d] for batches [n, ...], which all points share.

    The losses of all clients are one call under vmap. The gradient of their sum by x has a row for each client, because
    a loss depends on one row of x alone. (The gradient is taken outside of vmap: inside, PyTorch would split gradients
    of norms into many operations, and import its compiler.) All this is recorded once for each shape as plain tensor
    operations: on small models its dispatch costs more than the arithmetic. If that fails, as for a model that
    registers hooks on its tensors, the gradients are taken inside of vmap. If vmap fails, the clients run in a loop,
    with one warning.

    With `frozen`, parts of the model are constant. What depends on the batch alone is then computed once for all
    points, and a constant layer is one operation for all clients.

    With `kernels`, a precision, our Triton layers take the place of PyTorch's where they fit. Errors are then raised.
    If `last`, the channels of a pixel lie side by side.
    """

    def __init__(self, objective: Objective, frozen: bool = False, kernels: str = "", last: bool = False):
        self.objective, self.frozen, self.kernels = objective, frozen, kernels
        self.losses: Callable[..., Tensor] = vmap(stackable(objective, kernels, last))
        self.gradients: Callable[..., Tensor] = vmap(grad(stackable(objective)))
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
        if self.kernels:
            key = "layers", id(self), *((v.shape, v.dtype) for v in (x, *batch))
            # All in this thread: others would compile one kernel after the other.
            with torch.autograd.set_multithreading_enabled(False):
                compile_and_run(key, x, lambda: self.vmapped(x, *batch))
            graph = record(self.vmapped, x, *batch)
            replace_changes_in_place(graph)
            join_parts(graph)
            return simplify(graph)
        reason = ""
        for function in (self.vmapped, self.vmapped_gradients):
            try:
                function(x, *batch)
                break
            except Exception as why:  # a user's module may raise anything under vmap; the loop is always right
                reason = one_line(why)
        else:
            if not self.warned:
                self.warned = True
                warn(f"vmap cannot take this model, its clients run one by one: {reason}")
            return self.loop
        try:
            return simplify(record(function, x, *batch))
        except Exception as why:  # a module that cannot be recorded still runs under vmap, but more slowly
            logger.info("not recorded, so slower: %s", why)
            return function

    @property
    def calls_model(self) -> bool:
        """Whether the model itself runs in every call, because it could not be recorded."""
        return not all(isinstance(function, GraphModule) for function in self.by_shape.values())

    def vmapped(self, x: Tensor, *batch: Tensor) -> Tensor:
        if not self.frozen or len(x) == len(batch[0]):
            return gradient(self.losses, x, *repeated(x, batch))
        of_points = vmap(self.losses, (0, *[None] * len(batch)))
        return gradient(of_points, x.unflatten(0, (-1, len(batch[0]))), *batch).flatten(0, 1)

    def vmapped_gradients(self, x: Tensor, *batch: Tensor) -> Tensor:
        """The same, with gradients inside of vmap."""
        return self.gradients(x, *repeated(x, batch))

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
FILLS = {
    aten.ones_like.default: 1, aten.new_ones.default: 1, aten.zeros_like.default: 0, aten.new_zeros.default: 0,
}  # fmt: skip


def simplify(graph: GraphModule) -> GraphModule:
    """Remove operations that change nothing, that are done twice, or that have a constant result: on small models each
    of them costs as much as the arithmetic. What reads or shows memory that is changed in place stays as it is, and so
    does a graph that draws random numbers."""
    replace_changes_in_place(graph)
    calls = [node for node in graph.graph.nodes if node.op == "call_function" and hasattr(node.target, "_schema")]
    if any(torch.Tag.nondeterministic_seeded in node.target.tags for node in calls):
        graph.recompile()
        return graph
    changed = {v for node in calls for source in changed_by(node) for v in sharing_memory(source)}
    seen: dict[object, Node] = {}
    constants: dict[Node, Tensor] = {}
    for node in calls:
        if node in changed or not changed.isdisjoint(node.all_input_nodes):
            continue
        same = _find_equal(node, seen)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.graph.erase_node(node)
            continue
        _transpose_factors(node)
        value = _constant(node, constants)
        if value is not None:
            constants[node] = value
    for i, (node, value) in enumerate(constants.items()):
        if any(user not in constants for user in node.users):
            graph.register_buffer(f"constant{i}", value)
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.get_attr(f"constant{i}"))
    graph.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or bool(changed_by(node)))
    graph.recompile()
    return graph


def replace_changes_in_place(graph: GraphModule) -> None:
    """`x.add_(y)` becomes `x + y`, as in most modules that save memory: with `nn.ReLU(inplace=True)`, or `out += x`.
    No later operation may read the old numbers, and the new tensor must have the same type and memory layout."""
    place = {node: i for i, node in enumerate(graph.graph.nodes)}
    for node in list(place):
        op, x = plain_operation(node), node.args[0] if node.args else None
        if op is None or not isinstance(x, Node):
            continue
        now, shared = place[node], sharing_memory(x)
        before = [v for v in shared if v is not x and place[v] < now]
        if any(place[user] > now for v in before for user in v.users) or any(v.op != "call_function" for v in shared):
            continue
        with graph.graph.inserting_before(node):
            new = graph.graph.call_function(op, node.args, node.kwargs)
        new.meta, place[new] = node.meta, now
        later = [user for user in x.users if place[user] > now]
        for user in later:
            user.replace_input_with(x, new)
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)


def plain_operation(node: Node) -> Any:
    """The operation that makes a new tensor instead of changing its first argument, if this tensor is alike."""
    op, like = out_of_place(node.target) if mutates(node) else None, node.meta.get("tensor")
    if op is None or like is None or like.offset:
        return None
    try:
        new = op(*torch.fx.map_arg(node.args, on_meta), **torch.fx.map_arg(node.kwargs, on_meta))
        same = (new.shape, new.stride(), new.dtype) == (like.shape, like.strides, like.dtype)
    except Exception:  # it takes other arguments
        return None
    return op if same else None


def on_meta(node: Node) -> Tensor:
    """A tensor like the result of a node, without numbers."""
    like = node.meta["tensor"]
    return torch.empty_strided(like.shape, like.strides, dtype=like.dtype, device="meta")


def sharing_memory(node: Node) -> set[Node]:
    """All nodes that may show the memory of a node: what it is a view of, and all views of that."""
    while (source := shown_by(node)) is not None:
        node = source
    shared, new = {node}, [node]
    while new:
        new = [user for v in new for user in v.users if shown_by(user) is v and user not in shared]
        shared.update(new)
    return shared


def shown_by(node: Node) -> Node | None:
    """The node whose memory a node shows: of a view its input, of a change what was changed; None for a new tensor."""
    if mutates(node):
        return next(iter(changed_by(node)), None)
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    if node.target is getitem and source is not None:
        return source if shown_by(source) is not None else None
    return source if is_view(node) else None


def _find_equal(node: Node, seen: dict[object, Node]) -> Node:
    """An earlier node with the same result, or the node itself."""
    source = node.args[0] if node.args else None
    if isinstance(source, Node):
        if node.target in RESHAPES and node.meta["tensor"].shape == source.meta["tensor"].shape:
            return source
        if node.target is aten.detach.default or (node.target is aten.mul.Scalar and node.args[1] == 1):
            return source
        if node.target is aten.permute.default and list(node.args[1]) == list(range(len(node.args[1]))):  # type: ignore[arg-type]
            return source
        transposes = node.target is aten.transpose.int and source.target is aten.transpose.int
        if transposes and node.args[1:] == source.args[1:] and isinstance(source.args[0], Node):
            return source.args[0]  # transposed twice
    # Node names are unique, so equal texts mean equal arguments.
    return seen.setdefault((node.target, str(node.args), str(node.kwargs)), node)


def _transpose_factors(node: Node) -> None:
    """A copy of the transpose of A B becomes B^T A^T, which needs no copy: gradients of weights come like this."""
    turned: Any = node.args[0] if node.args else None
    if node.target is not aten.clone.default or not _transposes(turned):
        return
    product = turned.args[0]
    if product.target is not aten.bmm.default or len(turned.users) > 1 or len(product.users) > 1:
        return
    _, rows, columns = node.meta["tensor"].shape
    if node.meta["tensor"].strides != (rows * columns, columns, 1):
        return
    a, b = product.args
    with node.graph.inserting_before(node):
        node.args = _transposed(b), _transposed(a)
    node.target, node.kwargs = aten.bmm.default, {}


def _transposed(node: Any) -> Node:
    """A stack of matrices, transposed."""
    if _transposes(node):
        return node.args[0]  # type: ignore[no-any-return]
    turned: Node = node.graph.call_function(aten.transpose.int, (node, 1, 2))
    like = node.meta["tensor"]
    (n, rows, columns), (first, row, column) = like.shape, like.strides
    turned.meta["tensor"] = replace(like, shape=torch.Size((n, columns, rows)), strides=(first, column, row))
    return turned


def _transposes(node: Any) -> bool:
    """Whether this node transposes a stack of matrices."""
    if not isinstance(node, Node) or node.target is not aten.transpose.int or len(node.meta["tensor"].shape) != 3:
        return False
    return isinstance(node.args[0], Node) and sorted(axis % 3 for axis in node.args[1:]) == [1, 2]  # type: ignore[operator]


def _constant(node: Node, constants: dict[Node, Tensor]) -> Tensor | None:
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
    """The gradient of an objective, or of the sum of several, by ordinary autograd."""
    # In one thread, so that what is recorded or compiled meanwhile sees every operation.
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(objective(x, *data).sum(), x, materialize_grads=True)[0]
