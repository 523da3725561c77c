"""Triton code of element-wise operations, with the bits of PyTorch's CUDA kernels.

Numbers of 16 bits are held in float32 between two operations and rounded after each of them, as PyTorch does.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from .loops import COMPARISONS

aten = torch.ops.aten
NAMES = {
    torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16",
    torch.bool: "int1", torch.uint8: "uint8", torch.int8: "int8", torch.int16: "int16", torch.int32: "int32",
    torch.int64: "int64",
}  # fmt: skip
HALF = (torch.bfloat16, torch.float16)
NAN = "propagate_nan=tl.PropagateNan.ALL"
ONE = "tl.full((), 1.0, tl.float32)"
# The operations and their code. Arrays and numbers have the result's dtype, except for a condition, which is bool.
ARITHMETIC: dict[Any, str] = {
    **{getattr(aten.add, kind): "{0} + {1}" for kind in ("Tensor", "Scalar")},
    **{getattr(aten.sub, kind): "{0} - {1}" for kind in ("Tensor", "Scalar")},
    **{getattr(aten.mul, kind): "{0} * {1}" for kind in ("Tensor", "Scalar")},
    **{getattr(aten.div, kind): "tl.div_rn({0}, {1})" for kind in ("Tensor", "Scalar")},
    aten.rsub.Scalar: "{1} - {0}",
    aten.neg.default: "{0} * -1.0",  # Triton's minus is 0 - x, which has no -0
    aten.abs.default: "tl.abs({0})",
    aten.sqrt.default: "tl.sqrt_rn({0})",
    aten.reciprocal.default: f"tl.div_rn({ONE}, {{0}})",
    aten.pow.Tensor_Scalar: "{0} * {0}",  # squares only
    aten.where.self: "tl.where({0}, {1}, {2})",
    aten.masked_fill.Scalar: "tl.where({1}, {2}, {0})",
    aten.maximum.default: f"tl.maximum({{0}}, {{1}}, {NAN})",
    aten.minimum.default: f"tl.minimum({{0}}, {{1}}, {NAN})",
    aten.clamp_min.default: f"tl.maximum({{0}}, {{1}}, {NAN})",
    aten.clamp_max.default: f"tl.minimum({{0}}, {{1}}, {NAN})",
    aten.clamp.default: f"tl.minimum(tl.maximum({{0}}, {{1}}, {NAN}), {{2}}, {NAN})",
    aten.relu.default: "tl.where({0} <= 0.0, 0.0, {0})",
    aten.threshold_backward.default: "tl.where({1} <= {2}, 0.0, {0})",
}
DOUBLE = {  # exact in float64
    aten.div.Tensor: "{0} / {1}", aten.div.Scalar: "{0} / {1}", aten.sqrt.default: "tl.sqrt({0})",
    aten.reciprocal.default: "1.0 / {0}",
}  # fmt: skip
LOGIC: dict[Any, str] = {
    aten.logical_and.default: "{0} & {1}", aten.bitwise_and.Tensor: "{0} & {1}",
    aten.logical_or.default: "{0} | {1}", aten.bitwise_or.Tensor: "{0} | {1}",
    aten.logical_xor.default: "{0} ^ {1}", aten.bitwise_xor.Tensor: "{0} ^ {1}",
    aten.logical_not.default: "{0} == 0", aten.bitwise_not.default: "{0} == 0",
}  # fmt: skip
COPIES = (aten.clone.default, aten._to_copy.default)
ERF = "(1.0 + libdevice.erf({0} * 0.7071067811865476))"
GAUSS = "libdevice.exp(-0.5 * {1} * {1}) * 0.3989422804014327"
# Functions of libdevice, and formulas in which PyTorch's compiler may contract products and sums. They are used in
# single precision only, and only if a check on the device finds PyTorch's bits (see fusing.same_bits).
CHECKED: dict[Any, str] = {
    aten.exp.default: "libdevice.exp({0})",
    aten.log.default: "libdevice.log({0})",
    aten.tanh.default: "libdevice.tanh({0})",
    aten.rsqrt.default: "libdevice.rsqrt({0})",
    aten.sigmoid.default: f"tl.div_rn({ONE}, 1.0 + libdevice.exp({{0}} * -1.0))",
    aten.silu.default: "tl.div_rn({0}, 1.0 + libdevice.exp({0} * -1.0))",
    aten.gelu.default: f"{{0}} * 0.5 * {ERF}",
    aten.tanh_backward.default: "{0} * tl.fma({1} * -1.0, {1}, 1.0)",
    aten.sigmoid_backward.default: "{0} * (1.0 - {1}) * {1}",
    aten.gelu_backward.default: f"{{0}} * tl.fma({{1}}, {GAUSS}, 0.5 * {ERF.replace('0}', '1}')})",
}
CONDITION = {aten.where.self: 0, aten.masked_fill.Scalar: 1}  # which argument is a condition
DIVISIONS = (aten.div.Tensor, aten.div.Scalar)
# Here a number of 16 bits is rounded before the operation by some of PyTorch's kernels, but not by others. It must be
# the same in 16 bits and in float32.
EXACT = (
    *COMPARISONS, aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar,
    aten.clamp_min.default, aten.clamp_max.default, aten.clamp.default, aten.threshold_backward.default,
)  # fmt: skip


def expression(node: Node, name: Callable[[Node], str]) -> str | None:
    """The code of a node whose result is an array of floats or bool; None if its bits are not certain."""
    op: Any = node.target
    args, result = list[Any](node.args), node.meta["tensor"]
    arrays = [source.meta.get("tensor") for source in node.all_input_nodes]
    if any(a is None or a.device != result.device or a.dtype not in NAMES for a in arrays):
        return None
    if op in COPIES:
        return converted(name(args[0]), args[0].meta["tensor"].dtype, result.dtype)
    if op is aten.clamp.default:
        low, high = [*args[1:], None, None][:2]
        args[1:] = [-math.inf if low is None else low, math.inf if high is None else high]
    if op is aten.pow.Tensor_Scalar and args.pop() != 2:
        return None
    code = code_of(node, result.dtype)
    if code is None or node.kwargs or len(args) != 1 + max(i for i in range(3) if f"{{{i}}}" in code):
        return None
    dtype = node.args[0].meta["tensor"].dtype if op in COMPARISONS else result.dtype  # type: ignore[union-attr]
    numbers = [a for a in args if not isinstance(a, Node)]
    if not all(isinstance(n, int | float) for n in numbers):
        return None
    if op in EXACT and any(math.isnan(n) or rounded(n, dtype) != rounded(n, held(dtype)) for n in numbers):
        return None
    if op in DIVISIONS and numbers:
        by = inverse(args[1], held(dtype)) if isinstance(args[0], Node) else None
        if by is None:
            return None
        if result.device.type == "cuda":
            code, args[1] = "{0} * {1}", by
    values = list[Any]()
    for i, a in enumerate(args):
        if isinstance(a, Node):
            wanted = torch.bool if i == CONDITION.get(op) else dtype
            values.append(converted(name(a), a.meta["tensor"].dtype, wanted))
        else:
            values.append(literal(rounded(a, dtype) if op is aten.masked_fill.Scalar else a, held(dtype)))
    if None in values:
        return None
    text = code.format(*values)
    return f"({text}){half(dtype)}" if result.dtype in HALF else text


def code_of(node: Node, dtype: torch.dtype) -> str | None:
    """The code of an operation with a result of this type; None if the types of its arguments do not fit."""
    op: Any = node.target
    places = {i: a.meta["tensor"].dtype for i, a in enumerate(node.args) if isinstance(a, Node)}
    condition = places.pop(CONDITION[op]) if CONDITION.get(op) in places else torch.bool
    types = {*places.values()}
    if op in LOGIC:
        return LOGIC[op] if types == {torch.bool} else None
    if op in COMPARISONS:
        return COMPARISONS[op] if len(types) == 1 and types.pop().is_floating_point else None
    if not dtype.is_floating_point or condition != torch.bool:
        return None
    if op in CHECKED:
        return CHECKED[op] if types == {dtype} and dtype != torch.float64 else None
    if any(torch.promote_types(t, dtype) != dtype for t in types):
        return None
    return DOUBLE.get(op, ARITHMETIC.get(op)) if dtype == torch.float64 else ARITHMETIC.get(op)


def held(dtype: torch.dtype) -> torch.dtype:
    """The type in which a kernel holds values of this type."""
    return torch.float32 if dtype in HALF else dtype


def half(dtype: torch.dtype) -> str:
    return f".to(tl.{NAMES[dtype]}).to(tl.float32)"


def converted(value: str, source: torch.dtype, dtype: torch.dtype) -> str | None:
    """A value converted to floats or bool, as PyTorch converts it: to 16 bits by way of float32. Triton would convert
    integers to 16 bits directly, which rounds long ones otherwise."""
    if source == dtype:
        return value
    if dtype == torch.bool:
        return f"({value} != 0)"
    if not dtype.is_floating_point or (dtype in HALF and source in (torch.int32, torch.int64)):
        return None
    text = value if held(source) == held(dtype) else f"{value}.to(tl.{NAMES[held(dtype)]})"
    return text + half(dtype) if dtype in HALF else text


def inverse(number: Any, dtype: torch.dtype) -> float | None:
    """On a GPU PyTorch divides by a number by multiplying with its inverse: this inverse, or None if it is not certain.
    In single precision PyTorch 2.11 inverts the exact number, older versions the rounded one.

    >>> inverse(3, torch.float32) == rounded(1 / 3, torch.float32)
    True
    >>> inverse(1 - 0.999, torch.float32), inverse(0, torch.float64)
    (None, None)
    """
    if not number or dtype == torch.float64:
        return 1.0 / number if number else None
    exact = rounded(1.0 / number, dtype)
    return exact if exact == rounded(1.0 / rounded(number, dtype), dtype) else None


def rounded(number: float, dtype: torch.dtype) -> float:
    """A number as one of this type."""
    if dtype in HALF:
        return float(torch.tensor(number, dtype=dtype))
    return float(struct.unpack("f", struct.pack("f", number))[0]) if dtype == torch.float32 else float(number)


def literal(number: float, dtype: torch.dtype) -> str:
    value = rounded(number, dtype)
    text = repr(value) if math.isfinite(value) else f'float("{value}")'
    return f"tl.full((), {text}, tl.{NAMES[dtype]})"
