"""Read a run folder: what was asked, what was measured, and what went wrong."""

import gzip
import json
import tomllib
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedda.runs.curves import COUNTERS, Curve, Row, Timings, aggregate, number

# Kept in the rows for whoever looks for the cause of a divergence; no result, and so on no page.
WATCHED = frozenset(("max_x", "h_min", "h_max"))
ORDER = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "objective", "density", "nonzero")


@dataclass(frozen=True)
class RecordedRun:
    """A run folder in memory, with `curves[label][metric]` aggregated over seeds.

    >>> RecordedRun(Path("a"), {}, {}, {}, [], {}, ["fedavg"], [], {}).labels
    ['fedavg']
    """

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    failures: dict[str, str]
    rows: list[Row]
    timings: Timings  # label -> {round: cumulative seconds}
    labels: list[str]  # the order of the configuration, so that colours stay the same
    metrics: list[str]
    curves: dict[str, dict[str, Curve]]


def read(folder: str | Path) -> RecordedRun:
    r"""Read the run in `folder`; a folder that is no run raises a ValueError that says what is missing.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.toml").write_text("[algorithms.fedavg]\nlr = 0.1\n")
    >>> row = {"algorithm": "fedavg", "seed": 0, "round": 0, "train_loss": 2.5}
    >>> _ = (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    >>> read(folder).curves["fedavg"]["train_loss"].mean.tolist()
    [2.5]
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give the folder that `fedda run` wrote")
    metrics_file = kept(folder, "metrics.jsonl")
    if not metrics_file.is_file():
        raise ValueError(f"{metrics_file}: not there; give a run folder, as `fedda run` writes it")
    config = toml(folder / "config.toml")
    rows = _rows(metrics_file)
    if not rows:
        raise ValueError(f"{metrics_file}: has no complete row yet; let the run reach round 0")
    timings: Timings = {}
    for line, timing in _lines(kept(folder, "timings.jsonl")):
        if not isinstance(timing.get("algorithm"), str) or not _whole(timing.get("round")):
            raise ValueError(f"{line}: a timing needs the keys algorithm, round and seconds")
        timings.setdefault(timing["algorithm"], {})[timing["round"]] = number(timing.get("seconds"))
    failures = {label: str(reason) for label, reason in _object(folder / "failures.json").items()}

    asked = config.get("algorithms")
    labels = dict.fromkeys(asked if isinstance(asked, dict) else ())
    labels |= dict.fromkeys([*(row["algorithm"] for row in rows), *failures])
    metrics = _metrics(rows)
    return RecordedRun(
        folder=folder,
        config=config,
        environment=_object(folder / "environment.json"),
        failures=failures,
        rows=rows,
        timings=timings,
        labels=list(labels),
        metrics=metrics,
        curves=aggregate(rows, timings, metrics),
    )


def kept(folder: Path, name: str) -> Path:
    """The file of this name, or its compressed form where only that was kept.

    >>> kept(Path("nowhere"), "metrics.jsonl").name
    'metrics.jsonl'
    """
    plain, packed = folder / name, folder / f"{name}.gz"
    return packed if packed.is_file() and not plain.is_file() else plain


def _metrics(rows: list[Row]) -> list[str]:
    # A key that never holds a number (null throughout, or text) is no metric of this problem.
    found = {
        key
        for row in rows
        for key in row
        if ":" not in key and key not in COUNTERS | WATCHED and number(row[key]) == number(row[key])
    }
    # Without an exact zero anywhere there is no sparsity to show, nor a constraint that nobody misses; a run that
    # diverged has no number.
    if not any(number(row.get("nonzero")) < 1.0 for row in rows):
        found -= {"density", "nonzero"}
    if all(row.get("objective") == row.get("train_loss") for row in rows if "objective" in row):
        found -= {"objective"}  # there is no penalty
    if not any(number(row.get("infeasible")) > 0.0 for row in rows):
        found -= {"infeasible"}
    return ordered(found)


def ordered(found: Iterable[str]) -> list[str]:
    """Put metrics into the order in which they are shown.

    >>> ordered({"test_loss", "gap", "train_loss"})
    ['train_loss', 'test_loss', 'gap']
    """
    return sorted(set(found), key=lambda key: (ORDER.index(key) if key in ORDER else len(ORDER), key))


def _rows(path: Path) -> list[Row]:
    rows: dict[tuple[str, int, int], Row] = {}
    for line, row in _lines(path):
        if not (isinstance(row.get("algorithm"), str) and _whole(row.get("seed")) and _whole(row.get("round"))):
            raise ValueError(f"{line}: a row needs algorithm (text), seed and round (whole numbers)")
        # A resumed run repeats the rounds after its checkpoint: the later row counts.
        rows[row["algorithm"], row["seed"], row["round"]] = row
    return list(rows.values())


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        return []
    # Split bytes, not text: a killed run may have cut its last line inside a character.
    lines = [(i, line) for i, line in enumerate(_content(path).split(b"\n"), 1) if line.strip()]
    parsed = []
    for i, line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            if i == lines[-1][0]:
                break
            value = None
        if not isinstance(value, dict):
            raise ValueError(f"{path}, line {i}: not a JSON object; only the last line may be cut short")
        parsed.append((f"{path}, line {i}", value))
    return parsed


def _content(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as why:
        raise ValueError(f"{path}: not a whole gzip file ({why})") from None


def toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "config.toml"
    >>> _ = path.write_text("rounds = 40")
    >>> toml(path)
    {'rounds': 40}
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: not there; give a run folder, as `fedda run` writes it") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid TOML ({error})") from None


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object; it should read {{...}}")
    return value


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
