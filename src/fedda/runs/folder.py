"""A run folder on disk: rows appended as they come, checkpoints that are whole or not there at all.

`checkpoint/state.json` is the point of commit: it names the tensors of each algorithm and how long the row
files were then. A run that is killed at any moment goes on from it; rows written later are cut off first.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from ..files import json_lines, named, open_folder, taken, unfinished, write_whole

ROWS = ("metrics.jsonl", "timings.jsonl")
SWEEP = ("sweep.toml", "sweep.json", "best.toml")
RESULTS = ("failures.json", "claims.json", "report.html")
OURS = ("config.toml", "environment.json", *RESULTS, *SWEEP, *ROWS, "checkpoint/state.json")
PATTERNS = (
    "curves-*.png",
    "sweep-*.png",
    "tensorboard/*/events.out.tfevents.*",
    "checkpoint/*.safetensors",
)


class Damaged(Exception):
    """A checkpoint that is not what was written."""


class Folder:
    def __init__(self, path: Path):
        self.path, self.checkpoints = path, path / "checkpoint"
        self.state: dict[str, Any] = {"rows": dict.fromkeys(ROWS, 0), "algorithms": {}}
        self.handle: int | None = None
        self.ours = False  # whether this process has the folder

    @property
    def holds_run(self) -> bool:
        return (self.path / "config.toml").exists() and (self.checkpoints / "state.json").exists()

    def refuse_if_taken(self) -> None:
        """Nothing of the user's is overwritten without being asked."""
        ways = "--overwrite begins again, or give another --out"
        if self.holds_run:
            raise ValueError(f"{self.path}: holds a run: --resume goes on with it, {ways}")
        taken = [name for name in (*OURS, "checkpoint") if (self.path / name).exists()]
        if taken:
            raise ValueError(f"{self.path}: holds {taken[0]!r} but no whole run: {ways}")

    def create(self, files: dict[str, str]) -> None:
        """Begin a run with these files; a folder that was not there appears whole or not at all."""
        made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        # Built beside its place and then renamed: a kill in between leaves nothing that looks like a run.
        stage = Folder(self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")) if made else self
        try:
            stage.checkpoints.mkdir(parents=True, exist_ok=True)
            stage.lock()
            stage.clear()
            for name in ROWS:
                (stage.path / name).touch()
            stage.commit()
            for name in sorted(files, key=lambda name: name == "config.toml"):  # with it the folder holds a run
                stage.write(name, files[name])
            if made:
                os.rename(stage.path, self.path)
        except BaseException as why:
            with suppress(OSError):
                if stage.ours:  # else it may be another run's
                    stage.clear()
            for p in (stage.checkpoints, stage.path, *made):
                with suppress(OSError):
                    p.rmdir()
            stage.release()
            if isinstance(why, OSError):  # the user knows the place, not the stage
                why.filename, why.filename2 = str(self.path), None
            raise
        self.state, self.handle, self.ours = stage.state, stage.handle, stage.ours

    def clear(self) -> None:
        """Remove what a run wrote, and nothing else."""
        for name in OURS:
            (self.path / name).unlink(missing_ok=True)
        for pattern in PATTERNS:
            for path in self.path.glob(pattern):
                path.unlink()
        for path in unfinished(self.path, (*OURS, *PATTERNS)):
            path.unlink()

    def lock(self) -> None:
        """Keep other runs out until `release`, or until this process ends, however it ends; Windows lets them in."""
        handle = open_folder(self.checkpoints)
        if handle is not None and not taken(handle):
            os.close(handle)
            raise ValueError(f"{self.path}: another run is writing into it; wait for it, or give another --out")
        self.handle, self.ours = handle, True

    def release(self) -> None:
        if self.handle is not None:
            os.close(self.handle)
        self.handle, self.ours = None, False

    def open(self) -> None:
        """Back to the last checkpoint: everything is checked, then what was written after it is removed."""
        try:
            self.lock()
            self.state = json.loads((self.checkpoints / "state.json").read_bytes())
            for name in ROWS:
                if (self.path / name).stat().st_size < self.state["rows"][name]:
                    raise Damaged(f"{name} is shorter than its checkpoint says")
            files = {facts["file"] for facts in self.state["algorithms"].values()}
            for label in self.state["algorithms"]:
                self.load(label)
        except OSError as why:
            reason = f"{Path(why.filename or self.path).name}: {why.strerror}"
            raise ValueError(
                f"{self.path}: has no checkpoint to go on from ({reason}); --overwrite begins again"
            ) from None
        except (Damaged, LookupError, TypeError, AttributeError, UnicodeError, json.JSONDecodeError) as why:
            reason = str(why) if isinstance(why, Damaged) else "state.json is damaged"
            raise ValueError(
                f"{self.path}: cannot go on from its checkpoint ({reason}); --overwrite begins again"
            ) from None
        for name in ROWS:
            os.truncate(self.path / name, self.state["rows"][name])
        for path in self.checkpoints.glob("*.safetensors"):
            if path.name not in files:
                path.unlink()
        for path in unfinished(self.path, (*ROWS, "checkpoint/*")):
            path.unlink()
        self.note_failures()

    def append(self, name: str, rows: list[dict[str, Any]]) -> None:
        with named(self.path / name), open(self.path / name, "ab") as file:
            file.write(json_lines(rows))

    def save(self, label: str, tensors: dict[str, Tensor], **facts: Any) -> None:
        """A checkpoint of one algorithm: its tensors, and where it stands."""
        old = self.state["algorithms"].get(label, {}).get("file")
        number = list(self.state["algorithms"]).index(label) if old else len(self.state["algorithms"])
        # The slug is for people; the number tells labels apart.
        slug = re.sub(r"[^A-Za-z0-9]+", "-", label).strip("-")[:40]
        file = f"{number:02d}-{slug}-{int(tensors['round'])}.safetensors"
        content = save(apart({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}))
        self.write(f"checkpoint/{file}", content)
        self.state["algorithms"][label] = {"file": file, "crc32": zlib.crc32(content), **facts}
        self.commit()
        if old and old != file:
            (self.checkpoints / old).unlink(missing_ok=True)
        self.note_failures()

    def fail(self, label: str, failure: str) -> None:
        """Note a failure beside the last checkpoint, which stays."""
        if label not in self.state["algorithms"]:
            return self.save(label, {"round": torch.tensor(0)}, failure=failure)
        self.state["algorithms"][label]["failure"] = failure
        self.commit()
        self.note_failures()

    def load(self, label: str) -> tuple[dict[str, Tensor] | None, dict[str, Any]]:
        """The tensors of an algorithm's last checkpoint, if there is one, and its facts."""
        facts = self.state["algorithms"].get(label)
        if facts is None:
            return None, {}
        content = (self.checkpoints / facts["file"]).read_bytes()
        if zlib.crc32(content) != facts["crc32"]:
            raise Damaged(f"{facts['file']} is damaged")
        return load(content), facts

    @property
    def failures(self) -> dict[str, str]:
        """Which algorithms ended early, and why."""
        return {k: v["failure"] for k, v in self.state["algorithms"].items() if "failure" in v}

    def note_failures(self) -> None:
        text = json.dumps(self.failures, indent=1) + "\n"
        path = self.path / "failures.json"
        if not self.failures:
            path.unlink(missing_ok=True)
        elif not path.exists() or path.read_text() != text:
            self.write(path.name, text)

    def tidy(self, lasts: dict[str, int], every: int) -> None:
        """The rows in the order and at the rounds of a run that was asked for all its rounds at once; `lasts` are the
        labels in order, and the last round of each."""
        labels = list(lasts)
        lengths = dict(self.state["rows"])
        for name in ROWS:
            # A kill while this was done before leaves empty lines at the end.
            rows = [row for row in (self.path / name).read_bytes().splitlines(keepends=True) if row.strip()]
            parsed = [json.loads(row) for row in rows]
            keyed = [(labels.index(row["algorithm"]), row["round"]) for row in parsed]
            due = [i for i, (k, r) in enumerate(keyed) if r % every == 0 or r == lasts[labels[k]]]
            # What ran out of memory went back to its checkpoint, and its rows came again.
            last = {(keyed[i], parsed[i].get("seed"), parsed[i].get("point")): i for i in due}
            keep = sorted(last.values(), key=lambda i: (keyed[i], i))
            content = b"".join(rows[i] for i in keep)
            lengths[name] = len(content)
            # As long as the checkpoint says, until it says otherwise: a kill in between harms nothing.
            if keep != list(range(len(rows))) or lengths[name] != self.state["rows"][name]:
                self.write(name, content + b"\n" * (self.state["rows"][name] - len(content)))
        if lengths != self.state["rows"]:
            self.commit(lengths)
            for name in ROWS:
                os.truncate(self.path / name, lengths[name])

    def commit(self, lengths: dict[str, int] | None = None) -> None:
        for name in ROWS:
            with open(self.path / name, "rb") as file:
                os.fsync(file.fileno())
                self.state["rows"][name] = lengths[name] if lengths else file.seek(0, os.SEEK_END)
        self.write("checkpoint/state.json", json.dumps(self.state, indent=1) + "\n")

    def write(self, name: str, content: str | bytes) -> None:
        write_whole(self.path / name, content)


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """An algorithm may hold one tensor under two names at first, which safetensors refuses: a copy for the second."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return found
