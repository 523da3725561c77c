"""The files of a study's records: METHOD-STAGE.jsonl with a line for each point and seed, compressed once a task is
complete."""

import gzip
from collections.abc import Iterator
from pathlib import Path

from fedda.files import write_whole


def lines(folder: Path, method: str = "*") -> Iterator[str]:
    """All lines of a folder, or those of the files of a method."""
    for path in sorted({file.with_suffix("") if file.suffix == ".gz" else file for file in files(folder, method)}):
        packed = Path(f"{path}.gz")
        content = gzip.decompress(packed.read_bytes()) if packed.exists() else b""
        content += path.read_bytes() if path.exists() else b""
        yield from content.decode().splitlines()


def files(folder: Path, method: str = "*") -> list[Path]:
    return [*folder.glob(f"{method}-*.jsonl"), *folder.glob(f"{method}-*.jsonl.gz")]


def pack(folder: Path) -> None:
    """Compress the files of a folder. The same records give the same bytes."""
    for path in sorted(folder.glob("*-*.jsonl")):
        packed = Path(f"{path}.gz")
        before = gzip.decompress(packed.read_bytes()) if packed.exists() else b""
        write_whole(packed, gzip.compress(before + path.read_bytes(), mtime=0))
        path.unlink()
