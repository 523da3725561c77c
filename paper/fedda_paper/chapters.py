"""Chapters of the page besides the figures: tuning, pilots, advice, times."""

import json
import math
from collections.abc import Iterator
from typing import Any

from fedda.claims.compare import LOWER, SUPPORTED, better
from fedda.claims.runs import ALIASES, Source
from fedda.claims.values import MethodValues
from fedda.runs.formats import count, duration, plain

from .estimate import covered
from .parts import Part
from .results import Results, builtin, missing
from .tables import cell, columns_of, markdown, recommended

WITH_BATCHNORM = "paper-batchnorm"
SETTINGS = {"paper": "at the paper's values", WITH_BATCHNORM: "the same with BatchNorm", "tuned": "tuned"}
NOT_RUN = "not run"
TUNING = """Every method has as many points, rounds and seeds as every other; the best is the best on a fifth of the
training samples that no client trains on. One rate is tuned, the one named, with 5 local steps; it is kept for 10 and
20. Where there is a penalty, so is gamma. The c of variance reduction stays the paper's, so alpha = min(1, c eta^2)
moves with the rate, up to 1, where no reduction is left. An edge of the grid is marked: beyond it nothing was tried.
A sweep sees its own rounds and seeds: what falls back or diverges later, or with another seed, it takes for good."""
PILOTS = """Short runs of the possible readings ([deviations](deviations.md)); ours is the one that the presets
take. A difference counts if a t test over the seeds finds it at the level of 5 %."""
ADVICE = """By a rule, not by taste: of the methods whose test accuracy a t test over the seeds does not tell from the
best one's, the one that sends the fewest bytes a round (of those with as few, the one that takes the fewest
gradients); where some are sparse, the sparsest. At the end of all rounds, by which many have passed their best. Tuned
values are better on the validation samples of the [sweep](#tuning), which need not hold at the end."""
TIMES = """`In rounds` are the seconds of all runs in their rounds; `by the clock` is with captures, evaluations and
checkpoints, and counts once what several processes did side by side: parts that went on at the same time add up to
more than all. What parts share stands in the first that ran it; runs that were given up, because a value was changed,
are left out."""


def tuning(results: Results) -> str:
    """The sweeps: the points that every method tried, and the chosen one."""
    lines = ["## Tuning", "", TUNING]
    for name in results.plan.sweeps:
        sweep = results.sweeps.get(name)
        if sweep is None:
            lines += ["", f"**{name}**: {NOT_RUN}."]
            continue
        size = f"{sweep['budget']} points each, {sweep['rounds']} rounds, seeds {', '.join(map(str, sweep['seeds']))}"
        lines += ["", f"**{name}**: {size}, {sweep['metric'].replace('_', ' ')}.", ""]
        rows = [_sweep_row(label, method["points"]) for label, method in sweep["algorithms"].items()]
        lines.append(markdown(["method", "points", "chosen"], rows))
    return "\n".join(lines)


def _sweep_row(label: str, points: list[dict[str, Any]]) -> list[str]:
    cells, chosen = [], "none: every point diverged"
    for point in points:
        values = ", ".join(f"{param} {plain(value)}" for param, value in point["values"].items())
        cells.append(f"{values}: {point['note'].split(':')[0] if point['value'] is None else plain(point['value'])}")
        if point["best"]:
            chosen = f"**{values}**" + (" (edge)" if _on_edge(point["values"], points) else "")
    return [label, "; ".join(cells), chosen]


def _on_edge(values: dict[str, float], points: list[dict[str, Any]]) -> bool:
    """Whether some value is the least or the greatest one that was tried.

    >>> _on_edge({"lr": 0.1, "gamma": 1.0}, [{"values": {"lr": v, "gamma": 1.0}} for v in (0.01, 0.1, 1.0)])
    False
    """
    tried = {param: {point["values"][param] for point in points} for param in values}
    return any(len(tried[p]) > 1 and v in (min(tried[p]), max(tried[p])) for p, v in values.items())


def edges(results: Results, part: Part, name: str) -> Iterator[str]:
    """The methods of a tuned figure with values on an edge of their grid."""
    sweep = results.sweeps.get(part.sweep)
    if sweep is None:
        return
    for label, in_sweep in results.plan.labels_in_sweep(part, results.plan.figure(part, name)).items():
        points = sweep["algorithms"][in_sweep]["points"]
        if any(point["best"] and _on_edge(point["values"], points) for point in points):
            yield label


def pilots(results: Results) -> str:
    """The readings of each ambiguity, with their values."""
    lines = ["## What the paper leaves open", "", PILOTS]
    for name, pilot in results.plan.pilots.items():
        run = results.pilots.get(name)
        if run is None:
            lines += ["", f"**{pilot['question']}** {NOT_RUN.capitalize()}."]
            continue
        columns, ours = columns_of(run), pilot["ours"]
        rows = [[m.label, "ours" if _reading(m) in ours else "", *(cell(m, c) for c in columns)] for m in run.methods]
        table = markdown(["reading", "", *(c.replace("_", " ") for c in columns)], rows)
        size = f"`{pilot['experiment']}`, {run.rounds} rounds, {run.seeds} seeds."
        lines += ["", f"**{pilot['question']}**", "", size, "", table, ""]
        lines += [f"- {line}" for _, _, line in findings(run, ours, pilot.get("metric", "train_loss"))]
    return "\n".join(lines)


