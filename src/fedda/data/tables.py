"""Tables: a .csv or .parquet file with a column for the target, and one for the client where there is one.

Columns of numbers are features; the model gets them standardised. A column of text becomes one feature for each of its
values (1 or 0). The target is a number with a decimal point (regression) or a class: text or a whole number.
"""

import csv
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..checks import nearest
from ..extras import needed_for
from .arrays import MOST_CLASSES
from .datasets import Dataset, moments
from .files import BadFile, reading
from .holdout import random_split

Array = np.ndarray
Columns = tuple[tuple[str, tuple[str, ...] | None], ...]  # of the features: names, and the values of a column of text
TABLES = (".csv", ".parquet")
MOST_VALUES = 100  # different texts in a column; one with more is a name or an identifier, not a feature
Ignored = str | Sequence[str]  # columns that are not features
NO_VALUE = ', or the column: ignore="{}"'  # for training data: new rows need all columns
MISSING = frozenset(("", "na", "nan", "null", "none", "n/a"))


def read_table(path: Path, target: str | None = None, client: str | None = None, ignore: Ignored = ()) -> Dataset:
    """A data set from a table without the columns to `ignore`. A fifth of the rows (of each client, if there are
    clients) is held out for testing."""
    with reading(path, f"{path.suffix} file"):
        ignored = [ignore] if isinstance(ignore, str) else list(ignore)
        columns = from_parquet(path, without=ignored) if path.suffix == ".parquet" else from_csv(path, without=ignored)
        if target is None:
            raise BadFile(path, f'which column is the target? target="..." names it; there are {", ".join(columns)}')
        if target == client:
            raise BadFile(path, f"target and client must be two columns, both are {target!r}")
        for name in {target, client} & set(ignored):
            raise BadFile(path, f"{name!r} is the target or the client and cannot be ignored")
        refuse_absent(path, (target, *((client,) if client else ())), list(columns))
        y, names = targets(path, target, columns.pop(target))
        owner = None if client is None else columns.pop(client).astype(str)
        described = describe(path, columns)
        x = features(path, columns, described)
        train, test = random_split(len(y), draw=0, owner=owner)
        if len(test) == 0:
            raise BadFile(path, f"must hold enough rows to hold a fifth of them out, got {len(y)}")
        mean, std = moments(x, train)
        data = Dataset(
            x[train].astype(np.float32), y[train], x[test].astype(np.float32), y[test],
            0 if names is None else len(names), names=names,
            mean=mean, std=std, columns=described,
        )  # fmt: skip
        return data if owner is None else data._replace(client=owner[train], client_test=owner[test])


def read_new_rows(path: Path, columns: Columns) -> Array:
    """The features of a new table, for a model that was trained on these columns. Other columns are ignored."""
    with reading(path, f"{path.suffix} file"):
        read = from_parquet if path.suffix == ".parquet" else from_csv
        return features(path, read(path, dict(columns)), columns)


def refuse_absent(path: Path, names: Iterable[str], columns: Sequence[str]) -> None:
    for name in names:
        if name not in columns:
            raise BadFile(path, f"there is no column {name!r}; {nearest(name, columns)}")


