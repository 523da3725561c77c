"""From the working folder to `results/`: what a reader and a verdict need, small, the same bytes from the same runs."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

from fedda.experiments.config import Experiment
from fedda.files import alone, write_whole
from fedda.report.picture import picture
from fedda.report.plots import draw
from fedda.runs.reading import read, toml

from .estimate import times
from .parts import Part, PartList, plan
from .pool import entries, ready, spent, winners

DIGITS = 6  # of a kept number: float32 has seven
DPI = 100  # of a kept picture
SWEEP = ("config.toml", "sweep.toml", "sweep.json", "best.toml")


def pack(work: Path, out: Path) -> list[str]:
    """Write what has been run in `work` into `out`; which folders were written.

    `out` holds SETTING/FIGURE, pilots/NAME and sweeps/NAME, `parts.toml` and `times.json`; what somebody else put
    there (`theory/`) stays.
    """
    wanted = plan(work / "parts.toml")
    with alone(work / "locks" / "pack", wait=True):
        return _pack(wanted, work, out)


def _pack(wanted: PartList, work: Path, out: Path) -> list[str]:
    rows = times(work)
    written = []
    for part, experiment in ready(wanted, work):
        written += _runs(experiment, work, kept_at(out, part, experiment), rows, pictures=not part.pilots)
    for name in wanted.sweeps:
        if winners(work, name):
            written += _sweep(name, work, out / "sweeps" / name, rows)
    if written:
        write_whole(out / "parts.toml", wanted.text)
        write_whole(out / "times.json", _times(wanted, work, rows))
    return written


def kept_at(out: Path, part: Part, experiment: Experiment) -> Path:
    return out / ("pilots" if part.pilots else part.setting) / experiment.name


def _runs(
    experiment: Experiment, work: Path, place: Path, rows: list[dict[str, Any]], pictures: bool = True
) -> list[str]:
    """A run folder out of the runs that are done, if any is."""
    there = [entry for entry in entries(experiment, work) if entry.done]
    if not there:
        return []
    _refuse_less(place, [entry.label for entry in there], work)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    own = experiment.model_copy(update={"algorithms": {e.label: experiment.algorithms[e.label] for e in there}})
    write_whole(place / "config.toml", own.toml())
    for name in ("metrics.jsonl", "timings.jsonl"):
        write_whole(place / f"{name}.gz", packed([row for entry in there for row in entry.rows(name)]))
    failures = {entry.label: entry.failure for entry in there if entry.failure}
    if failures:
        write_whole(place / "failures.json", json.dumps(failures, indent=1) + "\n")
    about = environment([e.environment for e in there], [e.place.name for e in there], rows)
    write_whole(place / "environment.json", about)
    if pictures:
        shown = picture([read(place)])
        for kind in ("png", "svg"):
            write_whole(place / f"curves-rounds.{kind}", draw(shown, shown.axes[0], kind, DPI))
    return [str(place)]


def _refuse_less(place: Path, labels: list[str], work: Path) -> None:
    """What is kept is never replaced by less of it."""
    if (place / "config.toml").is_file():
        gone = [label for label in toml(place / "config.toml")["algorithms"] if label not in labels]
        if gone:
            words = f"holds {', '.join(gone)}, which {work} has not run"
            raise ValueError(f"{place}: {words}: bring those runs back, or give another --out")


def _sweep(name: str, work: Path, place: Path, rows: list[dict[str, Any]]) -> list[str]:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for file in SWEEP:
        shutil.copyfile(work / "sweeps" / name / file, place / file)
    facts = json.loads((work / "sweeps" / name / "environment.json").read_bytes())
    write_whole(place / "environment.json", environment([facts], [name], rows))
    return [str(place)]


def packed(rows: list[dict[str, Any]]) -> bytes:
    """Rows as compressed JSON lines, floats with six digits; without a time of its own, so the same bytes every time.

    >>> gzip.decompress(packed([{"round": 0, "train_loss": 2.30258509}]))
    b'{"round":0,"train_loss":2.30259}\\n'
    """
    few = ({k: short(v) if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in few)
    return gzip.compress(text.encode(), mtime=0)


def short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def environment(facts: list[dict[str, Any]], names: list[str], rows: list[dict[str, Any]]) -> str:
    """What the runs were made with: a fact that they share, or a list where they differ; every command and commit."""
    found: dict[str, Any] = {}
    for word in dict.fromkeys(word for one in facts for word in without_command(one)):
        values = list(dict.fromkeys(one.get(word) for one in facts))
        found[word] = values[0] if len(values) == 1 else values
    own = [row for row in rows if row["name"] in names]
    for word in ("command", "commit"):
        found[f"{word}s"] = list(dict.fromkeys(row[word] for row in own))
    return json.dumps(found, indent=1) + "\n"


def without_command(facts: dict[str, Any]) -> dict[str, Any]:
    return {word: value for word, value in facts.items() if word != "command"}


def _times(wanted: PartList, work: Path, rows: list[dict[str, Any]]) -> str:
    """Every run and sweep with its steps and seconds, under the part that ran it."""
    of = {entry.place.name: entry for _, experiment in ready(wanted, work) for entry in entries(experiment, work)}
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        own = found.setdefault(f"{row['kind']} {row['name']}", {k: row[k] for k in ("part", "kind", "name")})
        own.setdefault("spans", []).append([row["began"], row["wall"]])
        for word in ("command", "commit"):
            own.setdefault(f"{word}s", []).append(row[word])
    # a run that is no longer asked for, because a value of it was changed, is no part of the results
    found = {key: own for key, own in found.items() if own["kind"] != "run" or own["name"] in of}
    for own in found.values():
        entry = of.get(own["name"])
        if entry is not None:
            (algorithm,) = entry.experiment.algorithms
            data, seeds = entry.experiment.problem.data, len(entry.experiment.seeds)
            own |= {"data": data, "algorithm": algorithm, "steps": entry.steps, "seeds": seeds, "done": entry.done}
            own["rounds_seconds"] = short(entry.seconds)
            if entry.done:
                own["environment"] = without_command(entry.environment)
        elif own["kind"] == "sweep" and own["name"] in wanted.sweeps:
            asked, searched = wanted.sweeps[own["name"]], wanted.searched(own["name"])
            steps = sum(entry.steps for entry in entries(searched, work))
            own |= {"steps": steps, "seeds": len(asked["rates"]) * len(asked["seeds"])}
            place = work / "sweeps" / own["name"]
            own["rounds_seconds"] = short(spent(place))
            if winners(work, own["name"]):
                own["environment"] = without_command(json.loads((place / "environment.json").read_bytes()))
    return "[\n" + ",\n".join(map(json.dumps, found.values())) + "\n]\n"
