"""The server's folder: its state, its rows, its secrets, and what has been charged to the privacy budget.

| file | content |
|---|---|
| state.safetensors | the last complete round: the algorithm's state, the plan, the sites' names. No secret |
| metrics.jsonl | one row per evaluation |
| report.json | for the operator: how far the run is, sizes of the sites, rejected replies; written after each round |
| privacy.json | with noise: how many attempts at a start and at a round were begun |
| server.secret | the secret behind cohorts and batch keys, and which site took part when |

Rows and reports reveal something about single sites, so all files have mode 0600.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from ..files import PRIVATE, json_lines, try_lock, write_whole

STATE, ROWS, LEDGER, SECRETS = "state.safetensors", "metrics.jsonl", "privacy.json", "server.secret"
STATISTICS = "statistics"  # in the state: means and variances of BatchNorm at server.x, once they are estimated
REPORT, PID = "report.json", "server.pid"
FACTS = ("plan", "run", "names", "stamp", "rejected", "layout")  # in a checkpoint besides its tensors


@dataclass
class Ledger:
    """How many attempts at the start and at a round were begun, finished or not."""

    starts: int = 0
    rounds: int = 0


def read_state(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the facts of a checkpoint. The file is always complete, also while a run writes it."""
    try:
        with safe_open(file, "pt") as content:
            facts = json.loads(content.metadata()["facts"])
            for name in FACTS:
                facts[name]
            return {name: content.get_tensor(name) for name in content.keys()}, facts  # noqa: SIM118
    except FileNotFoundError:
        raise ValueError(f"{file.parent}: holds no run") from None
    except Exception as why:
        raise ValueError(f"{file}: is not a checkpoint of fedda: {why}") from None


class Checkpoint:
    def __init__(self, folder: Path):
        self.folder, self.file, self.rows = folder, folder / STATE, folder / ROWS
        self.secrets, self.charges = folder / SECRETS, folder / LEDGER
        self.secret = b""
        self.bases: dict[int, Tensor] = {}  # after each of two exchanges: the last exchange used of each site

    def begin(self, secret: bytes) -> None:
        """A new run. It never overwrites an earlier one."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock()
        except OSError as why:
            raise ValueError(f"{self.folder}: results cannot be written here: {why.strerror}") from None
        if self.file.exists():
            self.release()
            raise ValueError(f"{self.folder}: holds a run: resume it, or use another folder")
        self.rows.unlink(missing_ok=True)  # left by a server that died before its first checkpoint
        self.secret = secret
        self._keep_secrets()

    def lock(self) -> None:
        """Allow one server at a time, until its process ends. The file holds its process id."""
        self.held = open(self.folder / PID, "a+")  # noqa: SIM115  held until the process ends
        attempts = 5  # `fedda deploy status` takes the lock for a moment, to see whether it is free
        while not try_lock(self.held.fileno()):
            attempts -= 1
            if not attempts:
                self.held.close()
                raise ValueError(f"{self.folder}: another server is writing into it")
            time.sleep(0.1)
        self.held.truncate(0)
        self.held.write(f"{os.getpid()}\n")
        self.held.flush()

    def release(self) -> None:
        self.held.close()

    def write_report(self, report: dict[str, Any]) -> None:
        write_whole(self.folder / REPORT, json.dumps(report, indent=1) + "\n", PRIVATE)

    def last_report(self) -> dict[str, Any]:
        """The report of the run so far; empty if it is lost. A resumed run does not need it."""
        try:
            return dict(json.loads((self.folder / REPORT).read_text()))
        except (OSError, ValueError, TypeError):
            return {}

    def append(self, rows: list[dict[str, Any]]) -> None:
        with open(self.rows, "ab", opener=lambda path, flags: os.open(path, flags, PRIVATE)) as file:
            file.write(json_lines(rows))

    def ledger(self, starts: int = 0, rounds: int = 0) -> Ledger:
        """The charges so far, also of a server that died before its first checkpoint: at least these."""
        try:
            ledger = Ledger(**(json.loads(self.charges.read_text()) if self.charges.exists() else {}))
            valid = all(type(value) is int for value in asdict(ledger).values())
        except (TypeError, ValueError):
            valid = False
        if not valid or ledger.starts < starts or ledger.rounds < rounds:
            raise ValueError(
                f"{self.charges}: is lost, old or damaged: it must count at least {starts} starts and {rounds} rounds "
                "with noise; without it the spent privacy budget is unknown"
            )
        return ledger

    def charge(self, ledger: Ledger, kind: str) -> int:
        """Count an attempt ("starts" or "rounds") on disk, before anything is sent. Returns its number, from 0."""
        number: int = getattr(ledger, kind)
        setattr(ledger, kind, number + 1)
        write_whole(self.charges, (json.dumps(asdict(ledger)) + "\n").encode(), PRIVATE)
        return number

    def save(self, tensors: dict[str, Tensor], base: Tensor, facts: dict[str, Any]) -> None:
        """Write the state of a complete round. `base` is kept with the secrets, under the number of the exchange."""
        self.bases = dict([*self.bases.items(), (facts["stamp"], base.clone())][-2:])
        self._keep_secrets()
        content = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        write_whole(self.file, save(content, metadata={"facts": json.dumps(facts)}), PRIVATE)

    def _keep_secrets(self) -> None:
        bases = {str(stamp): base.tolist() for stamp, base in self.bases.items()}
        write_whole(self.secrets, json.dumps({"secret": self.secret.hex(), "base": bases}).encode(), PRIVATE)

    def load(self, say: Callable[[str], None]) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
        """The last state, the last exchange used of each site, and facts. Later rows are dropped, and this is said."""
        if not self.file.exists():
            raise ValueError(f"{self.folder}: holds no run to resume")
        self.lock()
        try:
            tensors, facts = read_state(self.file)
            if not self.secrets.exists():
                raise ValueError(f"{SECRETS} is missing")
            kept = json.loads(self.secrets.read_text())
            self.secret = bytes.fromhex(kept["secret"])
            base = torch.tensor(kept["base"][str(facts["stamp"])], dtype=torch.int64)
            self.bases = {facts["stamp"]: base}
        except Exception as why:
            self.release()
            raise ValueError(f"{self.folder}: cannot be resumed: {why}") from None
        self._cut_rows(int(tensors["round"]), say)
        return tensors, base.clone(), facts

    def _cut_rows(self, last: int, say: Callable[[str], None]) -> None:
        """Drop the rows of later rounds, and lines that are damaged."""
        lines = self.rows.read_bytes().splitlines(keepends=True) if self.rows.exists() else []
        rounds = [_round_of(line) for line in lines]
        kept = [line for line, number in zip(lines, rounds, strict=True) if number is not None and number <= last]
        if len(kept) == len(lines):
            return
        damaged = rounds.count(None)
        dropped = [f"{damaged} damaged"] if damaged else []
        dropped += (
            [f"{later} after round {last}, the last checkpoint"] if (later := len(lines) - len(kept) - damaged) else []
        )
        say(f"{ROWS}: dropped rows: {' and '.join(dropped)}")
        write_whole(self.rows, b"".join(kept), PRIVATE)

    def last_row(self) -> int:
        """The round of the last row, or -1."""
        lines = self.rows.read_bytes().splitlines(keepends=True) if self.rows.exists() else []
        return max((number for line in lines if (number := _round_of(line)) is not None), default=-1)


def _round_of(line: bytes) -> int | None:
    """The round of a row, or None if the line is damaged."""
    try:
        number = json.loads(line)["round"] if line.endswith(b"\n") else None
        return number if type(number) is int else None
    except (ValueError, KeyError, TypeError):
        return None
