"""The layout of the results folder, and both ways between it and a working folder: `pack` and `restore`.

    parts.toml                       the plan
    times.json                       for each run and sweep: part, spans of time, commands, commits, environment
    SETTING/FIGURE/, pilots/NAME/    a run folder with the rows of all methods and, for a figure, its pictures
    sweeps/NAME/                     the files of a sweep
    theory/                          written by `fedda theory`; neither read nor changed here

The working folder has one folder per run (`pool.py`). The same runs give the same bytes, and packing what was restored
gives the bytes that it was restored from.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedda.experiments.config import Experiment, read
from fedda.files import alone, json_lines, write_whole
from fedda.report.picture import picture
from fedda.report.plots import draw
from fedda.runs.reading import read as read_run

from .parts import Part, PartList, read_plan
from .pool import DONE, TIMES, PoolRun, known_experiments, pool_runs, read_times, winners

PLAN, KEPT_TIMES = "parts.toml", "times.json"
SWEEP_FILES = ("config.toml", "sweep.toml", "sweep.json", "best.toml")
DIGITS = 6  # of a kept number: float32 has seven
DPI = 100  # of a kept picture

Table = dict[str, Any]


# -- one file of a run folder ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class KeptFile:
    """A file of a kept run folder: `join` makes it from the folders of single runs, `split` gives one run its part."""

    name: str
    in_run: str
    join: Callable[[Experiment, list[PoolRun]], str | bytes]
    split: Callable[[Path, PoolRun], str | bytes]


def _join_config(experiment: Experiment, runs: list[PoolRun]) -> str:
    methods = {run.label: experiment.algorithms[run.label] for run in runs}
    return experiment.model_copy(update={"algorithms": methods}).toml()


def _split_config(folder: Path, run: PoolRun) -> str:
    return run.experiment.model_copy(update={"rounds": read(folder / "config.toml").rounds}).toml()


def _join_rows(name: str, experiment: Experiment, runs: list[PoolRun]) -> bytes:
    rows = [row | {"algorithm": run.label} for run in runs for row in _read_lines(run.folder / name)]
    return compress(row for row in rows if row["round"] <= experiment.rounds)


def _split_rows(name: str, folder: Path, run: PoolRun) -> bytes:
    rows = map(json.loads, gzip.decompress((folder / f"{name}.gz").read_bytes()).splitlines())
    return json_lines(row | {"algorithm": run.algorithm} for row in rows if row["algorithm"] == run.label)


def _join_failures(experiment: Experiment, runs: list[PoolRun]) -> str:
    failures = {run.label: run.failure for run in runs if run.failure}
    return json.dumps(failures, indent=1) + "\n" if failures else ""


def _split_failures(folder: Path, run: PoolRun) -> str:
    file = folder / "failures.json"
    why = json.loads(file.read_bytes()).get(run.label) if file.is_file() else None
    return json.dumps({run.algorithm: why}) + "\n" if why else ""


RUN_FILES = (
    KeptFile("config.toml", "config.toml", _join_config, _split_config),
    *(
        KeptFile(f"{n}.gz", n, partial(_join_rows, n), partial(_split_rows, n))
        for n in ("metrics.jsonl", "timings.jsonl")
    ),
    KeptFile("failures.json", "failures.json", _join_failures, _split_failures),
)


def figure_folder(results: Path, part: Part, experiment: Experiment) -> Path:
    return results / ("pilots" if part.pilots else part.setting) / experiment.name


# -- from the working folder to the results ----------------------------------------------------------------------------
def pack(work: Path, results: Path) -> list[Path]:
    """Write the finished runs and sweeps of `work` into `results`; return the folders that were written."""
    plan = read_plan(work / PLAN)
    with alone(work / "locks" / "pack", wait=True):
        times, written = read_times(work), []
        for part, experiment in known_experiments(plan, work):
            runs = [run for run in pool_runs(experiment, work) if run.done]
            if runs:
                folder = figure_folder(results, part, experiment)
                _pack_runs(experiment, runs, folder, times, work)
                if not part.pilots:
                    _draw(folder)
                written.append(folder)
        for name in filter(partial(winners, work), plan.sweeps):
            source, folder = work / "sweeps" / name, results / "sweeps" / name
            _copy_sweep(source, folder)
            write_whole(folder / "environment.json", _join_environments([_environment(source)], [name], times))
            written.append(folder)
        if written:
            write_whole(results / PLAN, plan.text)
            write_whole(results / KEPT_TIMES, _join_times(plan, work, times))
    return written


def _pack_runs(experiment: Experiment, runs: list[PoolRun], folder: Path, times: list[Table], work: Path) -> None:
    if (folder / "config.toml").is_file():
        labels = {run.label for run in runs}
        lost = [label for label in read(folder / "config.toml").algorithms if label not in labels]
        if lost:
            problem = f"holds {', '.join(lost)}, which {work} has not run"
            raise ValueError(f"{folder}: {problem}: restore those runs, or give another --out")
    _empty(folder)
    for file in RUN_FILES:
        if content := file.join(experiment, runs):
            write_whole(folder / file.name, content)
    environments = [_environment(run.folder) for run in runs]
    write_whole(folder / "environment.json", _join_environments(environments, [run.name for run in runs], times))


def _draw(folder: Path) -> None:
    curves = picture([read_run(folder)])
    for suffix in ("png", "svg"):
        write_whole(folder / f"curves-rounds.{suffix}", draw(curves, curves.axes[0], suffix, DPI))


def _join_environments(environments: list[Table], names: list[str], times: list[Table]) -> str:
    """Each fact once, as a list where the runs differ; and the commands and commits of the runs with these names."""
    facts: Table = {}
    for key in dict.fromkeys(key for environment in environments for key in environment):
        values = list(dict.fromkeys(environment.get(key) for environment in environments))
        facts[key] = values[0] if len(values) == 1 else values
    for key in ("command", "commit"):
        facts[f"{key}s"] = list(dict.fromkeys(row[key] for row in times if row["name"] in names))
    return json.dumps(facts, indent=1) + "\n"


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


# -- from the results to the working folder ----------------------------------------------------------------------------
def restore(plan: PartList, results: Path, work: Path) -> list[str]:
    """Put into `work` the finished runs and sweeps of `results` that it does not have; return their names.

    A run is restored only if the plan asks for the same one: after a change of its values it is run again.
    """
    if not (results / KEPT_TIMES).is_file():
        return []
    rows = {row["name"]: row for row in json.loads((results / KEPT_TIMES).read_bytes())}
    finished = {name: row for name, row in rows.items() if "environment" in row}
    with alone(work / "locks" / "restore", wait=True):
        restored = [name for name in plan.sweeps if name in finished and _restore_sweep(results, work, finished[name])]
        for part, experiment in known_experiments(plan, work):
            folder = figure_folder(results, part, experiment)
            if (folder / "config.toml").is_file():
                kept = read(folder / "config.toml").completed()
                names = (
                    {(run.label, run.name) for run in pool_runs(kept, work)} if kept.rounds >= experiment.rounds else ()
                )
                for run in pool_runs(experiment, work):
                    if (run.label, run.name) in names and run.name in finished and not run.done:
                        restored += _restore_run(folder, run, kept.rounds, finished[run.name], work)
        _split_times(rows, work)
        if not (work / PLAN).is_file():
            write_whole(work / PLAN, plan.text)
    return restored


def _restore_run(folder: Path, run: PoolRun, rounds: int, row: Table, work: Path) -> list[str]:
    with alone(work / "locks" / f"run-{run.name}") as ours:
        if not ours:
            return []
        _empty(run.folder)
        for file in RUN_FILES:
            if content := file.split(folder, run):
                write_whole(run.folder / file.in_run, content)
        _write_json(run.folder / "environment.json", row["environment"])
        write_whole(run.folder / DONE, json.dumps({"rounds": rounds}) + "\n")  # last: now the run counts as finished
        return [run.name]


def _restore_sweep(results: Path, work: Path, row: Table) -> bool:
    name = row["name"]
    source, folder = results / "sweeps" / name, work / "sweeps" / name
    if winners(work, name) or not (source / "best.toml").is_file():
        return False
    with alone(work / "locks" / f"sweep-{name}") as ours:
        if ours:
            _copy_sweep(source, folder)
            _write_json(folder / "environment.json", row["environment"])
            seconds = [{"algorithm": "all", "seconds": row["rounds_seconds"]}]
            write_whole(folder / "timings.jsonl", json_lines(seconds))
            write_whole(folder / DONE, "{}\n")
    return ours


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


# -- both ways ---------------------------------------------------------------------------------------------------------
def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _copy_sweep(source: Path, folder: Path) -> None:
    _empty(folder)
    for name in SWEEP_FILES:
        shutil.copyfile(source / name, folder / name)


def _environment(folder: Path) -> Table:
    """The environment of a run or sweep; its command is kept with the times."""
    facts = json.loads((folder / "environment.json").read_bytes())
    return {key: value for key, value in facts.items() if key != "command"}


def _write_json(path: Path, table: Table) -> None:
    write_whole(path, json.dumps(table, indent=1) + "\n")


def _read_lines(path: Path) -> list[Table]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _seconds_in_rounds(folder: Path) -> float:
    """Seconds that a run or sweep spent in rounds; 0 if it ended before it had a folder."""
    file = folder / "timings.jsonl"
    last = {row["algorithm"]: row["seconds"] for row in (_read_lines(file) if file.is_file() else ())}
    return float(sum(last.values()))


def compress(rows: Iterable[Table]) -> bytes:
    """Rows as compressed JSON lines, floats with six digits. There is no time stamp: equal rows give equal bytes.

    >>> gzip.decompress(compress([{"round": 0, "train_loss": 2.30258509}]))
    b'{"round":0,"train_loss":2.30259}\\n'
    """
    short = ({k: shorten(v) if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    return gzip.compress("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in short).encode(), mtime=0)


def shorten(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
