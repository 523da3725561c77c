"""Files: written atomically, locked by one process at a time, rows as lines of JSON."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def try_lock(handle: int, wait: bool = False) -> bool:
    """Lock an open file or folder until it is closed or this process ends, and return whether it worked.

    False means that another process has the lock; with `wait`, wait for that process to release it. On a file system
    without locks the answer is always True.
    """
    from filelock import lock_descriptor

    try:
        return lock_descriptor(handle, blocking=wait)
    except OSError:
        return True


def open_folder(path: Path) -> int | None:
    """A handle of a folder, to lock or to sync it; None on Windows, which has no such handles."""
    return None if os.name == "nt" else os.open(path, os.O_RDONLY)


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[bool]:
    """Lock the file `path`, which is created if missing, during the block, and give whether it worked.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "one"
    >>> with locked(file) as first, locked(file) as second:
    ...     print(first, second)
    True False
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield try_lock(handle, wait)
    finally:
        os.close(handle)


PRIVATE = 0o600  # the mode of a file that holds a secret


def write_whole(path: Path, content: str | bytes, mode: int | None = None) -> Path:
    """Write a file atomically: at any moment it is complete or still the old one, and it is synced before its rename.

    With `mode` it has that mode from its first byte on, for any umask. An OSError names the file, and a failed attempt
    leaves nothing behind.

    >>> import tempfile
    >>> write_whole(Path(tempfile.mkdtemp()) / "a.txt", "ö").read_bytes()
    b'\\xc3\\xb6'
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with errors_of_file(path):
            temporary.unlink(missing_ok=True)
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
            with open(handle, "wb") as file:
                if mode is not None and hasattr(os, "fchmod"):
                    os.fchmod(handle, mode)
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(handle)
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # free its space on a full disk
        raise
    folder = open_folder(path.parent)
    if folder is not None:
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return path


def unfinished(folder: Path, names: Iterable[str]) -> list[Path]:
    """Temporary files that killed writers left for these names, which may be patterns.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("rows.jsonl", "rows.jsonl.12.tmp", "rows.jsonl.mine.tmp"):
    ...     (folder / name).touch()
    >>> [path.name for path in unfinished(folder, ["rows.jsonl"])]
    ['rows.jsonl.12.tmp']
    """
    return [path for name in names for path in folder.glob(f"{name}.*.tmp") if path.suffixes[-2][1:].isdigit()]


@contextmanager
def errors_of_file(path: Path) -> Iterator[None]:
    """Put the name of the file into an OSError of the block: that of a failed write has none."""
    try:
        yield
    except OSError as why:
        if why.errno is None:
            raise
        raise OSError(why.errno, why.strerror, str(path)) from why


def json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Rows as lines of JSON; NaN and infinity become null.

    >>> json_lines([{"round": 1, "train_loss": math.nan}])
    b'{"round": 1, "train_loss": null}\\n'
    """

    def finite(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return "".join(json.dumps({k: finite(v) for k, v in row.items()}) + "\n" for row in rows).encode()
