"""CIFAR-10 as published: `cifar-10-batches-py`, six pickles.

A pickle is a program. This reader runs none of it: it records the few calls that an array's pickle makes, refuses all
others, and makes the arrays from the recorded arguments. So a file from anywhere is safe to open.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .arrays import assemble
from .datasets import Dataset
from .files import BadFile, reading

Array = np.ndarray
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
MOST_MEMO = 1 << 20  # a pickle may ask for a table of any size; a batch needs some ten thousand entries
# The names in the pickle of an array; numpy 1 and numpy 2 spell two of them differently.
ARRAY_NAMES = {"numpy.ndarray", "numpy.dtype", "_codecs.encode"} | {
    f"numpy.{core}.{name}" for core in ("core", "_core") for name in ("multiarray._reconstruct", "numeric._frombuffer")
}


def read_cifar10(paths: Sequence[Path]) -> Dataset:
    """CIFAR-10 from its batches; the last one is for testing."""
    parts = [read_batch(path) for path in paths]
    x, y = (np.concatenate([part[i] for part in parts[:-1]]) for i in range(2))
    return assemble(paths[0].parent, x, y, *parts[-1], names=NAMES)


def read_batch(path: Path) -> tuple[Array, Array]:
    """Images [n, 3, 32, 32] and labels of one batch."""
    with reading(path, "CIFAR-10 batch"):
        content = unpickle(path)
        if not isinstance(content, dict):
            raise BadFile(path, f"must be the pickle of a dict, got {type(content).__name__}")
        table = {text(key): value for key, value in content.items()}
        for key in ("data", "labels"):
            if key not in table:
                raise BadFile(path, f"must hold {key!r}, got {', '.join(map(repr, table)) or 'nothing'}")
        data, labels = table["data"], table["labels"]
        x = array(data) if is_array(data) else None
        if x is None or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != 3072 or len(x) == 0:
            got = "something else" if x is None else f"{x.dtype} {list(x.shape)}"
            raise BadFile(path, f"data must be uint8 [n, 3072] (32x32 pixels, 3 channels), got {got}")
        if isinstance(labels, list) and not all(type(label) is int for label in labels):
            raise BadFile(path, "labels must be whole numbers")
        y = array(labels) if is_array(labels) else np.asarray(labels)
        if y.shape != (len(x),) or y.dtype.kind not in "ui":
            got = f"shape {list(y.shape)}"
            raise BadFile(path, f"labels must be one whole number for each of {len(x)} images, got {got}")
        if y.min() < 0 or y.max() > 9:
            raise BadFile(path, f"labels must be from 0 to 9, got {y.min() if y.min() < 0 else y.max()}")
        return x.reshape(-1, 3, 32, 32), y


def unpickle(path: Path) -> Any:
    raw = path.read_bytes()
    for code, argument, _ in pickletools.genops(raw):  # reads the pickle, runs nothing
        if "PUT" in code.name and isinstance(argument, int) and argument > MOST_MEMO:
            raise BadFile(path, "is not a whole CIFAR-10 batch (its pickle asks for too much memory)")
    return RecordingUnpickler(io.BytesIO(raw), encoding="bytes").load()


class PickleCall:
    """A function that a pickle names or a call that it makes, with the state that it sets: recorded, never run."""

    __slots__ = ("args", "name", "state")
    state: Any

    def __init__(self, name: str, args: tuple[Any, ...] = ()):
        self.name, self.args, self.state = name, args, None

    def __call__(self, *args: Any) -> PickleCall:
        return PickleCall(self.name, args)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class RecordingUnpickler(pickle.Unpickler):
    """An unpickler that records the calls of an array's pickle and refuses every other name."""

    def find_class(self, module: str, name: str) -> PickleCall:
        if f"{module}.{name}" not in ARRAY_NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR-10 batch needs: not run")
        return PickleCall(name)


def is_array(value: Any) -> bool:
    return isinstance(value, PickleCall) and value.name in ("_reconstruct", "_frombuffer")


def array(call: PickleCall) -> Array:
    """The array of whole numbers that a recorded call would make."""
    if call.name == "_frombuffer":
        raw, kind, shape, order = call.args
    else:
        _, shape, kind, fortran, raw = call.state
        order = "F" if fortran else "C"
    code = text(kind.args[0])
    if code not in ("u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8"):
        raise pickle.UnpicklingError(f"an array of {code!r}, not of whole numbers")
    dtype = np.dtype((">" if text(kind.state[1]) == ">" else "<") + code)
    if not isinstance(shape, tuple) or len(shape) > 4 or not all(type(n) is int and n >= 0 for n in shape):
        raise pickle.UnpicklingError("an array of a strange shape")
    data = text(raw).encode("latin1") if isinstance(raw, PickleCall) else raw
    if not isinstance(data, bytes | bytearray) or math.prod(shape) * dtype.itemsize != len(data):
        raise pickle.UnpicklingError("an array whose shape and bytes disagree")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if order == "F" else "C")


def text(value: Any) -> Any:
    """A text that was pickled as bytes by Python 2, or as an encoded text by an old protocol of Python 3."""
    if isinstance(value, PickleCall) and value.name == "encode":
        value = value.args[0]
    return value.decode("latin1") if isinstance(value, bytes) else value
