"""A round on a CPU as a program: C code for the element-wise operations, PyTorch's own operations for all others.

On small models PyTorch's dispatch of a round's several hundred operations takes longer than their arithmetic, and on
large ones every operation of a rule reads and writes whole vectors. A program has few loops between two gradients. Its
results are those of the round itself, to the bit.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg
from torch.overrides import TorchFunctionMode

from ..c_code import WRITERS, in_background, library, pool
from ..checks import one_line
from ..recording import TensorMeta, changed_by, is_recording, is_view, mutates, out_of_place, record
from . import loops
from .loops import Array, CSource, Loop, Operation

Step = Callable[..., Sequence[Tensor]]
aten = torch.ops.aten
# The values of these depend on no number of a tensor, at most on its shape.
FILLS = (
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.ones_like.default, aten.zeros_like.default,
    aten.full_like.default, aten.full.default, aten.zeros.default, aten.ones.default, aten.scalar_tensor.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
)  # fmt: skip
# Views, though their schemas do not say so.
MOST_OPERATIONS = 4000  # of a round: more would take too long to record and to compile
MOST_BYTES = 1 << 30  # that a program may hold, and that a trial may copy
TRIAL_STATES = 2  # from which a program is compared with the round itself, at least
TRIAL_SECONDS = 0.05  # for the comparison of a program with the round itself
THREAD_WORK = 200_000  # elements of a loop below which a second thread costs more than it saves


class NoProgram(Exception):
    """Why a round has no program."""


@dataclass(eq=False)
class Call:
    """One operation of PyTorch."""

    node: Node


@dataclass
class Argument:
    """The place of a tensor among the arguments of a call."""

    at: int


class CpuProgram:
    """The operations of a recorded function, in an order that keeps every result.

    Every array is part of a piece of memory. A piece is a tensor from outside, a constant, a buffer that loops write
    and that other loops use again, or a tensor that is new in every call: an input, the result of one of PyTorch's
    operations, or an output.
    """

    def __init__(self, module: GraphModule):
        self.module = module
        self.steps: list[Loop | Call] = []
        self.array_of: dict[Node, Array] = {}
        self.operation_of: dict[Node, Operation] = {}
        self.node_of: dict[Operation, Node] = {}
        self.alias: dict[Node, Node] = {}  # a node whose array is that of another
        self.constant: dict[Node, Tensor] = {}
        self.step_of: dict[Operation, int] = {}
        self.outside = torch.zeros(1, dtype=torch.int64)  # 1 after an index that is out of range
        self.fixed: list[Tensor | None] = [self.outside]  # the pieces; None for those that are new in every call
        self.buffers: dict[int, tuple[int, torch.dtype]] = {}  # numbers and type
        self.written: dict[int, int] = {}  # the last step that writes a piece
        self.used: dict[int, int] = {}  # the last step that uses it
        self.floor = 0  # operations that come now must not move before this step
        self.inputs: list[Array] = []
        self.outputs: list[tuple[Array, bool]] = []  # and whether the program writes them to a tensor of their own
        module.graph.eliminate_dead_code()
        self.changed = {array for node in module.graph.nodes for array in changed_by(node)}
        for node in module.graph.nodes:
            self.add(node)
        self.allocate()
        self.source = CSource()
        self.parts = self.functions()

    # -- from operations to steps -------------------------------------------------------------------------------------
    def add(self, node: Node) -> None:
        if node.op == "output":
            for result in node.args[0]:  # type: ignore[union-attr]
                self.add_output(self.named(result))  # type: ignore[arg-type]
        elif node.op == "placeholder":
            self.array_of[node] = self.piece(None, node.meta["tensor"])
            self.inputs.append(self.array_of[node])
        elif node.op == "get_attr":
            held = getattr(self.module, str(node.target))
            if not isinstance(held, Tensor):
                raise NoProgram("processes exchange data")
            self.array_of[node] = self.piece(held, node.meta["tensor"])
        elif node.target is getitem:
            self.add_item(node)
        elif self.is_constant(node):
            args, kwargs = map_arg((node.args, node.kwargs), self.known)
            self.constant[node] = value = node.target(*args, **kwargs)  # type: ignore[operator]
            self.array_of[node] = self.piece(value, node.meta["tensor"])
        elif is_view(node):
            self.add_view(node)
        elif not any(add(node) for add in (self.add_joined, self.add_clamp, self.add_gather, self.add_operation)):
            self.add_call(node)

    def piece(self, fixed: Tensor | None, meta: TensorMeta) -> Array:
        """A new piece of memory, as one array."""
        self.fixed.append(fixed)
        return Array(len(self.fixed) - 1, 0, tuple(meta.shape), meta.strides, meta.dtype)

    def named(self, node: Node) -> Node:
        return self.alias.get(node, node)

    def known(self, node: Node) -> Tensor:
        """The value of a constant; for `FILLS`, a tensor of the same shape."""
        if (constant := self.constant.get(self.named(node))) is not None:
            return constant
        meta = node.meta["tensor"]
        return torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype)

    def is_constant(self, node: Node) -> bool:
        if mutates(node) or self.may_change(node) or "tensor" not in node.meta:
            return False
        sources = node.all_input_nodes
        return node.target in FILLS or (bool(sources) and all(self.named(n) in self.constant for n in sources))

    def may_change(self, node: Node) -> bool:
        """Whether the result is later changed in place, by itself or through a view."""
        views = (user for user in node.users if is_view(user) or user.target is getitem)
        return node in self.changed or any(map(self.may_change, views))

    def add_view(self, node: Node) -> None:
        source = node.all_input_nodes[0]
        if "tensor" not in node.meta:  # a list of views: its items follow
            self.alias[node] = self.named(source)
            return
        new, old = node.meta["tensor"], source.meta["tensor"]
        if (new.shape, new.strides, new.offset, new.dtype) == (old.shape, old.strides, old.offset, old.dtype):
            self.alias[node] = self.named(source)
        else:
            self.array_of[node] = self.view(source, new)

    def add_item(self, node: Node) -> None:
        source: Any = node.args[0]
        if is_view(source):
            self.array_of[node] = self.view(source.all_input_nodes[0], node.meta["tensor"])
        elif node not in self.array_of and node not in self.alias:
            raise NoProgram("an operation has nested results")

    def view(self, source: Node, meta: TensorMeta) -> Array:
        whole = self.array(source)
        if meta.dtype != whole.dtype:
            raise NoProgram("numbers are looked at as another type")
        offset = whole.offset + meta.offset - source.meta["tensor"].offset
        return Array(whole.base, offset, tuple(meta.shape), meta.strides, meta.dtype)

    def array(self, node: Node) -> Array:
        """Where the result of a node is; if it was in no memory, it is written to some."""
        node = self.named(node)
        if node not in self.array_of:
            operation, meta = self.operation_of[node], node.meta["tensor"]
            operation.place = self.array_of[node] = place = self.piece(None, meta)
            self.buffers[place.base] = (place.extent, place.dtype)
            self.written[place.base] = self.used[place.base] = self.step_of[operation]
        return self.array_of[node]

    def add_joined(self, node: Node) -> bool:
        """`stack` and `cat`: every source is written to its part of the result."""
        if node.target not in (aten.stack.default, aten.cat.default):
            return False
        meta, sources = node.meta["tensor"], list[Any](node.args[0])  # type: ignore[arg-type]
        stacked = node.target is aten.stack.default
        if meta.dtype not in loops.C_TYPES or any(
            n.meta["tensor"].dtype != meta.dtype or len(n.meta["tensor"].shape) + stacked != len(meta.shape)
            for n in sources
        ):
            return False
        axis = int(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(meta.shape)  # type: ignore[arg-type]
        whole, start = self.piece(None, meta), 0
        self.buffers[whole.base] = (whole.extent, whole.dtype)
        for source in sources:
            shape, strides = tuple(source.meta["tensor"].shape), list(meta.strides)
            offset = start * strides[axis]
            start += 1 if stacked else shape[axis]
            if stacked:
                del strides[axis]
            part = Array(whole.base, offset, shape, tuple(strides), meta.dtype)
            self.append(Operation(aten.clone.default, [self.value(source)], shape, meta.dtype, meta.dtype, part))
        self.array_of[node] = whole
        return True

    def value(self, node: Any) -> Operation | Array | float:
        """An argument: the result of an operation, an array in memory, or a number."""
        if not isinstance(node, Node):
            return node  # type: ignore[no-any-return]
        node = self.named(node)
        return self.operation_of[node] if node in self.operation_of else self.array_of[node]

    def add_clamp(self, node: Node) -> bool:
        """A clamp by numbers is one by its smallest value and one by its largest."""
        if node.target is not aten.clamp.default or node.kwargs:
            return False
        meta, x = node.meta["tensor"], self.value(node.args[0])
        if meta.dtype not in loops.C_TYPES or meta.dtype != node.all_input_nodes[0].meta["tensor"].dtype:
            return False
        operation: Any = x
        for op, bound in zip(loops.CLAMPS, node.args[1:], strict=False):
            if bound is not None:
                operation = self.append(Operation(op, [operation, bound], tuple(meta.shape), meta.dtype, meta.dtype))  # type: ignore[list-item]
        if operation is x:
            return False
        self.operation_of[node], self.node_of[operation] = operation, node
        return True

    def add_gather(self, node: Node) -> bool:
        """Rows of an array, along its first axis."""
        if node.target not in loops.GATHERS or node.kwargs:
            return False
        source, *rest = node.args
        if node.target is aten.index.Tensor:
            if len(rest[0]) != 1:  # type: ignore[arg-type]
                return False
            rest = [0, *rest[0]]  # type: ignore[misc]
        axis, indices = rest
        if axis != 0 or not isinstance(indices, Node) or indices.meta["tensor"].dtype is not torch.int64:
            return False
        whole, at, meta = self.array(source), self.array(indices), node.meta["tensor"]  # type: ignore[arg-type]
        if meta.dtype not in loops.C_TYPES or not whole.shape or not whole.shape[0]:
            return False
        rest_of_row = len(whole.shape) - 1
        rows = Array(at.base, at.offset, at.shape + (1,) * rest_of_row, at.strides + (0,) * rest_of_row, at.dtype)
        operation = self.append(Operation(node.target, [whole, rows], tuple(meta.shape), meta.dtype, meta.dtype))
        self.operation_of[node], self.node_of[operation] = operation, node
        return True

    def add_operation(self, node: Node) -> bool:
        """Whether the node is an operation of a loop."""
        meta, changes = node.meta.get("tensor"), mutates(node)
        op = out_of_place(node.target) if changes else node.target
        if meta is None or not allowed(op, node):
            return False
        args = list(node.args[1:2] if op is aten.copy.default else node.args)
        computed = computed_type(op, args, meta.dtype, changes)
        if (
            loops.code_of(op, computed) is None
            or not {computed, meta.dtype} <= set(loops.C_TYPES)
            or loses(op, args, computed)
        ):
            return False
        if op is aten.pow.Tensor_Scalar:
            del args[1]
        shape = tuple(meta.shape)
        if not changes:
            operation = self.append(Operation(op, [self.value(a) for a in args], shape, meta.dtype, computed))
            self.operation_of[node], self.node_of[operation] = operation, node
            return True
        place = self.array(node.args[0])  # type: ignore[arg-type]
        arrays: list[Any] = [self.array(a) if isinstance(a, Node) else a for a in args]
        if place.shape != shape or any(isinstance(a, Array) and a.base == place.base and a != place for a in arrays):
            return False
        self.alias[node] = self.named(node.args[0])  # type: ignore[arg-type]
        self.floor = len(self.steps)
        self.append(Operation(op, arrays, shape, meta.dtype, computed, place))
        self.floor = len(self.steps)
        return True

    def append(self, operation: Operation) -> Operation:
        """Put an operation into the last loop that may take it."""
        first = self.floor
        for a in operation.args:
            if isinstance(a, Operation):
                first = max(first, self.step_of[a] + (a.shape != operation.shape))
            elif isinstance(a, Array):
                first = max(first, self.written.get(a.base, -1) + 1)
        for at in reversed(range(first, len(self.steps))):
            step = self.steps[at]
            if isinstance(step, Loop) and step.shape == operation.shape:
                break
        else:
            at, step = len(self.steps), Loop(operation.shape)
            self.steps.append(step)
        for i, a in enumerate(operation.args):
            if isinstance(a, Operation) and self.step_of[a] != at:
                operation.args[i] = self.array(self.node_of[a])
        assert isinstance(step, Loop)
        step.operations.append(operation)
        self.step_of[operation] = at
        arrays = [a for a in operation.args if isinstance(a, Array)]
        for array in arrays if operation.place is None else [*arrays, operation.place]:
            self.used[array.base] = max(self.used.get(array.base, 0), at)
        if operation.place is not None:
            self.written[operation.place.base] = max(self.written.get(operation.place.base, 0), at)
        return operation

    def add_call(self, node: Node) -> None:
        refuse_unknown_shapes(node)
        at = len(self.steps)
        for source in node.all_input_nodes:
            self.used[self.array(source).base] = at
        self.steps.append(Call(node))
        if mutates(node):
            self.floor = len(self.steps)
            changed = changed_by(node)
            items = [(user, user.args[1]) for user in node.users if user.target is getitem]
            for result, i in [(node, 0)] if "tensor" in node.meta else items:
                array = changed[i]  # type: ignore[index]
                if result.meta["tensor"] != array.meta["tensor"]:
                    raise NoProgram(f"{node.target} changes the shape of its result")
                self.alias[result] = self.named(array)
            return
        for result in results_of(node):
            self.array_of[result] = place = self.piece(None, result.meta["tensor"])
            self.written[place.base] = self.used[place.base] = at
            if node.target in WRITERS:
                self.buffers[place.base] = (place.extent, place.dtype)

    def add_output(self, node: Node) -> None:
        own = node not in self.array_of  # an operation whose result only this output needs in memory
        array = self.array(node)
        if own:
            del self.buffers[array.base]
        self.outputs.append((array, own))
        self.used[array.base] = len(self.steps)

    # -- from steps to functions --------------------------------------------------------------------------------------
    def allocate(self) -> None:
        """Give every buffer memory that no other buffer uses at the same time."""
        begins: dict[int, list[int]] = {}
        seen: set[int] = set()
        for at, step in enumerate(self.steps):
            places = (
                [o.place.base for o in step.operations if o.place]
                if isinstance(step, Loop)
                else [self.array_of[r].base for r in results_of(step.node)]
            )
            begins[at] = [base for base in dict.fromkeys(places) if base in self.buffers and base not in seen]
            seen.update(places)
        if sum(numbers * dtype.itemsize for numbers, dtype in self.buffers.values()) > MOST_BYTES:
            raise NoProgram("its intermediate results are too large to be held")
        spare: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        ends: dict[int, list[int]] = {}
        for at in range(len(self.steps)):
            for base in begins[at]:
                kind = self.buffers[base]
                held = spare.get(kind)
                self.fixed[base] = held.pop() if held else torch.empty(kind[0], dtype=kind[1])
                ends.setdefault(self.used[base], []).append(base)
            for base in ends.get(at, []):
                spare.setdefault(self.buffers[base], []).append(self.fixed[base])  # type: ignore[arg-type]

    def functions(self) -> list[list[int] | tuple[Node, list[int]]]:
        """The loops between two calls, by their numbers; the calls, with the pieces that nobody uses any more."""
        results = {self.array_of[r].base for s in self.steps if isinstance(s, Call) for r in results_of(s.node)}
        parts: list[Any] = []
        for at, step in enumerate(self.steps):
            if isinstance(step, Call):
                dead = sorted(base for base in results if self.used[base] < at)
                results -= set(dead)
                parts.append((step.node, dead))
            else:
                if not (parts and isinstance(parts[-1], list)):
                    parts.append([])
                parts[-1].append(self.source.add(step))
        self.source.group([part for part in parts if isinstance(part, list)])
        return parts

    def load(self) -> None:
        """Compile the loops."""
        code = library(self.source.text, *loops.FLAGS)
        if code is None:
            raise NoProgram("there is no C compiler")
        self.now: list[Any] = list(self.fixed)  # the tensor of every piece
        self.table = (ctypes.c_void_p * max(1, len(self.fixed)))()
        for base, tensor in enumerate(self.fixed):
            if tensor is not None:
                self.table[base] = tensor.data_ptr()
        self.table_outside = ctypes.c_int64.from_address(self.outside.data_ptr())
        self.numbers = (ctypes.c_double * max(1, len(self.source.numbers)))(*self.source.numbers.values())
        tables = ctypes.addressof(self.table), ctypes.addressof(self.numbers)
        groups = iter(range(len(self.parts)))
        self.run: list[Callable[[], Any]] = []
        for part in self.parts:
            if isinstance(part, tuple):
                self.run.append(self.call(*part))
            elif max(self.source.elements[k] for k in part) < THREAD_WORK:
                self.run.append(bound(function_of(code, f"group{next(groups)}", 2), *tables))
            else:
                next(groups)
                self.run += [self.divided(function_of(code, f"loop{k}", 4), tables, k) for k in part]
        self.new = [array for array, own in self.outputs if own]

    def divided(self, loop: Any, tables: tuple[int, int], k: int) -> Callable[[], Any]:
        """A loop on PyTorch's number of threads."""
        length, work = self.source.lengths[k], self.source.elements[k]

        def run() -> None:
            threads = max(1, min(torch.get_num_threads(), work // THREAD_WORK, length))
            if threads == 1:
                loop(*tables, 0, length)
                return
            size = math.ceil(length / threads)
            starts = range(0, length, size)
            parts = [pool().submit(partial(loop, *tables, first, min(first + size, length))) for first in starts]
            try:
                for part in parts:
                    part.result()
            finally:
                wait(parts)  # also if the user interrupts it, because they write to the memory of the program

        return run

    def call(self, node: Node, dead: list[int]) -> Callable[[], None]:
        """A function that calls one operation, and forgets the pieces that nobody uses any more."""
        op, arrays, now, table = node.target, list[Array](), self.now, self.table

        def argument(source: Node) -> Any:
            arrays.append(self.array(source))
            return Argument(len(arrays) - 1)

        given = map_arg((tuple(node.args), dict(node.kwargs)), argument)
        same = all(self.fixed[array.base] is not None for array in arrays)
        always = filled(given, [self.tensor(array) for array in arrays]) if same else None
        fixed = self.tensor(self.array_of[node]) if op in WRITERS else None
        write = WRITERS[op](fixed, *always[0], **always[1]) if fixed is not None and always else None
        if write is not None and not dead:
            return write
        results = [(r, self.array_of[r].base) for r in results_of(node)]
        bases: list[tuple[Any, int]] = [(-1 if r is node else r.args[1], base) for r, base in results]

        def run() -> None:
            for base in dead:
                now[base] = None
            if write is not None:
                return write()
            args, kwargs = always or filled(given, [self.tensor(array) for array in arrays])
            out = op(*args, **kwargs)  # type: ignore[operator]
            if fixed is not None:
                fixed.copy_(out)
                return
            for i, base in bases:
                now[base] = one = out if i < 0 else out[i]
                table[base] = one.data_ptr()

        return run

    def tensor(self, array: Array) -> Tensor:
        whole: Tensor = self.now[array.base]
        if whole.shape == array.shape and whole.stride() == array.strides and not array.offset:
            return whole
        return whole.as_strided(array.shape, array.strides, whole.storage_offset() + array.offset)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The results, in tensors that no later call changes."""
        self.table_outside.value = 0
        for array, tensor in zip(self.inputs, inputs, strict=True):
            if tensor.shape != array.shape or tensor.dtype != array.dtype:
                wanted = f"shape {array.shape} and {array.dtype}"
                raise ValueError(f"a program for {wanted} got {tuple(tensor.shape)} and {tensor.dtype}")
            if tensor.stride() != array.strides:
                tensor = torch.empty_strided(array.shape, array.strides, dtype=array.dtype).copy_(tensor)
            self.now[array.base] = tensor
            self.table[array.base] = tensor.data_ptr()
        for array in self.new:
            self.now[array.base] = new = torch.empty_strided(array.shape, array.strides, dtype=array.dtype)
            self.table[array.base] = new.data_ptr()
        for function in self.run:
            function()
        if self.table_outside.value:
            raise IndexError("an index of a compiled round is out of range")
        return [self.now[array.base] if own else self.tensor(array).clone() for array, own in self.outputs]


def filled(value: Any, tensors: Sequence[Tensor]) -> Any:
    """The arguments of a call, with tensors in their places."""
    if isinstance(value, Argument):
        return tensors[value.at]
    if isinstance(value, list | tuple):
        return [filled(v, tensors) for v in value]
    return {k: filled(v, tensors) for k, v in value.items()} if isinstance(value, dict) else value


def function_of(code: ctypes.CDLL, name: str, arguments: int) -> Any:
    function = getattr(code, name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64][:arguments]
    function.restype = None
    return function


def bound(function: Any, *args: Any) -> Callable[[], Any]:
    return lambda: function(*args)


def results_of(node: Node) -> list[Node]:
    """The nodes of an operation's new tensors: itself, or the items of its list."""
    if mutates(node):
        return []
    return [node] if "tensor" in node.meta else [user for user in node.users if user.target is getitem]


def refuse_unknown_shapes(node: Node) -> None:
    """Refuse an operation whose result has a shape that depends on numbers, such as `nonzero`."""
    target: Any = node.target
    if getattr(target, "namespace", "") == "c10d":
        raise NoProgram("processes exchange data")
    masks = any(n.meta["tensor"].dtype in (torch.bool, torch.uint8) for n in node.all_input_nodes if "tensor" in n.meta)
    if torch.Tag.dynamic_output_shape in target.tags and (target is not aten.index.Tensor or masks):
        raise NoProgram(f"the shape of the result of {target} depends on numbers")


def allowed(op: Any, node: Node) -> bool:
    """Whether the arguments are those that the C code knows."""
    if op in (aten._to_copy.default, aten.clone.default):
        return set(node.kwargs) <= {"dtype", "memory_format"}
    if op is aten.pow.Tensor_Scalar and node.args[1] != 2:
        return False
    if op in loops.SHIFTS:
        most = 8 * node.meta["tensor"].dtype.itemsize
        if not (isinstance(node.args[1], int) and 0 <= node.args[1] < most):
            return False
    count = 3 if op is loops.WHERE else 2
    return not node.kwargs and len(node.args) <= count and all(isinstance(a, Node | int | float) for a in node.args)


def computed_type(op: Any, args: Sequence[Any], result: torch.dtype, in_place: bool) -> torch.dtype:
    """The type in which PyTorch computes."""
    # A result in place may have a narrower type than the arithmetic.
    if op not in loops.COMPARISONS and (not in_place or op in loops.COPIES or len(args) != 2):
        return result
    like = [
        torch.empty([1] * len(a.meta["tensor"].shape), dtype=a.meta["tensor"].dtype) if isinstance(a, Node) else a
        for a in args
    ]
    return torch.result_type(*like)


def loses(op: Any, args: Sequence[Any], computed: torch.dtype) -> bool:
    """Whether an argument is converted in a way that C does not define or does otherwise: to bool, or from a real
    number to an integer."""
    real = torch.get_default_dtype()
    types = [a.meta["tensor"].dtype if isinstance(a, Node) else real if isinstance(a, float) else None
             for a in args[op is loops.WHERE:]]  # fmt: skip
    if computed is torch.bool:
        return op in loops.COPIES and types[0] is not torch.bool
    return not computed.is_floating_point and any(t is not None and t.is_floating_point for t in types)


# -- the program of a run -----------------------------------------------------------------------------------------
class Reading(TorchFunctionMode):
    """Refuses to read the numbers of a tensor in ways that a recording does not see."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr) and is_recording():
            raise NoProgram(f"{function.__name__} reads numbers")
        return function(*args, **kwargs or {})


class Trial:
    """A program for `step`, which is compiled in the background, and then compared with the step itself.

    Args:
        step: the next state, for a state. It must read no number.
        state: tensors.
        kept: tensors that `step` changes in place; they get their old values back.
    """

    def __init__(self, step: Step, state: Sequence[Tensor], kept: Sequence[Tensor]):
        self.step, self.kept = step, list(kept)
        if sum(v.nbytes for v in (*state, *kept)) > MOST_BYTES:
            raise NoProgram("the vectors of server and clients are too large for a trial")
        before = [v.clone() for v in kept]
        try:
            with Reading():
                self.program = CpuProgram(record(step, *(v.contiguous() for v in state), most=MOST_OPERATIONS))
        except NoProgram:
            raise
        except Exception as why:  # any operation may refuse to be recorded
            raise NoProgram(one_line(why)) from None
        finally:
            self.restore(before)
        self.loading, self.process = in_background(self.program.load), os.getpid()

    def restore(self, before: Sequence[Tensor]) -> None:
        for v, old in zip(self.kept, before, strict=True):
            v.copy_(old)

    def ready(self) -> bool:
        return self.loading.done() or self.forked

    @property
    def forked(self) -> bool:
        """Whether this process has been forked, and so lacks the thread that waits for the compiler."""
        return os.getpid() != self.process

    def compare(self, state: Sequence[Tensor]) -> tuple[float, float]:
        """Seconds of the step itself and of the program, from this state and the next ones, because the program was
        perhaps recorded from this one. Raises `NoProgram` if a bit differs."""
        if self.forked and not self.loading.done():
            raise NoProgram("the process was forked while the compiler worked")
        before = [v.clone() for v in self.kept]
        best = [math.inf, math.inf]
        begin, states = time.perf_counter(), 0
        try:
            self.loading.result()
            while states < TRIAL_STATES or time.perf_counter() - begin < TRIAL_SECONDS:
                ends, new = [], state
                for i, function in enumerate[Step]((self.step, self.program)):
                    start = time.perf_counter()
                    new = function(*state)
                    best[i] = min(best[i], time.perf_counter() - start)
                    ends.append([*new, *(v.clone() for v in self.kept)])
                    self.restore(before)
                if not all(map(same, *ends)):
                    raise NoProgram("its results differ from those of the round")
                state, states = new, states + 1
        except NoProgram:
            raise
        except Exception as why:  # what the compiler or an operation of PyTorch may raise
            raise NoProgram(one_line(why)) from None
        finally:
            self.restore(before)  # also if the user interrupts it
        return best[0], best[1]


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal: nan equals nan, and -0 does not equal 0."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    equal = (a == b) & (a.signbit() == b.signbit())
    return a.shape == b.shape and bool((equal | (a.isnan() & b.isnan())).all())
