"""Tables: a .csv or .parquet file with a column for the target, and one for the client where there is one.

Columns of numbers are features; the model gets them standardised. A column of text becomes one feature for each of its
values (1 or 0). The target is a number with a decimal point (regression) or a class: text or a whole number; `task`
says otherwise.
"""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..checks import nearest, warn
from ..extras import needed_for
from .arrays import MOST_CLASSES
from .datasets import Dataset, moments
from .files import BadFile, reading
from .holdout import random_split

Array = np.ndarray
Columns = tuple[tuple[str, tuple[str, ...] | None], ...]  # of the features: names, and the values of a column of text
TABLES = (".csv", ".parquet")
TASKS = ("regression", "classes")  # what the target can be
GAPS = ("refuse", "drop")  # what is done with rows that have no value in some column
MOST_VALUES = 100  # different texts in a column; one with more is a name or an identifier, not a feature
Ignored = str | Sequence[str]  # columns that are not features
# Texts that stand for no value. The word "none" is not one of them: it is a usual category.
MISSING = frozenset(("", "NA", "N/A", "n/a", "na", "NaN", "nan", "NAN", "NULL", "Null", "null", "None"))
DECIMAL_COMMA = re.compile(r"[+-]?\d+(,\d+)?([eE][+-]?\d+)?")


def read_table(
    path: Path,
    target: str | None = None,
    client: str | None = None,
    ignore: Ignored = (),
    missing: str = "refuse",
    task: str | None = None,
) -> Dataset:
    """A data set from a table without the columns to `ignore`. A fifth of the rows (of each client, if there are
    clients) is held out for testing."""
    with reading(path, f"{path.suffix} file"):
        ignored = [ignore] if isinstance(ignore, str) else list(ignore)
        table = open_table(path)
        if target is None:
            raise BadFile(
                path, f'which column is the target? target="..." names it; there are {", ".join(table.names)}'
            )
        if target == client:
            raise BadFile(path, f"target and client must be two columns, both are {target!r}")
        for name in {target, client} & set(ignored):
            raise BadFile(path, f"{name!r} is the target or the client and cannot be ignored")
        refuse_absent(path, (target, *((client,) if client else ()), *ignored), table.names)
        columns = without_gaps(path, table, {name: None for name in table.names if name not in ignored}, missing)
        y, names = targets(path, target, columns.pop(target), task)
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
        table = open_table(path)
        refuse_absent(path, dict(columns), table.names)
        return features(path, without_gaps(path, table, dict(columns), missing=None), columns)


def refuse_absent(path: Path, names: Iterable[str], columns: Sequence[str]) -> None:
    for name in names:
        if name not in columns:
            raise BadFile(path, f"there is no column {name!r}; {nearest(name, columns)}")


class TableFile(Protocol):
    """A table in a file: the names of its columns, and what is in them."""

    names: list[str]

    def gaps(self, name: str) -> Array:
        """Whether each row has no value in this column."""

    def values(self, name: str, rows: Array, text: bool) -> Array:
        """The column in these rows, which have values: as text, or as numbers if all of them are numbers."""

    def place(self, name: str, row: int) -> str:
        """Where a row is in the file, and what it has in this column, for a message."""


class CsvTable:
    """A .csv file, separated by commas, semicolons or tabs; the first line holds the names. Between semicolons, numbers
    may have a decimal comma."""

    def __init__(self, path: Path) -> None:
        with path.open(newline="", encoding="utf-8-sig") as file:
            sample = file.read(1 << 16)
            file.seek(0)
            self.separator = max(",;\t", key=sample.split("\n", 1)[0].count)
            lines = csv.reader(file, delimiter=self.separator)
            self.names = [name.strip() for name in next(lines, [])]
            rows: list[list[str]] = []
            self.lines: list[int] = []  # a quoted entry may have several lines, so each row has the number of its last
            for line in lines:
                if not line:
                    continue
                if len(line) != len(self.names):
                    got = f"line {lines.line_num} has {len(line)} entries"
                    raise BadFile(path, f"{got}, the first line has {len(self.names)}")
                rows.append([entry.strip() for entry in line])
                self.lines.append(lines.line_num)
        if not rows or len(set(self.names)) != len(self.names) or not all(self.names):
            raise BadFile(path, "must begin with a line of different column names, with rows after it")
        self.columns = dict(zip(self.names, zip(*rows, strict=True), strict=True))

    def gaps(self, name: str) -> Array:
        return np.array([entry in MISSING for entry in self.columns[name]])

    def values(self, name: str, rows: Array, text: bool) -> Array:
        column = np.array(self.columns[name])[rows]
        return column if text else typed(column, decimal_comma=self.separator == ";")

    def place(self, name: str, row: int) -> str:
        entry = self.columns[name][row]
        return f"line {self.lines[row]}" + (f": {entry!r}" if entry else "")


class ParquetTable:
    """A .parquet file, whose columns have types."""

    def __init__(self, path: Path) -> None:
        with needed_for(str(path)):
            from pyarrow import parquet

        self.table: Any = parquet.read_table(path)
        self.names: list[str] = self.table.column_names

    def gaps(self, name: str) -> Array:
        return np.asarray(self.table[name].is_null(nan_is_null=True))

    def values(self, name: str, rows: Array, text: bool) -> Array:
        column = np.asarray(self.table[name].take(rows))
        return column.astype(str) if text or column.dtype.kind == "O" else column

    def place(self, name: str, row: int) -> str:
        return f"row {row + 1}"


def open_table(path: Path) -> TableFile:
    if path.suffix == ".parquet":
        return ParquetTable(path)
    try:
        return CsvTable(path)
    except UnicodeDecodeError:
        raise BadFile(path, "is not text in UTF-8; save it in this encoding") from None


