"""Pages besides those of the figures: tuning, and what the paper leaves open; and the table of times."""

import math
from collections.abc import Iterator
from typing import Any

from fedda.claims.compare import LOWER, SUPPORTED, better
from fedda.claims.runs import ALIASES, Source
from fedda.claims.values import MethodValues
from fedda.runs.formats import count, duration, plain

from .estimate import covered
from .parts import Part
from .results import Results
from .tables import cell, columns_of, folded, markdown

WITH_BATCHNORM = "paper-batchnorm"
SETTINGS = {"paper": "at the paper's values", WITH_BATCHNORM: "the same with BatchNorm", "tuned": "tuned"}
NOT_RUN = "not run"
BACK = "[All figures and verdicts](../reproduction.md)"
TUNING = """Every method got as many points, rounds and seeds as every other. The point that was best on validation
data was chosen: a fifth of the training samples, on which no client trains. This is a small sweep; the
[study](../study.md) is fairer.
- One rate was tuned, the one in the table, with 5 local steps. It is kept for 10 and 20 steps. With a penalty,
  gamma was tuned as well.
- The c of variance reduction is always the paper's. So alpha = min(1, c eta^2) moves with the rate; at 1 there is
  no variance reduction.
- "Edge" marks a chosen value that is the smallest or the largest that was tried. A value beyond it may be better.
- A sweep sees only its own rounds and seeds. It cannot see a method that gets worse later, or diverges with another
  seed."""
PILOTS = """The paper can be read in several ways ([deviations](../deviations.md)). These are short runs of the
possible readings; "ours" is the one that the presets take. A difference counts if a t test over the
seeds finds it at the level of 5 %."""
TIMES = """*In rounds*: the seconds that all runs spent in their rounds. *By the clock*: with captures, evaluations
and checkpoints; the time of processes that ran side by side is counted once, so the parts add up to
more than the total. Runs that several parts share are listed with the first part. Runs that were given
up are left out."""


def tuning(results: Results) -> str:
    """The sweeps: the points that every method tried, and the chosen one."""
    lines = ["# Tuning of the figures", "", BACK, "", TUNING]
    for name in results.plan.sweeps:
        sweep = results.sweeps.get(name)
        lines += ["", f"## {name}", ""]
        if sweep is None:
            lines.append(f"{NOT_RUN.capitalize()}.")
            continue
        size = f"{sweep['budget']} points each, {sweep['rounds']} rounds, seeds {', '.join(map(str, sweep['seeds']))}"
        metric = sweep["metric"].replace("_", " ")
        methods = {label: method["points"] for label, method in sweep["algorithms"].items()}
        rows = [_chosen(label, points) for label, points in methods.items()]
        lines += [f"{size}. Chosen by {metric}.", "", markdown(["method", "chosen", metric, "tried", ""], rows), ""]
        rows = [[label, _values(p), _outcome(p)] for label, points in methods.items() for p in points]
        lines.append(folded("All points", markdown(["method", "point", metric], rows)))
    return "\n".join(lines)


def _chosen(label: str, points: list[dict[str, Any]]) -> list[str]:
    best = next((point for point in points if point["best"]), None)
    if best is None:
        return [label, "none: every point diverged", "–", str(len(points)), ""]
    edge = "edge" if _on_edge(best["values"], points) else ""
    return [label, _values(best), _outcome(best), str(len(points)), edge]


def _values(point: dict[str, Any]) -> str:
    return ", ".join(f"{param} {plain(value)}" for param, value in point["values"].items())


def _outcome(point: dict[str, Any]) -> str:
    return str(point["note"].split(":")[0]) if point["value"] is None else plain(point["value"])


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
    lines = ["# What the paper leaves open", "", BACK, "", PILOTS]
    for name, pilot in results.plan.pilots.items():
        run = results.pilots.get(name)
        if run is None:
            lines += ["", f"## {pilot['question']}", "", f"{NOT_RUN.capitalize()}."]
            continue
        columns, ours = columns_of(run), pilot["ours"]
        rows = [[m.label, "ours" if _reading(m) in ours else "", *(cell(m, c) for c in columns)] for m in run.methods]
        table = markdown(["reading", "", *(c.replace("_", " ") for c in columns)], rows)
        size = f"`{pilot['experiment']}`, {run.rounds} rounds, {run.seeds} seeds."
        lines += ["", f"## {pilot['question']}", "", size, ""]
        lines += [f"- {line}" for _, _, line in findings(run, ours, pilot.get("metric", "train_loss"))]
        lines += ["", folded("All readings", table)]
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
                where = f"[pilot](open-questions.md) of {pilot_run.rounds} rounds on `{pilot['experiment']}`"
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


def times(results: Results) -> str:
    if not results.times:
        return f"{NOT_RUN.capitalize()}."
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
    return f"{TIMES}\n\n{table}"


def _sums(rows: list[dict[str, Any]], steps: str) -> list[str]:
    by_clock = covered((began, wall) for row in rows for began, wall in row["spans"])
    in_rounds = math.fsum(row.get("rounds_seconds", 0) for row in rows)
    return [str(len(rows)), steps, duration(in_rounds), duration(by_clock)]


def _steps(rows: list[dict[str, Any]]) -> str:
    return count(math.fsum(row.get("steps", 0) * row.get("seeds", 0) for row in rows))
