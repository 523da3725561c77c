"""What the command line says instead of the file, and whether a folder's run is the one that is asked for."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .. import checks, presets
from ..problems import options_of
from ..registry import algorithms as known
from ..registry import models, partitions
from ..runs.toml import literal
from .config import Experiment, checked, read


def choose(
    experiment: Experiment,
    rounds: int | None = None,
    algorithms: str | None = None,
    seeds: str | None = None,
    data: str | None = None,
    preset: Path | None = None,
    words: Sequence[str] = (),
) -> Experiment:
    """The experiment with other rounds, algorithms (labels, or any name), seeds, data, values from a preset file, or
    single words ("problem.batch=32", "fedavg.lr=0.1"); checked like a file.

    >>> from fedda.experiments import find
    >>> list(choose(find("digits"), 5, "fedavg", "0,1").algorithms)
    ['fedavg']
    >>> choose(find("digits"), words=["problem.batch=32"]).problem.batch
    32
    """
    table = experiment.model_dump()
    if rounds is not None:
        checks.count("command line", "rounds", rounds)
        table["rounds"] = rounds
    if seeds is not None:
        try:
            table["seeds"] = [int(seed) for seed in seeds.split(",")]
        except ValueError:
            raise ValueError(f"--seeds must be whole numbers by comma, such as 0,1,2, got {seeds!r}") from None
    if algorithms is not None:
        table["algorithms"] = _chosen(experiment, algorithms)
    if preset is not None:
        table["setting"] = _take(table["algorithms"], preset)
    before = copy.deepcopy(table)
    if data is not None:
        table["problem"]["data"] = data
    for text in words:
        _set(table, text)
    _drop_options(table["problem"], before["problem"])
    # The paper's values with one of them changed are not the paper's, and must not be called so.
    other = any((table.get(key) or None) != before[key] for key in ("problem", "algorithms", "aggregation"))
    other = other or not set(table["algorithms"]) <= set(experiment.algorithms)
    if other and table.get("setting") == before["setting"] != "":
        table["setting"] = "changed"
    return checked(table, "command line")


def _drop_options(problem: dict[str, Any], before: dict[str, Any]) -> None:
    """With another partition or model the old one's options mean nothing; those just given are left to be judged."""
    for kind, word in ((partitions, "partition"), (models, "model")):
        for option in options_of(kind.find(before[word])) if problem.get(word) != before[word] else ():
            if option in before and problem.get(option) == before[option]:
                del problem[option]


def _take(tables: dict[str, Any], preset: Path) -> str:
    """Put the values of a preset file in their places; what the setting is called then."""
    tuned = presets.read(preset)
    for label, words in tuned.items():
        if label in tables and "name" in words:
            raise ValueError(f"--preset: {preset}: [{label}] holds values, not the name of another algorithm")
    if not set(tuned) & set(tables):
        raise ValueError(f"--preset: {preset} has values for {', '.join(tuned) or 'nothing'}, not for this run")
    for label in tables:
        tables[label] |= tuned.get(label, {})
    return "tuned" if set(tables) <= set(tuned) else "changed"


def owner_of(path: str, labels: Iterable[str]) -> str | None:
    """The label that a dotted path begins with: the longest, as a label may have dots in it."""
    return max((label for label in labels if path.startswith(f"{label}.")), key=len, default=None)


def _chosen(experiment: Experiment, algorithms: str) -> dict[str, Any]:
    chosen = {}
    for label in filter(None, map(str.strip, algorithms.split(","))):
        if label not in experiment.algorithms and label not in known.entries:
            nearest = checks.nearest(label, {*experiment.algorithms, *known.entries})
            raise ValueError(f"--algorithms: unknown {label!r}; {nearest}")
        chosen[label] = dict(experiment.algorithms.get(label, {}))
    if not chosen:
        raise ValueError(f"--algorithms must name some, by comma; the file has {', '.join(experiment.algorithms)}")
    return chosen


def _set(table: dict[str, Any], text: str) -> None:
    """One word of the command line, with a value as TOML has it; a bare word is a text, none takes the word out."""
    path, equals, value = text.partition("=")
    owner = owner_of(path, ("problem", *table["algorithms"]))
    place = table if owner is None else table["problem"] if owner == "problem" else table["algorithms"][owner]
    word = path if owner is None else path[len(owner) + 1 :]
    if not equals or not word or (owner is None and (word in ("problem", "algorithms") or word not in table)):
        known = ("a key of the file", "problem.WORD", *(f"{label}.WORD" for label in table["algorithms"]))
        raise ValueError(f"--set must be WORD=VALUE with WORD {', '.join(known)}, got {text!r}")
    if not value.strip():
        place.pop(word, None)
        return
    place[word] = literal(value)


def resumed(wanted: Experiment, place: Path, rounds: int | None) -> Experiment:
    """The experiment of the folder, if it is the one that is asked for (it may be asked to run longer)."""
    if not (place / "config.toml").is_file():
        raise ValueError(f"{place}: holds no run to go on with; leave out --resume to begin one")
    saved = read(place / "config.toml").completed()
    asked = wanted.completed()
    for key, value in saved.model_dump().items():
        if key in ("rounds", "title") or (key == "every" and wanted.every is None):
            continue
        if getattr(asked, key) != getattr(saved, key):
            raise ValueError(f"{place}: was run with another {key!r}: {value}; give the same, or another --out")
    if rounds is not None and rounds < saved.rounds:
        raise ValueError(f"{place}: was begun with {saved.rounds} rounds; --rounds may raise that, not lower it")
    return saved.model_copy(update={"rounds": rounds or saved.rounds})
