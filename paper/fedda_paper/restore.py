"""From `results/` to a working folder: what is kept is done, so that a checkout is enough to go on."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedda.experiments.config import Experiment, read
from fedda.files import alone, json_lines, write_whole

from .estimate import TIMES, times
from .pack import SWEEP, kept_at
from .parts import PartList
from .pool import DONE, PoolRun, entries, ready, winners

Rows = dict[str, dict[str, Any]]


def restore(wanted: PartList, out: Path, work: Path) -> list[str]:
    """Put into `work` what `out` holds and it has not; the names of those runs and sweeps.

    A run is taken where the plan asks for the same one: after a change of its values it is run again.
    """
    if not (out / "times.json").is_file():
        return []
    rows: Rows = {row["name"]: row for row in json.loads((out / "times.json").read_bytes())}
    with alone(work / "locks" / "restore", wait=True):
        found = [name for name in wanted.sweeps if _sweep(name, out, work, rows)]
        for part, experiment in ready(wanted, work):
            found += _runs(experiment, kept_at(out, part, experiment), work, rows)
        _times(rows, work)
        if not (work / "parts.toml").is_file():
            write_whole(work / "parts.toml", wanted.text)
    return found


def _runs(experiment: Experiment, place: Path, work: Path, rows: Rows) -> Iterator[str]:
    if not (place / "config.toml").is_file():
        return
    kept = read(place / "config.toml").completed()
    theirs = {entry.label: entry for entry in entries(kept, work)}
    for entry in entries(experiment, work):
        same, row = theirs.get(entry.label), rows.get(entry.place.name, {})
        alike = same is not None and same.place == entry.place and kept.rounds >= experiment.rounds
        if entry.done or not alike or "environment" not in row:
            continue
        with alone(work / "locks" / f"run-{entry.place.name}") as ours:
            if ours:
                _run(entry, kept.rounds, place, row["environment"])
                yield entry.place.name


def _run(entry: PoolRun, rounds: int, place: Path, environment: dict[str, Any]) -> None:
    """One method of a kept figure as a run that came to its end; that it did is written last."""
    shutil.rmtree(entry.place, ignore_errors=True)
    entry.place.mkdir(parents=True)
    (name,) = entry.experiment.algorithms
    write_whole(entry.place / "config.toml", entry.experiment.model_copy(update={"rounds": rounds}).toml())
    for file in ("metrics.jsonl", "timings.jsonl"):
        lines = gzip.decompress((place / f"{file}.gz").read_bytes()).decode().splitlines()
        own = (row | {"algorithm": name} for row in map(json.loads, lines) if row["algorithm"] == entry.label)
        write_whole(entry.place / file, json_lines(own))
    failures = place / "failures.json"
    why = json.loads(failures.read_bytes()).get(entry.label) if failures.is_file() else None
    if why:
        write_whole(entry.place / "failures.json", json.dumps({name: why}) + "\n")
    write_whole(entry.place / "environment.json", json.dumps(environment, indent=1) + "\n")
    write_whole(entry.place / DONE, json.dumps({"rounds": rounds}) + "\n")


def _sweep(name: str, out: Path, work: Path, rows: Rows) -> bool:
    here, there, row = work / "sweeps" / name, out / "sweeps" / name, rows.get(name, {})
    if winners(work, name) or not (there / "best.toml").is_file() or "environment" not in row:
        return False
    with alone(work / "locks" / f"sweep-{name}") as ours:
        if ours:
            shutil.rmtree(here, ignore_errors=True)
            here.mkdir(parents=True)
            for file in SWEEP:
                shutil.copyfile(there / file, here / file)
            write_whole(here / "environment.json", json.dumps(row["environment"], indent=1) + "\n")
            write_whole(here / "timings.jsonl", json_lines([{"algorithm": "all", "seconds": row["rounds_seconds"]}]))
            write_whole(here / DONE, "{}\n")
    return ours


def _times(rows: Rows, work: Path) -> None:
    """What was run elsewhere, by which command and for how long, before what was run here."""
    here = times(work)
    known = {row["name"] for row in here}
    more = [
        {k: row[k] for k in ("part", "kind", "name")} | {"began": b, "wall": w, "command": command, "commit": commit}
        for row in rows.values()
        if row["name"] not in known
        for (b, w), command, commit in zip(row["spans"], row["commands"], row["commits"], strict=True)
    ]
    if more:
        write_whole(work / TIMES, json_lines([*more, *here]))
