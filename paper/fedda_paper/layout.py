"""The layout of the results folder, and both ways between it and a working folder: `pack` and `restore`.

    parts.toml                       the plan
    times.json                       for each run and sweep: part, spans of time, commands, commits, environment
    SETTING/FIGURE/, pilots/NAME/    a run folder with the rows of all methods
    sweeps/NAME/                     the files of a sweep
    theory/                          written by `fedda theory`; neither read nor changed here

The working folder has one folder per run (`pool.py`). The same runs give the same bytes, and packing what was restored
gives the bytes that it was restored from.
"""

import gzip
import json
import shutil
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedda.experiments.config import Experiment, read
from fedda.files import json_lines, locked, write_whole
from fedda.runs.reading import kept as kept_file
from fedda.runs.reading import read_lines

from .parts import Part, PartList, read_plan
from .pool import DONE, TIMES, PoolRun, known_experiments, pool_runs, read_times, winners

PLAN, KEPT_TIMES = "parts.toml", "times.json"
ROWS, FAILURES = ("metrics.jsonl", "timings.jsonl"), "failures.json"
SWEEP_FILES = ("config.toml", "sweep.toml", "sweep.json", "best.toml")
DIGITS = 6  # of a kept number: float32 has seven

Table = dict[str, Any]


# -- run folders: one per figure in the results, one per run in the working folder
class Record(NamedTuple):
    """What is kept of one method: the rows of each file, and why it ended early, if it did."""

    rows: dict[str, list[Table]]
    failure: str


def read_records(folder: Path) -> dict[str, Record]:
    """The methods of a run folder by label."""
    failures = json.loads((folder / FAILURES).read_bytes()) if (folder / FAILURES).is_file() else {}
    labels = read(folder / "config.toml").algorithms
    records = {label: Record({name: [] for name in ROWS}, failures.get(label, "")) for label in labels}
    for name in ROWS:
        for _, _, row in read_lines(kept_file(folder, name)):
            records[row["algorithm"]].rows[name].append(row)
    return records


def write_records(
    folder: Path, experiment: Experiment, records: dict[str, Record], environment: Table, compressed: bool
) -> None:
    """A new run folder with the methods of `records`, up to the rounds of the experiment."""
    _empty(folder)
    methods = {label: experiment.algorithms[label] for label in records}
    write_whole(folder / "config.toml", experiment.model_copy(update={"algorithms": methods}).toml())
    for name in ROWS:
        rows = [row | {"algorithm": label} for label, record in records.items() for row in record.rows[name]]
        rows = [row for row in rows if row["round"] <= experiment.rounds]
        content = (f"{name}.gz", compress(rows)) if compressed else (name, json_lines(rows))
        write_whole(folder / content[0], content[1])
    if failures := {label: record.failure for label, record in records.items() if record.failure}:
        _write_json(folder / FAILURES, failures)
    _write_json(folder / "environment.json", environment)


def figure_folder(results: Path, part: Part, experiment: Experiment) -> Path:
    return results / ("pilots" if part.pilots else part.setting) / experiment.name


# -- from the working folder to the results ----------------------------------------
def pack(work: Path, results: Path) -> list[Path]:
    """Write the finished runs and sweeps of `work` into `results`; return the folders that were written."""
    plan = read_plan(work / PLAN)
    with locked(work / "locks" / "pack", wait=True):
        times, written = read_times(work), []
        for part, experiment in known_experiments(plan, work):
            runs = [run for run in pool_runs(experiment, work) if run.done]
            folder = figure_folder(results, part, experiment)
            if runs:
                _refuse_loss(folder, runs, work)
                records = {run.label: read_records(run.folder)[run.algorithm] for run in runs}
                environment = _join_environments([run.folder for run in runs], times)
                write_records(folder, experiment, records, environment, compressed=True)
                written.append(folder)
        for name in filter(partial(winners, work), plan.sweeps):
            source, folder = work / "sweeps" / name, results / "sweeps" / name
            _copy_sweep(source, folder, _join_environments([source], times))
            written.append(folder)
        if written:
            write_whole(results / PLAN, plan.text)
            write_whole(results / KEPT_TIMES, _join_times(plan, work, times))
    return written


def _refuse_loss(folder: Path, runs: list[PoolRun], work: Path) -> None:
    kept = read(folder / "config.toml").algorithms if (folder / "config.toml").is_file() else {}
    if lost := ", ".join(label for label in kept if label not in [run.label for run in runs]):
        problem = f"holds {lost}, which {work} has not run"
        raise ValueError(f"{folder}: {problem}: restore those runs, or give another --out")


def _join_environments(folders: list[Path], times: list[Table]) -> Table:
    """Each fact once, as a list if the runs differ, and the commands and commits of the runs. What a run lists for its
    own page, the split of its samples and its changed settings, is not kept."""
    facts: Table = {}
    environments = [
        {key: value for key, value in _environment(folder).items() if key not in ("changed", "partition")}
        for folder in folders
    ]
    for key in dict.fromkeys(key for environment in environments for key in environment):
        values = list(dict.fromkeys(environment.get(key) for environment in environments))
        facts[key] = values[0] if len(values) == 1 else values
    names = [folder.name for folder in folders]
    for key in ("command", "commit"):
        facts[f"{key}s"] = list(dict.fromkeys(row[key] for row in times if row["name"] in names))
    return facts


