"""The server's folder: its state, its rows, its secrets, and what has been charged to the privacy budget.

| file | what it holds |
|---|---|
| state.safetensors | the last complete round: what the algorithm keeps, the plan, the sites' names. No secret |
| metrics.jsonl | a row for each evaluation |
| privacy.json | with noise: how many attempts at a start and at a round were begun |
| server.secret | the secret that cohorts and batch keys come from, and who took part when |

Rows and reports tell something about single sites, too, so all files have mode 0600.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from ..files import PRIVATE, json_lines, taken, write_whole

STATE, ROWS, LEDGER, SECRETS = "state.safetensors", "metrics.jsonl", "privacy.json", "server.secret"
FACTS = ("plan", "run", "names", "stamp", "rejected", "layout")  # what a checkpoint says besides its tensors


@dataclass
class Ledger:
    """How many attempts at the start and at a round were begun, whatever became of them."""

    starts: int = 0
    rounds: int = 0


class Checkpoint:
    def __init__(self, place: Path):
        self.place, self.file, self.rows = place, place / STATE, place / ROWS
        self.secrets, self.charges = place / SECRETS, place / LEDGER
        self.secret = b""
        self.bases: dict[int, Tensor] = {}  # the last exchange taken from each site, as of two exchanges

    def begin(self, secret: bytes) -> None:
        """A new run. Nothing of an earlier run is overwritten without being asked."""
        self.place.mkdir(parents=True, exist_ok=True)
        self.lock()
        if self.file.exists():
            self.release()
            raise ValueError(f"{self.place}: holds a run: resume it, or give another folder")
        self.rows.unlink(missing_ok=True)  # of a server that died before its first checkpoint
        self.secret = secret
        self._keep_secrets()

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
        with open(self.rows, "ab", opener=lambda path, flags: os.open(path, flags, PRIVATE)) as file:
            file.write(json_lines(rows))

    def ledger(self, starts: int = 0, rounds: int = 0) -> Ledger:
        """What was charged so far, also by a server that died before its first checkpoint: at least so many."""
        try:
            found = Ledger(**json.loads(self.charges.read_text()))
            whole = all(type(value) is int for value in asdict(found).values())
        except FileNotFoundError:
            found, whole = Ledger(), True
        except (TypeError, ValueError):
            whole = False
        if not whole or found.starts < starts or found.rounds < rounds:
            raise ValueError(
                f"{self.charges}: is lost, old or damaged: it must count at least {starts} starts and {rounds} rounds "
                "with noise; without it nobody knows what the run has spent"
            )
        return found

    def charge(self, ledger: Ledger, kind: str) -> int:
        """Count an attempt ("starts" or "rounds") on the disk, before anything of it is sent; its number from 0."""
        number: int = getattr(ledger, kind)
        setattr(ledger, kind, number + 1)
        write_whole(self.charges, (json.dumps(asdict(ledger)) + "\n").encode(), PRIVATE)
        return number

    def save(self, tensors: dict[str, Tensor], base: Tensor, facts: dict[str, Any]) -> None:
        """The state of a complete round. Who took part is kept with the secrets, under the number of the exchange."""
        self.bases = dict([*self.bases.items(), (facts["stamp"], base.clone())][-2:])
        self._keep_secrets()
        content = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        write_whole(self.file, save(content, metadata={"facts": json.dumps(facts)}), PRIVATE)

    def _keep_secrets(self) -> None:
        bases = {str(stamp): base.tolist() for stamp, base in self.bases.items()}
        write_whole(self.secrets, json.dumps({"secret": self.secret.hex(), "base": bases}).encode(), PRIVATE)

    def load(self) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
        """The last state, the last exchange taken from each site, and facts; later rows are dropped."""
        if not self.file.exists():
            raise ValueError(f"{self.place}: holds no run to resume")
        self.lock()
        try:
            with safe_open(self.file, "pt") as found:
                facts = json.loads(found.metadata()["facts"])
                tensors = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118
            for name in FACTS:
                facts[name]
            if not self.secrets.exists():
                raise ValueError(f"{SECRETS}, which belongs to it, is not there")
            kept = json.loads(self.secrets.read_text())
            self.secret = bytes.fromhex(kept["secret"])
            base = torch.tensor(kept["base"][str(facts["stamp"])], dtype=torch.int64)
            self.bases = {facts["stamp"]: base}
        except Exception as why:
            self.release()
            raise ValueError(f"{self.file}: is no checkpoint of ours: {why}") from None
        self._cut_rows(int(tensors["round"]))
        return tensors, base.clone(), facts

    def _cut_rows(self, last: int) -> None:
        """Rows of later rounds, and a line that was not finished, are dropped."""
        kept = [line for line in self._lines() if json.loads(line)["round"] <= last]
        if self.rows.exists() and (content := b"".join(kept)) != self.rows.read_bytes():
            write_whole(self.rows, content, PRIVATE)

    def _lines(self) -> list[bytes]:
        lines = self.rows.read_bytes().splitlines(keepends=True) if self.rows.exists() else []
        return [line for line in lines if line.endswith(b"\n")]

    def last_row(self) -> int:
        """The round of the last row; -1 without one."""
        lines = self._lines()
        return int(json.loads(lines[-1])["round"]) if lines else -1
