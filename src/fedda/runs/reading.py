"""Read a run folder: its configuration, its rows, its curves and its failures."""

import gzip
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .curves import COUNTERS, Curve, Row, Timings, aggregate, number
from .names import CLIENTS, CONFIG, ENVIRONMENT, FAILURES, METRICS, TIMINGS
from .toml import read_toml

# In the rows to explain a divergence; not results, so not on the page.
DIAGNOSTICS = frozenset(("max_x", "h_min", "h_max"))
ORDER = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "objective", "density", "nonzero")


@dataclass(frozen=True, eq=False)  # compared by identity: arrays have no single truth value
class RecordedRun:
    """A run folder in memory, with `curves[label][metric]` aggregated over seeds.

    Args:
        folder: where it is.
        config: the content of config.toml.
        environment: the content of environment.json.
        failures: why algorithms failed, by label.
        rows: the rows of metrics.jsonl.
        timings: cumulative seconds by label and round.
        labels: the algorithms, in order.
        metrics: the names of the metrics.
        curves: curves over seeds, by label and metric.
        clients: one row per algorithm, seed and client, of the final model.

    >>> RecordedRun(config={"algorithms": {"fedavg": {"lr": 0.1}}}).params("fedavg")
    {'lr': 0.1}
    """

    folder: Path = Path()
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    timings: Timings = field(default_factory=dict)  # label -> {round: cumulative seconds}
    labels: list[str] = field(default_factory=list)  # in the order of the configuration, so that colours stay the same
    metrics: list[str] = field(default_factory=list)
    curves: dict[str, dict[str, Curve]] = field(default_factory=dict)
    clients: list[Row] = field(default_factory=list)  # one row per algorithm, seed and client, of the final model

    @property
    def directions(self) -> dict[str, Any]:
        """Which direction is better, "higher" or "lower", of the metrics that the experiment names."""
        return _dict(self.environment.get("metrics"))

    @property
    def changed(self) -> set[str]:
        """The keys of the configuration, dotted, whose values differ from the defaults."""
        keys = self.environment.get("changed")
        return {str(key) for key in keys} if isinstance(keys, list) else set()

    @property
    def title(self) -> str:
        """The title of the experiment, else its name, else the name of the folder."""
        return str(self.config.get("title") or self.config.get("name") or self.folder.name)

    def table(self, name: str) -> dict[str, Any]:
        """A table of the configuration; empty if it is missing.

        Args:
            name: a table of the configuration, such as "problem".
        """
        return _dict(self.config.get(name))

    def params(self, label: str) -> dict[str, Any]:
        """The table of an algorithm in the configuration; empty if it is missing.

        Args:
            label: the algorithm.
        """
        return _dict(self.table("algorithms").get(label))

    @cached_property
    def _rows(self) -> dict[str, list[Row]]:
        rows: dict[str, list[Row]] = {}
        for row in self.rows:
            rows.setdefault(row["algorithm"], []).append(row)
        return rows

    def rows_of(self, label: str) -> list[Row]:
        """The rows of an algorithm.

        Args:
            label: the algorithm.
        """
        return self._rows.get(label, [])