def _join_times(plan: PartList, work: Path, times: list[Table]) -> str:
    """One row per run and sweep; `_split_times` is the way back. A run that the plan no longer asks for has no row."""
    runs = {run.name: run for _, experiment in known_experiments(plan, work) for run in pool_runs(experiment, work)}
    rows: dict[str, Table] = {}
    for time in times:
        if time["kind"] == "run" and time["name"] not in runs:
            continue
        row = rows.setdefault(f"{time['kind']} {time['name']}", {key: time[key] for key in ("part", "kind", "name")})
        row.setdefault("spans", []).append([time["began"], time["wall"]])
        for key in ("command", "commit"):
            row.setdefault(f"{key}s", []).append(time[key])
    for row in rows.values():
        name = row["name"]
        if (run := runs.get(name)) is not None:
            folder, done, experiment = run.folder, run.done, run.experiment
            row |= {"data": experiment.problem.data, "algorithm": run.algorithm, "steps": run.steps}
            row |= {"seeds": len(experiment.seeds), "done": done}
        elif name in plan.sweeps:
            folder, done, sweep = work / "sweeps" / name, winners(work, name) is not None, plan.sweeps[name]
            row["steps"] = sum(run.steps for run in pool_runs(plan.searched(name), work))
            row["seeds"] = len(sweep["rates"]) * len(sweep["seeds"])
        else:
            continue
        row["rounds_seconds"] = shorten(_seconds_in_rounds(folder))
        if done:
            row["environment"] = _environment(folder)
    return "[\n" + ",\n".join(map(json.dumps, rows.values())) + "\n]\n"


# -- from the results to the working folder ----------------------------------------
def restore(plan: PartList, results: Path, work: Path) -> list[str]:
    """Put into `work` the finished runs and sweeps of `results` that it does not have; return their names.

    A run is restored only if the plan asks for the same one: after a change of its values it is run again.
    """
    if not (results / KEPT_TIMES).is_file():
        return []
    rows = {row["name"]: row for row in json.loads((results / KEPT_TIMES).read_bytes())}
    finished = {name: row["environment"] for name, row in rows.items() if "environment" in row}
    restored = []
    with locked(work / "locks" / "restore", wait=True):
        for name in plan.sweeps:
            source, folder = results / "sweeps" / name, work / "sweeps" / name
            if winners(work, name) or name not in finished or not (source / "best.toml").is_file():
                continue
            with locked(work / "locks" / f"sweep-{name}") as ours:
                if ours:
                    _copy_sweep(source, folder, finished[name])
                    seconds = [{"algorithm": "all", "seconds": rows[name]["rounds_seconds"]}]
                    write_whole(folder / "timings.jsonl", json_lines(seconds))
                    write_whole(folder / DONE, "{}\n")
                    restored.append(name)
        for part, experiment in known_experiments(plan, work):
            restored += _restore_runs(figure_folder(results, part, experiment), experiment, finished, work)
        _split_times(rows, work)
        if not (work / PLAN).is_file():
            write_whole(work / PLAN, plan.text)
    return restored


def _restore_runs(folder: Path, experiment: Experiment, finished: dict[str, Table], work: Path) -> Iterator[str]:
    left = [run for run in pool_runs(experiment, work) if run.name in finished and not run.done]
    if not left or not (folder / "config.toml").is_file():
        return
    kept = read(folder / "config.toml").completed()
    names = {run.label: run.name for run in pool_runs(kept, work)}
    records = read_records(folder)
    for run in left:
        if names.get(run.label) != run.name or kept.rounds < experiment.rounds:
            continue
        with locked(work / "locks" / f"run-{run.name}") as ours:
            if ours:
                whole = run.experiment.model_copy(update={"rounds": kept.rounds})
                record = {run.algorithm: records[run.label]}
                write_records(run.folder, whole, record, finished[run.name], compressed=False)
                run.finish(kept.rounds)
                yield run.name


def _split_times(rows: dict[str, Table], work: Path) -> None:
    """The rows of `times.json` as rows of the working folder, before those that it has."""
    times = read_times(work)
    known = {row["name"] for row in times}
    restored = [
        {key: row[key] for key in ("part", "kind", "name")}
        | {"began": began, "wall": wall, "command": command, "commit": commit}
        for row in rows.values()
        if row["name"] not in known
        for (began, wall), command, commit in zip(row["spans"], row["commands"], row["commits"], strict=True)
    ]
    if restored:
        write_whole(work / TIMES, json_lines([*restored, *times]))


# -- both ways ----------------------------------------
def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _copy_sweep(source: Path, folder: Path, environment: Table) -> None:
    _empty(folder)
    for name in SWEEP_FILES:
        shutil.copyfile(source / name, folder / name)
    _write_json(folder / "environment.json", environment)


def _environment(folder: Path) -> Table:
    """The environment of a run or sweep; its command is kept with the times."""
    facts = json.loads((folder / "environment.json").read_bytes())
    return {key: value for key, value in facts.items() if key != "command"}


def _write_json(path: Path, table: Table) -> None:
    write_whole(path, json.dumps(table, indent=1) + "\n")


def _seconds_in_rounds(folder: Path) -> float:
    """Seconds that a run or sweep spent in rounds; 0 if it ended before it had a folder."""
    last = {row["algorithm"]: row["seconds"] for _, _, row in read_lines(folder / "timings.jsonl")}
    return float(sum(last.values()))


def compress(rows: Iterable[Table]) -> bytes:
    """Rows as compressed JSON lines, floats with six digits. There is no time stamp: equal rows give equal bytes."""
    short = ({k: shorten(v) if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    return gzip.compress("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in short).encode(), mtime=0)


def shorten(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
