"""Write a run folder: rows are appended as they come, and a checkpoint is either complete or absent.

`checkpoint/state.json` commits a checkpoint: it names the file of each algorithm and the lengths of the row files at
that moment. A run killed at any moment resumes from it; rows written later are cut off first.
"""

import json
import os
import re
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..files import errors_of_file, json_lines, open_folder, try_lock, unfinished, write_whole
from .names import CHECKPOINTS, CONFIG, FAILURES, FILES, PATTERNS, ROWS, STATE
from .reading import read_lines


class Damaged(Exception):
    """A checkpoint differs from what was written."""


class Folder:
    def __init__(self, path: Path):
        self.path, self.checkpoints = path, path / CHECKPOINTS
        self.state: dict[str, Any] = {"rows": dict.fromkeys(ROWS, 0), "algorithms": {}}
        self.handle: int | None = None
        self.locked = False  # by this process

    @property
    def holds_run(self) -> bool:
        return (self.path / CONFIG).exists() and (self.path / STATE).exists()

    def refuse_if_taken(self) -> None:
        """A user's files are overwritten only with --overwrite."""
        options = "--overwrite starts again, or give another --out"
        if self.holds_run:
            raise ValueError(f"{self.path}: holds a run: --resume continues it, {options}")
        present = [name for name in (*FILES, CHECKPOINTS) if (self.path / name).exists()]
        if present:
            raise ValueError(f"{self.path}: holds {present[0]!r} but no complete run: {options}")

    def create(self, files: dict[str, str]) -> None:
        """Start a run with these files; a new folder appears complete or not at all."""
        missing = [p for p in (self.path, *self.path.parents) if not p.exists()]
        # A new folder is built beside its final name and then renamed: a kill leaves nothing that looks like a run.
        stage = Folder(self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")) if missing else self
        try:
            stage.checkpoints.mkdir(parents=True, exist_ok=True)
            stage.lock()
            stage.clear()
            for name in ROWS:
                (stage.path / name).touch()
            stage.commit()
            for name in sorted(files, key=lambda name: name == CONFIG):  # the configuration makes it a run: last
                stage.write(name, files[name])
            if missing:
                os.rename(stage.path, self.path)
        except BaseException as why:
            with suppress(OSError):
                if stage.locked:  # otherwise it may be another run's
                    stage.clear()
            for p in (stage.checkpoints, stage.path, *missing):
                with suppress(OSError):
                    p.rmdir()
            stage.release()
            if isinstance(why, OSError):  # the user knows the folder, not the stage
                why.filename, why.filename2 = str(self.path), None
            raise
        self.state, self.handle, self.locked = stage.state, stage.handle, stage.locked

    def clear(self) -> None:
        """Remove the files of a run and no others."""
        written = [path for pattern in (*FILES, *PATTERNS) for path in self.path.glob(pattern)]
        for path in (*written, *unfinished(self.path, (*FILES, *PATTERNS))):
            path.unlink()

    def lock(self) -> None:
        """Keep other runs out until `release` or the end of this process; on Windows there is no lock."""
        handle = open_folder(self.checkpoints)
        if handle is not None and not try_lock(handle):
            os.close(handle)
            raise ValueError(f"{self.path}: another run is writing into it; wait for it, or give another --out")
        self.handle, self.locked = handle, True

    def release(self) -> None:
        if self.handle is not None:
            os.close(self.handle)
        self.handle, self.locked = None, False

    def open(self) -> None:
        """Return to the last checkpoint: check everything, then remove what was written after it."""
        try:
            self.lock()
            self.state = json.loads((self.path / STATE).read_bytes())
            for name in ROWS:
                if (self.path / name).stat().st_size < self.state["rows"][name]:
                    raise Damaged(f"{name} is shorter than its checkpoint says")
            files = {facts["file"] for facts in self.state["algorithms"].values()}
            for label in self.state["algorithms"]:
                self.load(label)
        except OSError as why:
            reason = f"{Path(why.filename or self.path).name}: {why.strerror}"
            raise ValueError(
                f"{self.path}: has no checkpoint to resume from ({reason}); --overwrite starts again"
            ) from None
        except (Damaged, LookupError, TypeError, AttributeError, UnicodeError, json.JSONDecodeError) as why:
            reason = str(why) if isinstance(why, Damaged) else "state.json is damaged"
            raise ValueError(
                f"{self.path}: cannot resume from its checkpoint ({reason}); --overwrite starts again"
            ) from None
        for name in ROWS:
            os.truncate(self.path / name, self.state["rows"][name])
        for path in self.checkpoints.glob("*.safetensors"):
            if path.name not in files:
                path.unlink()
        for path in unfinished(self.path, (*ROWS, f"{CHECKPOINTS}/*")):
            path.unlink()
        self.note_failures()

    def append(self, name: str, rows: list[dict[str, Any]]) -> None:
        with errors_of_file(self.path / name), open(self.path / name, "ab") as file:
            file.write(json_lines(rows))

    def save(self, label: str, round: int, content: bytes, **facts: Any) -> None:
        """Replace the checkpoint of one algorithm: its tensors as safetensors, and facts about it."""
        old = self.state["algorithms"].get(label, {}).get("file")
        number = list(self.state["algorithms"]).index(label) if old else len(self.state["algorithms"])
        # The letters are for people; the number distinguishes the labels.
        letters = re.sub(r"[^A-Za-z0-9]+", "-", label).strip("-")[:40]
        file = f"{number:02d}-{letters}-{round}.safetensors"
        self.write(f"{CHECKPOINTS}/{file}", content)
        self.state["algorithms"][label] = {"file": file, "crc32": zlib.crc32(content), **facts}
        self.commit()
        if old and old != file:
            (self.checkpoints / old).unlink(missing_ok=True)
        self.note_failures()

    def fail(self, label: str, failure: str, empty: bytes) -> None:
        """Note a failure; the last checkpoint stays, or is `empty` if there is none."""
        if label not in self.state["algorithms"]:
            return self.save(label, 0, empty, failure=failure)
        self.state["algorithms"][label]["failure"] = failure
        self.commit()
        self.note_failures()

    def load(self, label: str) -> tuple[bytes | None, dict[str, Any]]:
        """The content of an algorithm's last checkpoint, None without one, and its facts."""
        facts = self.state["algorithms"].get(label)
        if facts is None:
            return None, {}
        content = (self.checkpoints / facts["file"]).read_bytes()
        if zlib.crc32(content) != facts["crc32"]:
            raise Damaged(f"{facts['file']} is damaged")
        return content, facts

    def read(self, label: str) -> tuple[bytes, dict[str, Any]]:
        """The same without a lock, for a reader beside a run that may be writing; an error is one line."""
        try:
            self.state = json.loads((self.path / STATE).read_bytes())
            content, facts = self.load(label)
        except (OSError, Damaged, LookupError, TypeError, AttributeError, ValueError) as why:
            raise ValueError(f"{self.path}: its checkpoint cannot be read ({why})") from None
        if content is None:
            raise ValueError(f"{self.path}: has no checkpoint of {label!r} yet")
        return content, facts

    @property
    def failures(self) -> dict[str, str]:
        """Why algorithms ended early."""
        return {k: v["failure"] for k, v in self.state["algorithms"].items() if "failure" in v}

    def note_failures(self) -> None:
        text = json.dumps(self.failures, indent=1) + "\n"
        path = self.path / FAILURES
        if not self.failures:
            path.unlink(missing_ok=True)
        elif not path.exists() or path.read_text() != text:
            self.write(path.name, text)

    def tidy(self, last_rounds: dict[str, int], every: int) -> None:
        """Give the rows the order and the rounds of an uninterrupted run; `last_rounds` has the labels in order."""
        labels = list(last_rounds)
        lengths = dict(self.state["rows"])
        for name in ROWS:
            lines = read_lines(self.path / name)
            keys = [(labels.index(row["algorithm"]), row["round"]) for _, _, row in lines]
            due = [i for i, (k, r) in enumerate(keys) if r % every == 0 or r == last_rounds[labels[k]]]
            # After a failure for lack of memory an algorithm resumed, and wrote some rows again: the later ones count.
            last = {(keys[i], lines[i][2].get("seed"), lines[i][2].get("point")): i for i in due}
            keep = sorted(last.values(), key=lambda i: (keys[i], i))
            content = b"".join(lines[i][1] for i in keep)
            lengths[name] = len(content)
            # Padded to the length in the checkpoint until the next commit: a kill in between does no harm.
            if keep != list(range(len(lines))) or lengths[name] != self.state["rows"][name]:
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
        self.write(STATE, json.dumps(self.state, indent=1) + "\n")

    def write(self, name: str, content: str | bytes) -> None:
        write_whole(self.path / name, content)