def without_gaps(
    path: Path, table: TableFile, wanted: Mapping[str, tuple[str, ...] | None], missing: str | None
) -> dict[str, Array]:
    """The wanted columns, those with texts as text. Rows with gaps are refused, or dropped with a warning. For new rows
    there is no choice: `missing` is None."""
    gaps = {name: table.gaps(name) for name in wanted}
    missed = np.logical_or.reduce(list(gaps.values()))
    if missed.any() and missing != "drop":
        refuse_gaps(path, table, {name: np.flatnonzero(rows) for name, rows in gaps.items() if rows.any()}, missing)
    if missed.any():
        warn(f"{path.name}: {missed.sum():,} of {len(missed):,} rows have a gap and are left out")
    rows = np.flatnonzero(~missed)
    if not len(rows):
        raise BadFile(path, "every row has a gap, so none is left; ignore=[...] leaves columns out")
    return {name: table.values(name, rows, text=values is not None) for name, values in wanted.items()}


def refuse_gaps(path: Path, table: TableFile, gaps: Mapping[str, Array], missing: str | None) -> None:
    columns = [f"{name!r} ({len(rows):,}, the first in {table.place(name, rows[0])})" for name, rows in gaps.items()]
    choice = f', or leave out the rows: missing="drop", or the columns: ignore={quoted(gaps)}'
    raise BadFile(path, f"rows have no value for {', '.join(columns)}; fill them in{'' if missing is None else choice}")


def quoted(names: Iterable[str]) -> str:
    """Names as TOML and Python write them.

    >>> print(quoted(["age"]), quoted(["age", "weight"]))
    "age" ["age", "weight"]
    """
    texts = [f'"{name}"' for name in names]
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def typed(column: Array, decimal_comma: bool = False) -> Array:
    """Text as whole numbers or floats, where all of it can be read so.

    >>> [typed(np.array(column)).dtype.kind for column in (["1", "2"], ["1.5", "2"], ["a", "2"], ["1,5", "2"])]
    ['i', 'f', 'U', 'U']
    >>> typed(np.array(["1,5", "2"]), decimal_comma=True)
    array([1.5, 2. ])
    """
    for kind in (np.int64, np.float64):
        try:
            return column.astype(kind)
        except (ValueError, OverflowError):
            continue
    if decimal_comma and all(DECIMAL_COMMA.fullmatch(entry) for entry in column):
        return np.char.replace(column, ",", ".").astype(np.float64)
    return column


def targets(path: Path, name: str, y: Array, task: str | None = None) -> tuple[Array, tuple[str, ...] | None]:
    """For regression float32; for classes 0, 1, ... with their names. By default decimal points mean regression."""
    if task == "regression" and y.dtype.kind not in "buif":
        raise BadFile(
            path, f'{name} must be numbers for task="regression", got text: {", ".join(map(repr, y[:3].tolist()))}, ...'
        )
    if task == "regression" or (task is None and y.dtype.kind == "f"):
        check_finite(path, name, y)
        return y.astype(np.float32), None
    values, number = np.unique(y, return_inverse=True)
    if len(values) < 2:
        raise BadFile(path, f"{name} must have two different values or more, all rows have {values[0]}")
    hint = 'task="regression" takes it as a number'
    if len(values) > min(MOST_CLASSES, max(MOST_VALUES, len(y) // 10)):
        if y.dtype.kind not in "buif":
            hint = not_quite_numbers(y) or "a class needs several rows"
        raise BadFile(path, f"{name} has {len(values)} different values in {len(y)} rows; {hint}")
    if task is None and y.dtype.kind == "i" and len(values) > 2 and not np.array_equal(values, np.arange(len(values))):
        warn(
            f"{path.name}: {name} has the whole numbers {values[0]} to {values[-1]}, which become the classes 0 to "
            f'{len(values) - 1}; {hint}, task="classes" accepts this'
        )
    return number.astype(np.int64), tuple(map(str, values))


def check_finite(path: Path, name: str, column: Array) -> None:
    if not np.isfinite(column).all():
        raise BadFile(path, f"{name} must be finite numbers, row {np.flatnonzero(~np.isfinite(column))[0] + 1} is not")


def describe(path: Path, columns: Mapping[str, Array]) -> Columns:
    """The columns of the features, which must be numbers or text."""
    described: list[tuple[str, tuple[str, ...] | None]] = []
    unusable: dict[str, str] = {}
    for name, column in columns.items():
        values = np.unique(column) if column.dtype.kind in "US" else None
        if values is not None and len(values) > MOST_VALUES:
            unusable[name] = not_quite_numbers(column) or f"{len(values):,} different texts"
        elif values is None and column.dtype.kind not in "buif":
            unusable[name] = f"{column.dtype}, neither numbers nor text"
        described.append((name, None if values is None else tuple(map(str, values))))
    if unusable:
        reasons = ", ".join(f"{name!r} ({why})" for name, why in unusable.items())
        raise BadFile(
            path,
            f"some columns cannot be features: {reasons}; ignore={quoted(unusable)} leaves them out, client=... makes "
            "one of them the owners of the rows",
        )
    if not described:
        raise BadFile(path, "there is no column besides the target and the client")
    return tuple(described)


def not_quite_numbers(column: Array) -> str:
    """Names an entry that keeps a column of numbers from being one; nothing if most entries are not numbers."""
    other = [entry for entry in column.tolist() if typed(np.array([entry])).dtype.kind == "U"]
    return f"numbers except {other[0]!r}" if 0 < len(other) < len(column) / 2 else ""


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
