"""The server's state on disk: one file that is whole or the old one, and rows that can be cut back to it."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from ..files import json_lines, taken

FACTS = ("plan", "run", "names", "noise", "stamp", "rejected", "rows")  # what a checkpoint says besides its tensors


class Checkpoint:
    def __init__(self, place: Path):
        self.place, self.file, self.rows = place, place / "state.safetensors", place / "metrics.jsonl"

    def begin(self) -> None:
        """Nothing of an earlier run is overwritten without being asked."""
        self.place.mkdir(parents=True, exist_ok=True)
        self.lock()
        if self.file.exists():
            self.release()
            raise ValueError(f"{self.place}: holds a run: resume it, or give another folder")
        self.rows.unlink(missing_ok=True)  # of a server that died before its first checkpoint

    def lock(self) -> None:
        """One server at a time, until it ends, however it ends; the file says which process it is."""
        self.held = open(self.place / "server.pid", "a+")  # noqa: SIM115  held until the process ends
        if not taken(self.held.fileno()):
            raise ValueError(f"{self.place}: another server is writing into it")
        self.held.truncate(0)
        self.held.write(f"{os.getpid()}\n")
        self.held.flush()

    def release(self) -> None:
        self.held.close()

    def append(self, rows: list[dict[str, Any]]) -> None:
        with open(self.rows, "ab") as file:
            file.write(json_lines(rows))

    def save(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        length = self.rows.stat().st_size if self.rows.exists() else 0
        content = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        temporary = self.file.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            file.write(save(content, metadata={"facts": json.dumps(facts | {"rows": length})}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.file)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The last state; rows that were written after it are cut off."""
        if not self.file.exists():
            raise ValueError(f"{self.place}: holds no run to go on with")
        self.lock()
        try:
            with safe_open(self.file, "pt") as found:
                facts = json.loads(found.metadata()["facts"])
                tensors = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118
            for name in FACTS:
                facts[name]
            if self.rows.exists() and self.rows.stat().st_size < facts["rows"]:
                raise ValueError("metrics.jsonl is shorter than it says")
        except Exception as why:
            self.release()
            raise ValueError(f"{self.file}: is no checkpoint of ours: {why}") from None
        with suppress(FileNotFoundError):
            os.truncate(self.rows, facts["rows"])
        return tensors, facts