def from_csv(path: Path, wanted: Mapping[str, object] | None = None, without: Sequence[str] = ()) -> dict[str, Array]:
    """The columns by name, as numbers where every entry is one, else as text. The first line holds the names.

    If columns are `wanted`, the others are ignored; those whose value is not None stay text. By default all are wanted
    but those in `without`.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        sample = file.read(1 << 16)
        file.seek(0)
        separator = max(",;\t", key=sample.split("\n", 1)[0].count)
        lines = csv.reader(file, delimiter=separator)
        head = [name.strip() for name in next(lines, [])]
        rows, ends = [], []  # a quoted entry may have several lines, so each row has the number of its last one
        for line in lines:
            if not line:
                continue
            if len(line) != len(head):
                raise BadFile(path, f"line {lines.line_num} has {len(line)} entries, the first line has {len(head)}")
            rows.append(line)
            ends.append(lines.line_num)
    if not rows or len(set(head)) != len(head) or not all(head):
        raise BadFile(path, "must begin with a line of different column names, with rows after it")
    hint = "" if wanted else NO_VALUE
    wanted = chosen(path, head, wanted, without)
    for name, column in zip(head, zip(*rows, strict=True), strict=True):
        gaps = [i for i, entry in enumerate(column) if entry.strip().lower() in MISSING] if name in wanted else []
        if gaps:
            refuse_gaps(path, name, len(gaps), hint, f", the first in line {ends[gaps[0]]}")
    columns = {name: np.array(column) for name, column in zip(head, zip(*rows, strict=True), strict=True)}
    return {name: typed(columns[name]) if wanted[name] is None else np.char.strip(columns[name]) for name in wanted}


def chosen(
    path: Path, head: Sequence[str], wanted: Mapping[str, object] | None, without: Sequence[str]
) -> Mapping[str, object]:
    """The columns to read: those that are `wanted`, or all but those in `without`."""
    refuse_absent(path, without, head)
    if wanted is None:
        return dict.fromkeys(name for name in head if name not in without)
    refuse_absent(path, wanted, head)
    return wanted


def refuse_gaps(path: Path, name: str, gaps: int, hint: str, where: str = "") -> None:
    rows = "1 row has" if gaps == 1 else f"{gaps} rows have"
    raise BadFile(path, f"{rows} no value for {name!r}{where}; fill it in or leave the row out{hint.format(name)}")


def from_parquet(
    path: Path, wanted: Mapping[str, object] | None = None, without: Sequence[str] = ()
) -> dict[str, Array]:
    """The columns by name, of the types that the file gives; which of them, as for `from_csv`."""
    with needed_for(str(path)):
        from pyarrow import parquet

    table = parquet.read_table(path)
    hint = "" if wanted else NO_VALUE
    table = table.select(list(chosen(path, table.column_names, wanted, without)))
    for name in table.column_names:
        if table[name].null_count:
            refuse_gaps(path, name, table[name].null_count, hint)
    columns = {name: np.asarray(table[name]) for name in table.column_names}
    return {name: v.astype(str) if v.dtype.kind == "O" else v for name, v in columns.items()}


def typed(column: Array) -> Array:
    """Text as whole numbers or floats, where all of it can be read so.

    >>> [typed(np.array(column)).dtype.kind for column in (["1", "2"], ["1.5", "2"], ["a", "2"])]
    ['i', 'f', 'U']
    """
    for kind in (np.int64, np.float64):
        try:
            return column.astype(kind)
        except (ValueError, OverflowError):
            continue
    return np.char.strip(column)


def targets(path: Path, name: str, y: Array) -> tuple[Array, tuple[str, ...] | None]:
    """Numbers with a decimal point as float32; anything else as classes 0, 1, ... with their names."""
    if y.dtype.kind == "f":
        check_finite(path, name, y)
        return y.astype(np.float32), None
    values, number = np.unique(y, return_inverse=True)
    if len(values) < 2:
        raise BadFile(path, f"{name} must have two different values or more, all rows have {values[0]}")
    if len(values) > min(MOST_CLASSES, max(MOST_VALUES, len(y) // 10)):
        raise BadFile(
            path,
            f"{name} has {len(values)} different values in {len(y)} rows; for regression write decimal points",
        )
    if y.dtype.kind == "i" and len(values) > 2 and not np.array_equal(values, np.arange(len(values))):
        warnings.warn(
            f"{path.name}: {name} has the whole numbers {values[0]} to {values[-1]}, which become the classes 0 to "
            f"{len(values) - 1}; for regression write decimal points",
            stacklevel=2,
        )
    return number.astype(np.int64), tuple(map(str, values))


def check_finite(path: Path, name: str, column: Array) -> None:
    if not np.isfinite(column).all():
        raise BadFile(path, f"{name} must be finite numbers, row {np.flatnonzero(~np.isfinite(column))[0] + 1} is not")


def describe(path: Path, columns: Mapping[str, Array]) -> Columns:
    """The columns of the features, which must be numbers or text."""
    described: list[tuple[str, tuple[str, ...] | None]] = []
    for name, column in columns.items():
        values = np.unique(column) if column.dtype.kind in "US" else None
        if values is not None and len(values) > MOST_VALUES:
            raise BadFile(
                path,
                f'the column {name!r} has {len(values)} different texts: ignore="{name}" leaves it out, '
                f'client="{name}" makes each a client',
            )
        if values is None and column.dtype.kind not in "buif":
            raise BadFile(
                path, f'the column {name!r} must be numbers or text, got {column.dtype}: ignore="{name}" leaves it out'
            )
        described.append((name, None if values is None else tuple(map(str, values))))
    if not described:
        raise BadFile(path, "there is no column besides the target and the client")
    return tuple(described)


def features(path: Path, columns: Mapping[str, Array], described: Columns) -> Array:
    """The described columns as one array [rows, features]; a column of text gives one feature for each value."""
    parts = []
    for name, values in described:
        column = columns[name]
        if values is None:
            if column.dtype.kind not in "buif":
                raise BadFile(path, f"the column {name!r} must be numbers, as in the training data, got text")
            check_finite(path, name, column)
            parts.append(column.astype(np.float64)[:, None])
            continue
        column = column.astype(str)
        for row in np.flatnonzero(~np.isin(column, values))[:1]:
            known = nearest(str(column[row]), values)
            raise BadFile(path, f"row {row + 1}: the training data has no {name!r} with {str(column[row])!r}; {known}")
        parts.append((column[:, None] == np.array(values)).astype(np.float64))
    return np.concatenate(parts, axis=1)
