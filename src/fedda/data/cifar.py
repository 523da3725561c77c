"""CIFAR-10 as published: `cifar-10-batches-py`, six pickles.

A pickle is a program. This reader runs none: the few names that an array's pickle calls are answered by stand-ins of
our own that only take bytes, and every other name is refused, so a file from anywhere is safe to open.
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


def read_cifar10(paths: Sequence[Path]) -> Dataset:
    """CIFAR-10 from its batches, the last one for testing."""
    parts = [batch(path) for path in paths]
    x, y = (np.concatenate([part[i] for part in parts[:-1]]) for i in range(2))
    return assemble(paths[0].parent, x, y, *parts[-1], names=NAMES)


def batch(path: Path) -> tuple[Array, Array]:
    """Images [n, 3, 32, 32] and labels of one batch."""
    with reading(path, "CIFAR-10 batch"):
        content = unpickled(path)
        if not isinstance(content, dict):
            raise BadFile(path, f"must be the pickle of a dict, got {type(content).__name__}")
        # Python 2 wrote the published files, with keys that are bytes now.
        table = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in content.items()}
        for key in ("data", "labels"):
            if key not in table:
                raise BadFile(path, f"must hold {key!r}, got {', '.join(map(repr, table)) or 'nothing'}")
        data, labels = table["data"], table["labels"]
        x = data.array if isinstance(data, Stored) else None
        if x is None or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != 3072 or len(x) == 0:
            got = "something else" if x is None else f"{x.dtype} {list(x.shape)}"
            raise BadFile(path, f"data must be uint8 [n, 3072] (32x32 pixels, 3 channels), got {got}")
        y = labels.array if isinstance(labels, Stored) else labels
        if isinstance(y, list) and not all(type(label) is int for label in y):
            raise BadFile(path, "labels must be whole numbers")
        y = np.asarray(y)
        if y.shape != (len(x),) or y.dtype.kind not in "ui":
            raise BadFile(
                path, f"labels must be one whole number for each of {len(x)} images, got shape {list(y.shape)}"
            )
        if y.min() < 0 or y.max() > 9:
            raise BadFile(path, f"labels must be from 0 to 9, got {y.min() if y.min() < 0 else y.max()}")
        return x.reshape(-1, 3, 32, 32), y


def unpickled(path: Path) -> Any:
    raw = path.read_bytes()
    for code, argument, _ in pickletools.genops(raw):  # reads, runs nothing
        if "PUT" in code.name and isinstance(argument, int) and argument > MOST_MEMO:
            raise BadFile(path, "is not a whole CIFAR-10 batch (its pickle asks for too much memory)")
    return Restricted(io.BytesIO(raw), encoding="bytes").load()


class Restricted(pickle.Unpickler):
    """An unpickler that knows the names in an array's pickle, in numpy 1's and numpy 2's spelling, and no other."""

    def find_class(self, module: str, name: str) -> Any:
        core, _, place = module.rpartition(".")
        if core in ("numpy.core", "numpy._core"):
            if (place, name) == ("multiarray", "_reconstruct"):
                return PickleCall(lambda *_: Stored())
            if (place, name) == ("numeric", "_frombuffer"):
                return PickleCall(from_buffer)
        if (module, name) == ("numpy", "ndarray"):
            return None  # an argument of _reconstruct, never called
        if (module, name) == ("numpy", "dtype"):
            return PickleCall(lambda code, *_: Kind(code))
        if (module, name) == ("_codecs", "encode"):
            return PickleCall(encode)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR-10 batch needs: not run")


class PickleCall:
    """A function as a pickle may call it: a fresh object each time, on which a pickle can set nothing that lasts."""

    __slots__ = ("run",)

    def __init__(self, run: Any):
        self.run = run

    def __call__(self, *given: Any) -> Any:
        return self.run(*given)


class Kind:
    """Stands in for numpy.dtype: a type of whole numbers and its byte order."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any):
        code = code.decode("ascii") if isinstance(code, bytes) else code
        if code not in ("u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8"):
            raise pickle.UnpicklingError(f"an array of {code!r}, not of whole numbers")
        self.code, self.order = code, "<"

    def __setstate__(self, state: Any) -> None:
        order = state[1].decode("ascii") if isinstance(state[1], bytes) else state[1]
        self.order = ">" if order == ">" else "<"

    def array(self, raw: Any, shape: Any, order: str) -> Array:
        kind = np.dtype(self.order + self.code)
        if not isinstance(shape, tuple) or len(shape) > 4 or not all(type(n) is int and n >= 0 for n in shape):
            raise pickle.UnpicklingError("an array of a strange shape")
        if not isinstance(raw, bytes | bytearray) or math.prod(shape) * kind.itemsize != len(raw):
            raise pickle.UnpicklingError("an array whose shape and bytes disagree")
        return np.frombuffer(raw, kind).reshape(shape, order="F" if order == "F" else "C")


class Stored:
    """Stands in for numpy.ndarray: its bytes, its shape and its kind."""

    __slots__ = ("array",)
    array: Array

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, raw = state
        self.array = Kind.array(kind, raw, shape, "F" if fortran else "C")


def from_buffer(raw: Any, kind: Kind, shape: Any, order: str) -> Stored:
    made = Stored()
    made.array = Kind.array(kind, raw, shape, order)
    return made


def encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How Python 3 writes bytes in an old protocol."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError("_codecs.encode of something else than bytes")
    return text.encode("latin1")