def read_run(folder: str | Path) -> RecordedRun:
    r"""Read the run in `folder`; if it does not hold one, a ValueError says what is missing.

    Args:
        folder: a run folder, as `fedda run` writes it.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.toml").write_text("[algorithms.fedavg]\nlr = 0.1\n")
    >>> row = {"algorithm": "fedavg", "seed": 0, "round": 0, "train_loss": 2.5}
    >>> _ = (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    >>> read_run(folder).curves["fedavg"]["train_loss"].mean.tolist()
    [2.5]
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give the folder that `fedda run` wrote")
    metrics_file = kept(folder, METRICS)
    for file in (metrics_file, folder / CONFIG):
        if not file.is_file():
            raise ValueError(f"{file}: not there; give a run folder, as `fedda run` writes it")
    config = read_toml(folder / CONFIG)
    rows = read_rows(metrics_file)
    if not rows:
        raise ValueError(f"{metrics_file}: has no complete row yet; let the run reach round 0")
    timings: Timings = {}
    for line, _, timing in read_lines(kept(folder, TIMINGS)):
        if not isinstance(timing.get("algorithm"), str) or not _whole(timing.get("round")):
            raise ValueError(f"{line}: a timing needs the keys algorithm, round and seconds")
        timings.setdefault(timing["algorithm"], {})[timing["round"]] = number(timing.get("seconds"))
    failures = {label: str(reason) for label, reason in _object(folder / FAILURES).items()}
    labels = [*_dict(config.get("algorithms")), *(row["algorithm"] for row in rows), *failures]
    metrics = _metrics(rows)
    return RecordedRun(
        folder=folder,
        config=config,
        environment=_object(folder / ENVIRONMENT),
        failures=failures,
        rows=rows,
        timings=timings,
        labels=list(dict.fromkeys(labels)),
        metrics=metrics,
        curves=aggregate(rows, timings, metrics),
        clients=[row for _, _, row in read_lines(kept(folder, CLIENTS)) if isinstance(row.get("algorithm"), str)],
    )


def from_histories(
    histories: dict[str, list[Row]],
    clients: dict[str, list[Row]],
    environment: dict[str, Any],
    config: dict[str, Any],
    folder: Path,
) -> RecordedRun:
    """A run in memory from the rows of several algorithms by label, as `fedda.train` gives them.

    >>> rows = [{"round": 0, "seed": 0, "train_loss": 2.5, "seconds": 0.0}]
    >>> from_histories({"FedAvg": rows}, {}, {}, {}, Path()).curves["FedAvg"]["train_loss"].mean.tolist()
    [2.5]
    """
    rows = [{"algorithm": label, **row} for label, some in histories.items() for row in some]
    timings = {
        label: {row["round"]: number(row.get("seconds")) for row in some if "seconds" in row}
        for label, some in histories.items()
    }
    metrics = _metrics(rows)
    return RecordedRun(
        folder=folder,
        config=config,
        environment=environment,
        rows=rows,
        timings=timings,
        labels=list(histories),
        metrics=metrics,
        curves=aggregate(rows, timings, metrics),
        clients=[{"algorithm": label, **row} for label, some in clients.items() for row in some],
    )


def kept(folder: Path, name: str) -> Path:
    """The file of this name, or its compressed form if only that was kept.

    >>> kept(Path("nowhere"), "metrics.jsonl").name
    'metrics.jsonl'
    """
    plain, packed = folder / name, folder / f"{name}.gz"
    return packed if packed.is_file() and not plain.is_file() else plain


def _metrics(rows: list[Row]) -> list[str]:
    # A key without any number (always null, or text) is not a metric of this problem.
    keys = {
        key
        for row in rows
        for key in row
        if ":" not in key and key not in COUNTERS | DIAGNOSTICS and number(row[key]) == number(row[key])
    }
    # Shown only if they say something: sparsity if a weight is exactly zero, the objective if there is a penalty, and
    # the distance to a constraint if one is violated. A run that diverged has no number.
    if not any(number(row.get("nonzero")) < 1.0 for row in rows):
        keys -= {"density", "nonzero"}
    if all(row.get("objective") == row.get("train_loss") for row in rows if "objective" in row):
        keys -= {"objective"}
    if not any(number(row.get("infeasible")) > 0.0 for row in rows):
        keys -= {"infeasible"}
    return ordered(keys)


def ordered(metrics: Iterable[str]) -> list[str]:
    """Metrics in the order in which they are shown.

    >>> ordered({"test_loss", "gap", "train_loss"})
    ['train_loss', 'test_loss', 'gap']
    """
    return sorted(set(metrics), key=lambda key: (ORDER.index(key) if key in ORDER else len(ORDER), key))


def read_rows(path: Path) -> list[Row]:
    """The rows of `metrics.jsonl`: the last one per algorithm, seed, round and point of a sweep.

    A resumed run repeats the rounds after its checkpoint.
    """
    rows: dict[tuple[str, int, int, int | None], Row] = {}
    for line, _, row in read_lines(path):
        if not (isinstance(row.get("algorithm"), str) and _whole(row.get("seed")) and _whole(row.get("round"))):
            raise ValueError(f"{line}: a row needs algorithm (text), seed and round (whole numbers)")
        rows[row["algorithm"], row["seed"], row["round"], row.get("point")] = row
    return list(rows.values())


def read_lines(path: Path) -> list[tuple[str, bytes, dict[str, Any]]]:
    """The JSON objects of a file of lines, each with its place for messages and its bytes; none without the file."""
    if not path.is_file():
        return []
    # Split bytes, not text: a killed run may have cut its last line inside a character.
    lines = [(i, line) for i, line in enumerate(_content(path).splitlines(keepends=True), 1) if line.strip()]
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
        parsed.append((f"{path}, line {i}", line, value))
    return parsed


def _content(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as why:
        raise ValueError(f"{path}: not a whole gzip file ({why})") from None


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


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
