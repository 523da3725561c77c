"""Tensors and words in Flower's records. What is read is checked first, byte by byte: nothing is unpickled, ever, and
a message that is not exactly what was expected is refused."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

PROTOCOL = 1  # a message of another version is refused
NUMPY = "numpy.ndarray"  # Flower's word for arrays as np.save writes them


class Refused(ValueError):
    """A message that is not what it should be."""


def packed(tensors: tuple[Tensor, ...], words: dict[str, Any]) -> RecordDict:
    """Tensors by their place, and words."""
    arrays = ArrayRecord({str(i): Array(v.detach().cpu().contiguous().numpy()) for i, v in enumerate(tensors)})
    return RecordDict({"tensors": arrays, "words": ConfigRecord({"protocol": PROTOCOL, **words})})


def words_of(content: RecordDict, expected: Mapping[str, type]) -> dict[str, Any]:
    """The words of a message: all that are expected, of their types, and none besides."""
    found = content.config_records.get("words")
    if found is None:
        raise Refused("the message has no words")
    words = dict(found)
    if words.pop("protocol", None) != PROTOCOL:
        raise Refused(f"the message is not of protocol {PROTOCOL}")
    for name, kind in expected.items():
        if name not in words:
            raise Refused(f"the word {name!r} is absent")
        if type(words[name]) is not kind:  # a bool is no int here
            raise Refused(f"the word {name!r} must be {kind.__name__}, got {type(words[name]).__name__}")
    for name in words:
        if name not in expected:
            raise Refused(f"there is a word {str(name)[:40]!r} that nobody expects")
    return words


def tensors_of(content: RecordDict, expected: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> tuple[Tensor, ...]:
    """The tensors of a message: as many as expected, of these shapes and types."""
    records = content.array_records
    if set(records) != {"tensors"}:
        raise Refused("the message has no tensors, or more than one record of them")
    record = records["tensors"]
    if set(record) != {str(i) for i in range(len(expected))}:
        raise Refused(f"{len(expected)} tensors are expected, named 0 to {len(expected) - 1}, got {len(record)}")
    return tuple(_tensor(record[str(i)], *form, i) for i, form in enumerate(expected))


def _tensor(array: Array, shape: tuple[int, ...], dtype: torch.dtype, i: int) -> Tensor:
    kind = np.dtype(str(dtype).removeprefix("torch."))
    head = header(shape, kind)
    if array.stype != NUMPY or tuple(array.shape) != shape or array.dtype != kind.name:
        raise Refused(
            f"tensor {i} must be {kind.name} {list(shape)}, got {str(array.dtype)[:20]} {list(array.shape)[:4]}"
        )
    # np.load would believe the header, which may ask for any amount of memory, or for objects.
    if len(array.data) != len(head) + kind.itemsize * int(np.prod(shape)) or not array.data.startswith(head):
        raise Refused(f"tensor {i} is not the {kind.name} {list(shape)} that it says it is")
    return torch.from_numpy(np.frombuffer(array.data, kind, offset=len(head)).reshape(shape).copy())


def header(shape: tuple[int, ...], kind: np.dtype) -> bytes:
    """What np.save writes before the numbers of such an array."""
    buffer = io.BytesIO()
    about = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, about)
    return buffer.getvalue()
