"""A cache of parsed data sets: .npy files that are mapped into memory, so that a data set opens at once.

A folder `parsed/NAME-FINGERPRINT/` is written under a temporary name and then renamed, so it is always complete. The
fingerprint changes with the source files and with the readers. Without write access nothing is cached.
"""

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
from .files import BadFile, data_folder

STALE = 3600.0  # seconds after which a temporary folder was left by a killed process
ARRAYS = ("x", "y", "x_test", "y_test", "client", "client_test", "mean", "std")


def cached(name: str, sources: Sequence[Path], parse: Callable[[], Dataset]) -> Dataset:
    """The result of `parse`, which reads these sources, from the cache if possible."""
    paths, state = fingerprint(sources)
    try:
        folder = data_folder() / "parsed" / f"{name}-{paths}{state}"
    except ValueError:  # no home directory
        return parse()
    data = load(folder)
    if data is None:
        data = parse()
        with suppress(OSError):  # a read-only or a full disk: work without a cache
            store(folder, data)
            remove_stale(folder, f"{name}-{paths}")
            data = load(folder) or data
    return data


def fingerprint(sources: Sequence[Path]) -> tuple[str, str]:
    """A hash of the paths, and one of the sizes and times of the files and of the readers' source code."""
    paths, state = hashlib.sha256(), hashlib.sha256()
    for module in sorted(Path(__file__).parent.glob("*.py")):
        state.update(module.read_bytes())
    for path in sources:
        try:
            about = os.stat(path)
        except OSError as why:
            raise BadFile(path, f"cannot be read: {why.strerror}") from None
        paths.update(os.fsencode(path.absolute()) + b"\0")
        state.update(f"{path.name}\0{about.st_size}\0{about.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return paths.hexdigest()[:8], state.hexdigest()[:16]


def load(folder: Path) -> Dataset | None:
    """The data set in a cache folder, or None if it is absent or damaged."""
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
    except Exception:  # any damage: parse the sources again
        return None


def store(folder: Path, data: Dataset) -> None:
    """Write a temporary folder and rename it, so that the folder is complete or absent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        arrays = {}
        for name in ARRAYS:
            array = getattr(data, name)
            if array is not None:
                np.save(temporary / f"{name}.npy", array, allow_pickle=False)
                arrays[name] = list(array.shape), array.dtype.str, (temporary / f"{name}.npy").stat().st_size
        about = {"classes": data.classes, "names": data.names, "arrays": arrays}
        (temporary / "about.json").write_text(json.dumps(about), encoding="utf-8")
        temporary.chmod(0o755)  # mkdtemp lets only the owner read, but a data folder may be shared
        if folder.exists():  # damaged, or just written by another process
            if load(folder) is not None:
                return
            shutil.rmtree(folder)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_stale(folder: Path, prefix: str) -> None:
    """Remove the folders of earlier states of the same files, and those that killed processes left."""
    pattern = re.compile(rf"\.?{re.escape(prefix)}[0-9a-f]{{16}}(-.*)?")
    for other in folder.parent.iterdir():
        if other != folder and pattern.fullmatch(other.name):
            with suppress(OSError):  # another process may remove it too
                if not other.name.startswith(".") or time.time() - other.stat().st_mtime > STALE:
                    shutil.rmtree(other)
