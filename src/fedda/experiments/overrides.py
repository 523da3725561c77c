"""Command-line options that replace values of an experiment, and the check that a folder holds the same experiment."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import checks, presets
from ..data import absolute
from ..problems import options_of
from ..registry import algorithms as registered
from ..registry import models, partitions, rates_of_unknown_length
from ..runs.names import CONFIG
from ..runs.toml import literal
from .config import Experiment, absolute_plugins, checked, hyper_params, read


def override(
    experiment: Experiment,
    rounds: int | None = None,
    algorithms: str | None = None,
    seeds: str | None = None,
    data: str | None = None,
    preset: Path | None = None,
    settings: Sequence[str] = (),
    plugins: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
) -> Experiment:
    """The experiment with other rounds, algorithms (labels or names), seeds, data, hyper-parameters from a preset file,
    or single settings ("problem.batch=32", "fedavg.lr=0.1"); checked like a file. `plugins` were imported and are
    recorded. `more` are values of its keys, None for those that stay. Paths are relative to the working directory.

    >>> from fedda.experiments import find
    >>> list(override(find("digits"), 5, "fedavg", "0,1").algorithms)
    ['fedavg']
    >>> override(find("digits"), settings=["problem.batch=32"]).problem.batch
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
            raise ValueError(f"--seeds must be whole numbers separated by commas, as in 0,1,2, got {seeds!r}") from None
    if algorithms is not None:
        table["algorithms"] = _select_algorithms(experiment, algorithms)
    if preset is not None:
        table["setting"] = _apply_preset(table["algorithms"], preset)
    before = copy.deepcopy(table)
    if data is not None:
        table["problem"]["data"] = data
    for text in settings:
        _apply_setting(table, text)
    if isinstance(table["problem"].get("data"), str):
        table["problem"]["data"] = absolute(table["problem"]["data"], Path.cwd())
    table["plugin"] = [*(table.get("plugin") or ()), *absolute_plugins(plugins, Path.cwd())] or None
    table |= {key: value for key, value in (more or {}).items() if value is not None}
    _drop_options(table["problem"], before["problem"])
    if table["problem"].get("data") != before["problem"]["data"] and table["title"] == experiment.title != "":
        table["title"] = f"{Path(str(table['problem'].get('data'))).name}, with the settings of {experiment.name}"
    # With one value changed the setting is no longer the paper's.
    changed = any((table.get(key) or None) != before[key] for key in ("problem", "algorithms", "aggregation"))
    changed = changed or not set(table["algorithms"]) <= set(experiment.algorithms)
    if changed and table.get("setting") == before["setting"] != "":
        table["setting"] = "changed"
    return checked(table, "command line")


def other_data_note(experiment: Experiment, wanted: Experiment) -> str:
    """What to say if `wanted` has other data than `experiment` but its hyper-parameters; empty otherwise.

    >>> from fedda.experiments import find
    >>> other_data_note(find("digits"), override(find("digits"), data="breast-cancer"))
    'the hyper-parameters of digits were chosen for digits, not for breast-cancer; fedda sweep finds others'
    """
    old, new = experiment.problem.data, wanted.problem.data
    kept = any(
        hyper_params(params) and experiment.algorithms.get(k) == params for k, params in wanted.algorithms.items()
    )
    if old == new or not kept:
        return ""
    chosen = f"the hyper-parameters of {experiment.name} were chosen for {Path(old).name}, not for {Path(new).name}"
    return f"{chosen}; fedda sweep finds others"


def _drop_options(problem: dict[str, Any], before: dict[str, Any]) -> None:
    """Drop the options of a partition or model that was replaced; options given on the command line stay."""
    for registry, key in ((partitions, "partition"), (models, "model")):
        for option in options_of(registry.find(before[key])) if problem.get(key) != before[key] else ():
            if option in before and problem.get(option) == before[option]:
                del problem[option]


def _apply_preset(tables: dict[str, Any], preset: Path) -> str:
    """Replace hyper-parameters by those of a preset file, and return the name of the setting."""
    tuned = presets.read(preset)
    for label, params in tuned.items():
        if label in tables and "name" in params:
            raise ValueError(f"--preset: {preset}: [{label}] must hold values, not the name of another algorithm")
    if not set(tuned) & set(tables):
        raise ValueError(f"--preset: {preset} has values for {', '.join(tuned) or 'nothing'}, not for this run")
    for label in tables:
        tables[label] |= tuned.get(label, {})
    return "tuned" if set(tables) <= set(tuned) else "changed"


def owner_of(path: str, labels: Iterable[str]) -> str | None:
    """The label that a dotted path begins with; the longest, because a label may contain dots."""
    return max((label for label in labels if path.startswith(f"{label}.")), key=len, default=None)


def _select_algorithms(experiment: Experiment, algorithms: str) -> dict[str, Any]:
    chosen = {}
    for label in filter(None, map(str.strip, algorithms.split(","))):
        if label not in experiment.algorithms and label not in registered.entries:
            nearest = checks.nearest(label, {*experiment.algorithms, *registered.entries})
            raise ValueError(f"--algorithms: unknown {label!r}; {nearest}")
        chosen[label] = dict(experiment.algorithms.get(label, {}))
    if not chosen:
        raise ValueError(f"--algorithms must name at least one; the file has {', '.join(experiment.algorithms)}")
    return chosen


def _apply_setting(table: dict[str, Any], text: str) -> None:
    """Apply KEY=VALUE. A value that is not TOML is a text; an empty value removes the key."""
    path, equals, value = text.partition("=")
    owner = owner_of(path, ("problem", *table["algorithms"]))
    target = table if owner is None else table["problem"] if owner == "problem" else table["algorithms"][owner]
    key = path if owner is None else path[len(owner) + 1 :]
    if (
        not equals
        or not key
        or (owner is None and (key in ("problem", "algorithms") or key not in Experiment.model_fields))
    ):
        keys = ("a key of the file", "problem.NAME", *(f"{label}.NAME" for label in table["algorithms"]))
        raise ValueError(f"--set must be KEY=VALUE with KEY {', '.join(keys)}, got {text!r}")
    if not value.strip():
        target.pop(key, None)
        return
    target[key] = literal(value)


def saved_experiment(wanted: Experiment, folder: Path, rounds: int | None) -> Experiment:
    """The experiment in the folder, which must equal the wanted one except that `rounds` may be larger."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder}: holds no run to resume; leave out --resume to start one")
    saved = read(folder / CONFIG).completed()
    complete = wanted.completed()
    for key in Experiment.model_fields:
        same = ("rounds", "title", "plugin")
        if key in same or (key in ("every", "evaluate") and getattr(wanted, key) is None):
            continue
        if key == "evaluate" and {complete.evaluate, saved.evaluate} == {None, "all"}:
            continue  # older runs do not record it
        if getattr(complete, key) != getattr(saved, key):
            value = saved.model_dump().get(key)
            raise ValueError(f"{folder}: was run with another {key!r}: {value}; give the same, or another --out")
    label = next((label for label, params in saved.algorithms.items() if rates_of_unknown_length(params)), None)
    if rounds not in (None, saved.rounds) and label is not None:
        raise ValueError(
            f"{folder}: the rate of {label} depends on the number of rounds, {saved.rounds}: give its table a horizon "
            "(in local steps), or start a new run"
        )
    if rounds is not None and rounds < saved.rounds:
        raise ValueError(f"{folder}: was started with {saved.rounds} rounds; --rounds may raise that, not lower it")
    return saved.model_copy(update={"rounds": rounds or saved.rounds})
