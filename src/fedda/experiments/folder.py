"""A run folder on disk: rows appended as they come, checkpoints that are whole or not there at all.

`checkpoint/state.json` is the point of commit: it names the tensors of each algorithm and how long the row files were
then. A run that is killed at any moment goes on from it; rows written later are cut off first.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

ROWS = ("metrics.jsonl", "timings.jsonl")
OURS = ("config.toml", "environment.json", "failures.json", "report.html", *ROWS)


class Folder:
    def __init__(self, path: Path):
        self.path, self.checkpoints = path, path / "checkpoint"
        self.state: dict[str, Any] = {"rows": dict.fromkeys(ROWS, 0), "algorithms": {}}

    @property
    def holds_run(self) -> bool:
        return (self.path / "config.toml").exists()

    def create(self, config: str, environment: dict[str, Any]) -> None:
        """A new folder, whole or not at all."""
        made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        try:
            self.checkpoints.mkdir(parents=True)
            for name in ROWS:
                (self.path / name).touch()
            self.write("environment.json", json.dumps(environment, indent=1) + "\n")
            self.commit()
            self.write("config.toml", config)
        except OSError:
            self.clear()
            for parent in made:
                shutil.rmtree(parent, ignore_errors=True)
            raise

    def clear(self) -> None:
        """Remove what a run wrote, and nothing else."""
        for name in OURS:
            (self.path / name).unlink(missing_ok=True)
        for picture in self.path.glob("curves-*.png"):
            picture.unlink()
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def open(self) -> None:
        """Back to the last checkpoint."""
        try:
            self.state = json.loads((self.checkpoints / "state.json").read_text())
            for name, length in self.state["rows"].items():
                with open(self.path / name, "r+b") as file:
                    if file.seek(0, os.SEEK_END) < length:
                        raise ValueError(f"{self.path / name}: is shorter than its checkpoint says")
                    file.truncate(length)
        except (OSError, KeyError, json.JSONDecodeError) as why:
            raise ValueError(f"{self.path}: holds no checkpoint to go on from ({why}); run with --overwrite") from None

    def append(self, name: str, rows: list[dict[str, Any]]) -> None:
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.writelines(json.dumps({k: _finite(v) for k, v in row.items()}) + "\n" for row in rows)

    def save(self, label: str, tensors: dict[str, Tensor], **facts: Any) -> None:
        """A checkpoint of one algorithm: its tensors, and where it stands."""
        old = self.state["algorithms"].get(label, {}).get("file")
        number = list(self.state["algorithms"]).index(label) if old else len(self.state["algorithms"])
        slug = re.sub(r"[^A-Za-z0-9]+", "-", label).strip("-")
        file = f"{number:02d}-{slug}-{int(tensors['round'])}.safetensors"
        whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        temporary = self.checkpoints / f"{file}.tmp"
        save_file(whole, temporary)
        _settle(temporary, self.checkpoints / file)
        self.state["algorithms"][label] = {"file": file, **facts}
        self.commit()
        if old and old != file:
            (self.checkpoints / old).unlink(missing_ok=True)

    def load(self, label: str) -> tuple[dict[str, Tensor] | None, dict[str, Any]]:
        """The tensors of an algorithm's last checkpoint, if there is one, and its facts."""
        facts = self.state["algorithms"].get(label, {})
        return (load_file(self.checkpoints / facts["file"]) if facts else None), facts

    def commit(self) -> None:
        for name in ROWS:
            with open(self.path / name, "rb") as file:
                os.fsync(file.fileno())
                self.state["rows"][name] = file.seek(0, os.SEEK_END)
        self.write("checkpoint/state.json", json.dumps(self.state, indent=1) + "\n")

    def write(self, name: str, text: str) -> None:
        temporary = self.path / f"{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        _settle(temporary, self.path / name)


def _settle(temporary: Path, final: Path) -> None:
    """Make a finished file durable, then give it its name."""
    for path in (temporary, final.parent):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
        if path == temporary:
            os.replace(temporary, final)


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
