"""Tensors and fields in Flower's records. What is read is checked first, byte by byte. Nothing is unpickled, and a
message that differs from what is expected is refused."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

PROTOCOL = 4  # messages of another version are refused
NUMPY = "numpy.ndarray"  # Flower's name for arrays as np.save writes them


class Refused(ValueError):
    """A message that is not what it should be."""


def arrays_of(tensors: tuple[Tensor, ...]) -> ArrayRecord:
    """Tensors as Flower sends them, named by their position."""
    return ArrayRecord({str(i): Array(v.detach().cpu().contiguous().numpy()) for i, v in enumerate(tensors)})


def packed(tensors: tuple[Tensor, ...] | ArrayRecord, fields: dict[str, Any]) -> RecordDict:
    """A message: tensors and fields. Several messages may share one record of tensors, which then travels once."""
    arrays = tensors if isinstance(tensors, ArrayRecord) else arrays_of(tensors)
    return RecordDict({"tensors": arrays, "fields": ConfigRecord({"protocol": PROTOCOL, **fields})})


def forget(content: RecordDict) -> None:
    """Free the bytes of a message's tensors now. Flower's records refer to each other, so that otherwise they stay
    until the garbage collector comes."""
    for record in content.array_records.values():
        for array in record.values():
            array.data = b""


def fields_of(content: RecordDict, expected: Mapping[str, type]) -> dict[str, Any]:
    """The fields of a message: exactly the expected ones, with their types."""
    if extra := set(content) - {"tensors", "fields"}:
        raise Refused(f"the record {sorted(extra)[0][:40]!r} is not expected")
    record = content.config_records.get("fields")
    if record is None:
        raise Refused("the message has no fields")
    fields = dict(record)
    if fields.pop("protocol", None) != PROTOCOL:
        raise Refused(f"the message is not of protocol {PROTOCOL}")
    for name, kind in expected.items():
        if name not in fields:
            raise Refused(f"the field {name!r} is missing")
        if type(fields[name]) is not kind:  # a bool is not an int here
            raise Refused(f"the field {name!r} must be {kind.__name__}, got {type(fields[name]).__name__}")
    for name in fields:
        if name not in expected:
            raise Refused(f"the field {str(name)[:40]!r} is not expected")
    return fields


def tensors_of(content: RecordDict, expected: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> tuple[Tensor, ...]:
    """The tensors of a message: as many as expected, with these shapes and types."""
    records = content.array_records
    if set(records) != {"tensors"}:
        raise Refused("the message must have one record of tensors")
    record = records["tensors"]
    if set(record) != {str(i) for i in range(len(expected))}:
        raise Refused(f"{len(expected)} tensors are expected, named from 0, got {len(record)}")
    return tuple(_tensor(record[str(i)], *form, i) for i, form in enumerate(expected))


def _tensor(array: Array, shape: tuple[int, ...], dtype: torch.dtype, i: int) -> Tensor:
    kind = np.dtype(str(dtype).removeprefix("torch."))
    head = header(shape, kind)
    if array.stype != NUMPY or tuple(array.shape) != shape or array.dtype != kind.name:
        raise Refused(
            f"tensor {i} must be {NUMPY} {kind.name} {list(shape)}, "
            f"got {str(array.stype)[:20]} {str(array.dtype)[:20]} {list(array.shape)[:4]}"
        )
    # np.load would trust the header, which may ask for any amount of memory, or for objects.
    if len(array.data) != len(head) + kind.itemsize * int(np.prod(shape)) or not array.data.startswith(head):
        raise Refused(f"tensor {i} does not hold the {kind.name} {list(shape)} that it declares")
    return torch.from_numpy(np.frombuffer(array.data, kind, offset=len(head)).reshape(shape).copy())


def header(shape: tuple[int, ...], kind: np.dtype) -> bytes:
    """The bytes that np.save writes before the numbers of such an array."""
    buffer = io.BytesIO()
    about = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, about)
    return buffer.getvalue()
