"""Parsed data sets as .npy files that are mapped into memory: the second opening takes no time.

A folder `parsed/NAME-FINGERPRINT/` appears under its name only when it is whole (written aside, then renamed), and its
fingerprint changes with the files it was made from. Without a place to write there is no cache, and all else works.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from .datasets import Dataset
from .files import BadFile, home

STALE = 3600.0  # seconds after which a folder aside belongs to nobody
ARRAYS = ("x", "y", "x_test", "y_test", "client", "client_test", "mean", "std")


def cached(name: str, sources: Sequence[Path], parse: Callable[[], Dataset]) -> Dataset:
    """What `parse` makes of the sources, from the cache where it is there."""
    made_from, state = fingerprint(sources)
    try:
        folder = home() / "parsed" / f"{name}-{made_from}{state}"
    except ValueError:  # no home directory
        return parse()
    found = load(folder)
    if found is None:
        found = parse()
        with suppress(OSError):  # read-only, or full: go on without
            store(folder, found)
            forget(folder, f"{name}-{made_from}")
            found = load(folder) or found
    return found


def fingerprint(sources: Sequence[Path]) -> tuple[str, str]:
    """Which files, and their state: sizes, times, and how this module stores them."""
    which, state = hashlib.sha256(), readers()
    for path in sources:
        try:
            about = os.stat(path)
        except OSError as why:
            raise BadFile(path, f"cannot be read: {why.strerror}") from None
        which.update(os.fsencode(path.absolute()) + b"\0")
        state.update(f"{path.name}\0{about.st_size}\0{about.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return which.hexdigest()[:8], state.hexdigest()[:16]


def readers() -> Any:
    """A hash of the readers themselves: with a reader that was mended, everything is parsed anew."""
    found = hashlib.sha256()
    for module in sorted(Path(__file__).parent.glob("*.py")):
        found.update(module.read_bytes())
    return found


def load(folder: Path) -> Dataset | None:
    """The data set in a cache folder, or None where it is absent or damaged in any way."""
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        fields: dict[str, Any] = {}
        for name, (shape, kind, size) in about["arrays"].items():
            file = folder / f"{name}.npy"
            array = np.load(file, mmap_mode="r", allow_pickle=False)
            if file.stat().st_size != size or list(array.shape) != shape or array.dtype.str != kind:
                return None
            fields[name] = array
        names = about["names"]
        return Dataset(**fields, classes=about["classes"], names=None if names is None else tuple(names))
    except Exception:  # whatever it is, the files it was made from are the truth
        return None


def store(folder: Path, data: Dataset) -> None:
    """Write the folder aside and rename it: it is there whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        arrays = {}
        for name in ARRAYS:
            array = getattr(data, name)
            if array is not None:
                np.save(aside / f"{name}.npy", array, allow_pickle=False)
                arrays[name] = list(array.shape), array.dtype.str, (aside / f"{name}.npy").stat().st_size
        about = {"classes": data.classes, "names": data.names, "arrays": arrays}
        (aside / "about.json").write_text(json.dumps(about), encoding="utf-8")
        aside.chmod(0o755)  # mkdtemp's is the owner's alone; a shared folder of data is read by others
        if folder.exists():  # damaged, or another process was quicker
            if load(folder) is not None:
                return
            shutil.rmtree(folder)
        os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def forget(folder: Path, prefix: str) -> None:
    """Remove what earlier states of the same files left, and what writers that were killed did."""
    pattern = re.compile(rf"\.?{re.escape(prefix)}[0-9a-f]{{16}}(-.*)?")
    for other in folder.parent.iterdir():
        if other != folder and pattern.fullmatch(other.name):
            with suppress(OSError):  # another process may be at it
                if not other.name.startswith(".") or time.time() - other.stat().st_mtime > STALE:
                    shutil.rmtree(other)
