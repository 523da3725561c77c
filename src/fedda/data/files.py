"""The data folder, and one-line errors for files that cannot be used."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..extras import MissingPackage


def data_folder() -> Path:
    """$FEDDA_DATA, or else `fedda` in the user's cache folder."""
    if folder := os.environ.get("FEDDA_DATA"):
        return Path(folder).expanduser()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "fedda"
    except RuntimeError:  # no home directory, as in some containers
        raise ValueError("there is no home directory to keep data in; set FEDDA_DATA to a folder") from None


class BadFile(ValueError):
    """A file that cannot be used: one line that begins with its path."""

    def __init__(self, path: Path | str, reason: str):
        super().__init__(" ".join(f"{path}: {reason}".split()))


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Turn every exception inside into a `BadFile` of this path; `kind` is what the file should be.

    The decoder of a damaged file can raise anything (zlib.error, struct.error, KeyError, MemoryError, ...), so all
    exceptions are caught, here and nowhere else.

    >>> with reading(Path("a.npz"), ".npz file"):
    ...     raise KeyError("x")
    Traceback (most recent call last):
    fedda.data.files.BadFile: a.npz: is not a whole .npz file (KeyError: 'x')
    """
    try:
        mode = os.stat(path).st_mode if path.exists() else 0
        if mode and not stat.S_ISREG(mode):  # reading a pipe could block for ever
            a = "an" if kind[0] in "aeiou" else "a"
            raise BadFile(path, f"must be {a} {kind}, got a {'folder' if stat.S_ISDIR(mode) else 'device or pipe'}")
        yield
    except (BadFile, MissingPackage):
        raise
    except MemoryError:
        raise BadFile(path, "does not fit in memory") from None
    except Exception as why:
        if isinstance(why, OSError) and why.strerror:  # Pillow and gzip raise OSError, without strerror, if damaged
            raise BadFile(path, f"cannot be read: {why.strerror}") from None
        reason = (str(why).strip().splitlines() or [""])[0][:200]
        raise BadFile(path, f"is not a whole {kind} ({type(why).__name__}: {reason})") from None
