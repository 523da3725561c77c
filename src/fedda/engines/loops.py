"""C code for runs of element-wise operations: one loop for all operations on arrays of one shape.

Only operations that PyTorch rounds as IEEE 754 says are written in C, so that every bit is the one that PyTorch would
compute. Its square root is not among them: on a CPU it is MKL's, which is off by one bit now and then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

aten = torch.ops.aten
# No multiply-add, and integers overflow as PyTorch's do. -O3 would take twice as long to compile, and be no faster.
FLAGS = ("-O2", "-ftree-vectorize", "-ffp-contract=off", "-fno-math-errno", "-fwrapv")
C_TYPES = {
    torch.float32: "float", torch.float64: "double", torch.int64: "int64_t", torch.int32: "int32_t",
    torch.uint8: "uint8_t", torch.bool: "uint8_t",
}  # fmt: skip
# The operations and their C code. All arguments have the type in which PyTorch computes.
ARITHMETIC: dict[Any, str] = {
    aten.add.Tensor: "{0} + {1}", aten.sub.Tensor: "{0} - {1}", aten.mul.Tensor: "{0} * {1}",
    aten.rsub.Scalar: "{1} - {0}", aten.rsub.Tensor: "{1} - {0}", aten.neg.default: "-{0}",
    aten.clamp_min.default: "{0} < {1} ? {1} : {0}", aten.clamp_max.default: "{0} > {1} ? {1} : {0}",
    aten.clone.default: "{0}", aten.copy.default: "{0}", aten._to_copy.default: "{0}",
}  # fmt: skip
REAL: dict[Any, str] = {
    aten.div.Tensor: "{0} / {1}", aten.reciprocal.default: "1 / {0}",
    aten.abs.default: "ABSOLUTE({0})", aten.pow.Tensor_Scalar: "{0} * {0}",
}  # fmt: skip
INTEGER: dict[Any, str] = {
    aten.bitwise_and.Tensor: "{0} & {1}", aten.bitwise_and.Scalar: "{0} & {1}", aten.bitwise_or.Tensor: "{0} | {1}",
    aten.bitwise_xor.Tensor: "{0} ^ {1}", aten.bitwise_xor.Scalar: "{0} ^ {1}",
    aten.__rshift__.Scalar: "{0} >> {1}", aten.__lshift__.Scalar: "{0} << {1}", aten.bitwise_not.default: "~{0}",
}  # fmt: skip
COMPARISONS: dict[Any, str] = {
    getattr(getattr(aten, name), kind): f"{{0}} {sign} {{1}}"
    for name, sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items()
    for kind in ("Tensor", "Scalar")
}
WHERE = aten.where.self
CLAMPS = (aten.clamp_min.default, aten.clamp_max.default)
SHIFTS = (aten.__rshift__.Scalar, aten.__lshift__.Scalar)
GATHERS = (aten.index_select.default, aten.index.Tensor)  # along the first axis
COPIES = (aten.clone.default, aten.copy.default, aten._to_copy.default)
TABLES = "char *const *const p, const double *const n"
HEAD = """#include <math.h>
#include <stdint.h>
#define ABSOLUTE(x) _Generic((x), float: fabsf, default: fabs)(x)
"""


@dataclass(frozen=True)
class Array:
    """An array in memory: it begins `offset` numbers after the beginning of piece `base`."""

    base: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def expanded(self, shape: Sequence[int]) -> list[int]:
        """The strides with which it broadcasts to a shape."""
        missing = len(shape) - len(self.shape)
        own = [0 if n == 1 else stride for n, stride in zip(self.shape, self.strides, strict=True)]
        return [0] * missing + own

    @property
    def extent(self) -> int:
        """How many numbers it spans in memory."""
        if not math.prod(self.shape):
            return 0
        return 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))


@dataclass(eq=False)
class Operation:
    """One operation on every element of a shape; `place` is where the result is written, if it must be. Those in
    `GATHERS` have an array and the indices."""

    op: Any
    args: list[Operation | Array | float]
    shape: tuple[int, ...]
    dtype: torch.dtype
    computed: torch.dtype  # the type of the arithmetic
    place: Array | None = None


@dataclass(eq=False)
class Loop:
    """The operations that share one loop."""

    shape: tuple[int, ...]
    operations: list[Operation] = field(default_factory=list)


def code_of(op: Any, dtype: torch.dtype) -> str | None:
    """The C code of an operation that computes in this type; None if there is none."""
    if op in GATHERS:
        return "{0}"
    if op is WHERE:
        return "{0} ? {1} : {2}"
    if op in COMPARISONS:
        return COMPARISONS[op]
    if op in ARITHMETIC and (dtype is not torch.bool or op in COPIES):
        return ARITHMETIC[op]
    if dtype.is_floating_point:
        return REAL.get(op)
    if dtype is torch.bool and op is aten.bitwise_not.default:
        return "!{0}"
    return INTEGER.get(op)


class CSource:
    """A C file with a function for every loop and one for every group of loops. The functions get the addresses of all
    pieces of memory, and all real numbers, so that other hyper-parameters need no other code. If an index is out of
    range, they write 1 to the first piece."""

    def __init__(self) -> None:
        self.functions: list[str] = []
        self.lengths: list[int] = []  # of the outer axis of every loop
        self.elements: list[int] = []
        self.numbers: dict[str, float] = {}  # by their text, because 0.0 == -0.0

    def add(self, loop: Loop) -> int:
        """Add the function of a loop: it takes a part of the outer axis. Returns its number."""
        k = len(self.lengths)
        self.functions.append(
            f"void loop{k}({TABLES}, const int64_t first, const int64_t end) {{\n{self.loop(loop)}}}\n"
        )
        self.elements.append(math.prod(loop.shape))
        return k

    def group(self, groups: Sequence[Sequence[int]]) -> None:
        """Add a function for every group of loops."""
        for i, group in enumerate(groups):
            body = "".join(f"  loop{k}(p, n, 0, {self.lengths[k]});\n" for k in group)
            self.functions.append(f"void group{i}({TABLES}) {{\n{body}}}\n")

    @property
    def text(self) -> str:
        return HEAD + "\n".join(self.functions)

    def loop(self, loop: Loop) -> str:
        arrays = list(dict.fromkeys([
            *(rows_of(o) if a is gathered(o) else a for o in loop.operations for a in o.args if isinstance(a, Array)),
            *(o.place for o in loop.operations if o.place is not None),
        ]))  # fmt: skip
        sizes, strides = merged(loop.shape, [array.expanded(loop.shape) for array in arrays])
        self.lengths.append(sizes[0])
        before, inside, after = list[str](), list[str](), list[str]()
        names: dict[Any, str] = {}
        for k, array in enumerate(arrays):
            of_type = C_TYPES[array.dtype]
            before.append(f"{of_type} *const a{k} = ({of_type} *)p[{array.base}] + {array.offset};")
            names[array] = f"a{k}[{position(strides[k])}]"
        loaded: dict[Any, str] = {}
        for k, o in enumerate(loop.operations):
            if (source := gathered(o)) is not None:
                at = self.argument(o.args[1], o, 1, names, loaded, before, inside)
                inside += [f"int64_t g{k} = {at} < 0 ? {at} + {source.shape[0]} : {at};",
                           f"if ((uint64_t)g{k} >= {source.shape[0]}) g{k} = 0, outside = 1;"]  # fmt: skip
                args = [f"{names[rows_of(o)][:-1]} + g{k} * {source.strides[0]}]"]
            else:
                args = [self.argument(a, o, i, names, loaded, before, inside) for i, a in enumerate(o.args)]
            value = (code_of(o.op, o.computed) or "").format(*args)
            inside.append(f"const {C_TYPES[o.dtype]} v{k} = {converted(value, o)};")
            names[o] = f"v{k}"
            if o.place is not None:
                after.append(f"{names[o.place]} = v{k};")
        lines = [*before]
        for axis, n in enumerate(sizes):
            first, end = ("0", str(n)) if axis else ("first", "end")
            if axis == len(sizes) - 1:
                lines.append("#pragma GCC ivdep")
            lines.append(f"for (int64_t i{axis} = {first}; i{axis} < {end}; i{axis}++)")
        lines += ["{", *(f"  {line}" for line in (*inside, *after)), "}"]
        if any(map(gathered, loop.operations)):
            lines = ["int64_t outside = 0;", *lines, "if (outside) *(int64_t *)p[0] = 1;"]
        return "".join(f"  {line}\n" for line in lines)

    def argument(
        self, value: Any, o: Operation, i: int, names: dict[Any, str], loaded: dict[Any, str], before: list[str],
        inside: list[str],
    ) -> str:  # fmt: skip
        """An argument in the type of the arithmetic."""
        of_type = C_TYPES[o.computed]
        if isinstance(value, bool | int):
            value = int(value)  # True is 1
            return f"(({of_type})INT64_C({value}))" if value != -(1 << 63) else f"(({of_type})INT64_MIN)"
        if isinstance(value, float):
            self.numbers[repr(value)] = value
            at = list(self.numbers).index(repr(value))
            before.append(f"const {of_type} n{(k := len(before))} = ({of_type})n[{at}];")
            return f"n{k}"
        if isinstance(value, Array):
            if value not in loaded:
                loaded[value] = f"l{len(loaded)}"
                inside.append(f"const {C_TYPES[value.dtype]} {loaded[value]} = {names[value]};")
            name, dtype = loaded[value], value.dtype
        else:
            name, dtype = names[value], value.dtype
        if (o.op is WHERE and i == 0) or o.op in GATHERS:
            return name
        return name if dtype == o.computed else f"(({of_type}){name})"


def gathered(o: Operation) -> Array | None:
    """The array of which an operation takes rows."""
    return o.args[0] if o.op in GATHERS else None  # type: ignore[return-value]


def rows_of(o: Operation) -> Array:
    """Row 0 of that array for every row of the result."""
    source: Any = o.args[0]
    lead = len(o.shape) - len(source.shape) + 1
    return Array(source.base, source.offset, o.shape, (0,) * lead + source.strides[1:], source.dtype)


def converted(value: str, o: Operation) -> str:
    """A result in its own type."""
    if o.op in COMPARISONS or o.dtype == o.computed:
        return value
    return f"({value}) != 0" if o.dtype is torch.bool else f"({C_TYPES[o.dtype]})({value})"


def merged(shape: Sequence[int], strides: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """The same loop with fewer axes: axes of length 1 are left out, and neighbours that all arrays walk through as one
    are joined.

    >>> merged((10, 1, 7), [[7, 7, 1], [0, 0, 1]])
    ([10, 7], [[7, 1], [0, 1]])
    >>> merged((10, 1, 7), [[7, 7, 1], [0, 0, 0]])
    ([70], [[1], [0]])
    """
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for axis in reversed(range(len(shape))):
        n = shape[axis]
        if n == 1:
            continue
        if sizes and all(s[axis] == k[0] * sizes[0] for s, k in zip(strides, kept, strict=True)):
            sizes[0] *= n
            continue
        sizes.insert(0, n)
        for s, k in zip(strides, kept, strict=True):
            k.insert(0, s[axis])
    return (sizes, kept) if sizes else ([1], [[0] for _ in strides])


def position(strides: Sequence[int]) -> str:
    return " + ".join(f"i{k} * {stride}" for k, stride in enumerate(strides) if stride) or "0"