def better_readings(results: Results, run: Source) -> Iterator[str]:
    """The pilots on a figure's data that speak against the readings of its methods."""
    methods = {str(params["name"]) for params in run.run.config["algorithms"].values()}
    methods |= {ALIASES.get(name, name) for name in methods}
    for name, pilot_run in results.pilots.items():
        if pilot_run.data != run.data:
            continue
        pilot = results.plan.pilots[name]
        for method, against, line in findings(pilot_run, pilot["ours"], pilot.get("metric", "train_loss")):
            if against and method in methods:
                where = f"[pilot](#what-the-paper-leaves-open) of {pilot_run.rounds} rounds on `{pilot['experiment']}`"
                yield f"- A {where} speaks against a reading: {line}"


def _reading(method: MethodValues) -> str:
    return method.label.partition(": ")[2]


def findings(run: Source, ours: list[str], metric: str) -> Iterator[tuple[str, bool, str]]:
    """For each method of a pilot: its name, whether another reading is better than ours, and a sentence about it."""
    by_name: dict[str, list[MethodValues]] = {}
    for method in run.methods:
        by_name.setdefault(method.label.partition(": ")[0], []).append(method)
    for name, readings in by_name.items():
        against, sentence = _compare_readings(readings, ours, metric)
        lost = ", ".join(f"{_reading(m)} {m.lost.split(' (')[0]}" for m in readings if m.lost)
        yield name, against, f"{name}: {sentence}{f' ({lost})' if lost else ''}."


def _compare_readings(readings: list[MethodValues], ours: list[str], metric: str) -> tuple[bool, str]:
    """Whether another reading is better than ours, and the comparison as a sentence."""

    def beats(a: MethodValues, b: MethodValues) -> bool:
        return better(a, b, metric) == SUPPORTED

    us = next((m for m in readings if _reading(m) in ours), None)
    constant = [m for m in readings if m.constant]
    learned = [m for m in readings if metric in m.values and not m.constant]
    learned = [m for m in learned if all(beats(m, other) for other in constant)]
    if us is None or not learned:
        return False, "no reading learns anything"
    sign = -1 if metric in LOWER else 1
    best, *rest = sorted(learned, key=lambda m: -sign * m.values[metric].mean)
    mine, other, what = _reading(us), _reading(best), metric.replace("_", " ")
    if best is us:
        if rest and not beats(us, rest[0]):
            return False, f"ours, {mine}, cannot be told from {_reading(rest[0])}"
        return False, f"ours, {mine}, has the best {what}"
    if beats(best, us):
        return True, f"{other} has a better {what} than ours, {mine}: {cell(best, metric)} against {cell(us, metric)}"
    return False, f"ours, {mine}, cannot be told from the best, {other}"


def advice(results: Results) -> str:
    """Which method to use when, by a rule."""
    problems: dict[str, dict[str, list[tuple[str, Source]]]] = {}
    for (setting, name), run in results.figures.items():
        config = run.run.config
        if any("group" in params for params in config["algorithms"].values()):
            continue  # an ablation of local steps is not a choice between methods
        key = json.dumps([config["problem"], run.rounds], sort_keys=True)
        problems.setdefault(key, {}).setdefault(setting, []).append((name, run))
    rows = []
    for settings in problems.values():
        (first, _), *_ = next(iter(settings.values()))
        for setting, figures in settings.items():
            absent = ", ".join(dict.fromkeys(label for name, run in figures for label in missing(name, run)))
            where = builtin(first).title + (f" ({NOT_RUN}: {absent})" if absent else "")
            rows.append([where, SETTINGS.get(setting, setting), *recommended([run for _, run in figures])])
    heads = ["where", "values", "best test accuracy", "as good", "take", "because it"]
    return f"## Which method when\n\n{ADVICE}\n\n" + (markdown(heads, rows) if rows else f"{NOT_RUN.capitalize()}.")


def times(results: Results) -> str:
    if not results.times:
        return f"## Times\n\n{NOT_RUN.capitalize()}."
    parts: dict[str, list[dict[str, Any]]] = {}
    finished = [row for row in results.times if row.get("done", True)]
    for row in finished:
        parts.setdefault(str(row["part"]), []).append(row)
    rows = [[name, *_sums(runs, _steps(runs))] for name, runs in parts.items()]
    begun = [row for row in results.times if not row.get("done", True)]
    if begun:
        rows.append([f"begun: {', '.join(dict.fromkeys(str(row['part']) for row in begun))}", *_sums(begun, "–")])
    rows.append(["**all**", *_sums(results.times, _steps(finished))])
    table = markdown(["part", "runs", "local steps, all seeds", "in rounds", "by the clock"], rows)
    return f"## Times\n\n{TIMES}\n\n{table}"


def _sums(rows: list[dict[str, Any]], steps: str) -> list[str]:
    by_clock = covered((began, wall) for row in rows for began, wall in row["spans"])
    in_rounds = math.fsum(row.get("rounds_seconds", 0) for row in rows)
    return [str(len(rows)), steps, duration(in_rounds), duration(by_clock)]


def _steps(rows: list[dict[str, Any]]) -> str:
    return count(math.fsum(row.get("steps", 0) * row.get("seeds", 0) for row in rows))
