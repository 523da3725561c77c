"""What the command line says instead of the file, and whether a folder's run is the one that is asked for."""

from __future__ import annotations

from pathlib import Path

from .. import checks
from ..registry import algorithms as known
from .config import Experiment, checked, read


def choose(experiment: Experiment, rounds: int | None, algorithms: str | None, seeds: str | None) -> Experiment:
    """The experiment with other rounds, algorithms (labels, or any name) or seeds; checked like a file.

    >>> from fedda.experiments import find
    >>> list(choose(find("digits"), 5, "fedavg", "0,1").algorithms)
    ['fedavg']
    """
    table = experiment.model_dump()
    if rounds is not None:
        checks.count("command line", "rounds", rounds)
        table["rounds"] = rounds
    if algorithms is not None:
        chosen = {}
        for label in filter(None, map(str.strip, algorithms.split(","))):
            if label not in experiment.algorithms and label not in known.entries:
                nearest = checks.nearest(label, {*experiment.algorithms, *known.entries})
                raise ValueError(f"--algorithms: unknown {label!r}; {nearest}")
            chosen[label] = experiment.algorithms.get(label, {})
        if not chosen:
            raise ValueError(f"--algorithms must name some, by comma; the file has {', '.join(experiment.algorithms)}")
        table["algorithms"] = chosen
    if seeds is not None:
        try:
            table["seeds"] = [int(seed) for seed in seeds.split(",")]
        except ValueError:
            raise ValueError(f"--seeds must be whole numbers by comma, such as 0,1,2, got {seeds!r}") from None
    return checked(table, "command line")


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
