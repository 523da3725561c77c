"""Chapters of the page beside the figures: tuning, pilots, advice, times."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from fedda.claims.compare import LOWER, SUPPORTED, compare
from fedda.claims.runs import ALIASES, Source
from fedda.claims.values import MethodValues
from fedda.experiments.config import find
from fedda.runs.formats import count, duration, plain

from .estimate import covered
from .parts import Part
from .results import Results, missing
from .tables import markdown, recommended, shown, value

SETTINGS = {"paper": "at the paper's values", "tuned": "tuned"}
NOT_RUN = "not run"
TUNING = """Every method has as many points, rounds and seeds as every other; the best is the best on a fifth of the
training samples that no client trains on. One rate is tuned, the one named, with 5 local steps; it is kept for 10 and
20. Where there is a penalty, so is gamma. The c of variance reduction stays the paper's, so alpha = min(1, c eta^2)
moves with the rate, up to 1, where no reduction is left. An edge of the grid is marked: beyond it nothing was tried.
A sweep sees its own rounds and seeds: what falls back or diverges later, or with another seed, it takes for good."""
PILOTS = """Short runs of the possible readings ([deviations](deviations.md)); ours is the one that the presets
take. Compared by the verdict rule: a difference counts from two standard errors on."""
ADVICE = """By a rule, not by taste: of the methods whose test accuracy is not below the best one's by more than two
standard errors, the one that sends the fewest bytes a round (of those with as few, the one that takes the fewest
gradients); where some are sparse, the sparsest. At the end of all rounds, by which many have passed their best. Tuned
values are better on the validation samples of the [sweep](#tuning), which need not hold at the end."""
TIMES = """`In rounds` are the seconds of all runs in their rounds; `by the clock` is with captures, evaluations and
checkpoints, and counts once what several processes did side by side: parts that went on at the same time add up to
more than all. What parts share stands in the first that ran it; runs that were given up, because a value was changed,
are left out."""


def tuning(found: Results) -> str:
    """The sweeps: what every method tried, and what it came to."""
    lines = ["## Tuning", "", TUNING]
    for name in found.plan.sweeps:
        sweep = found.sweeps.get(name)
        if sweep is None:
            lines += ["", f"**{name}**: {NOT_RUN}."]
            continue
        size = f"{sweep['budget']} points each, {sweep['rounds']} rounds, seeds {', '.join(map(str, sweep['seeds']))}"
        metric = sweep["metric"].replace("_", " ")
        lines += ["", f"**{name}**: {size}, {metric}.", ""]
        rows = [_searched(label, own) for label, own in sweep["algorithms"].items()]
        lines.append(markdown(["method", "points", "chosen"], rows))
    return "\n".join(lines)


def _searched(label: str, own: dict[str, Any]) -> list[str]:
    cells, chosen = [], "none: every point diverged"
    for point in own["points"]:
        text = ", ".join(f"{word} {plain(v)}" for word, v in point["values"].items())
        came = point["note"].split(":")[0] if point["value"] is None else plain(point["value"])
        cells.append(f"{text}: {came}")
        if point["best"]:
            chosen = f"**{text}**" + (" (edge)" if _on_edge(point["values"], own["points"]) else "")
    return [label, "; ".join(cells), chosen]


def _on_edge(values: dict[str, float], points: list[dict[str, Any]]) -> bool:
    """Whether some value is the least or the greatest that was tried of it.

    >>> _on_edge({"lr": 0.1, "gamma": 1.0}, [{"values": {"lr": v, "gamma": 1.0}} for v in (0.01, 0.1, 1.0)])
    False
    """
    tried = {word: {point["values"][word] for point in points} for word in values}
    return any(len(tried[word]) > 1 and v in (min(tried[word]), max(tried[word])) for word, v in values.items())


def edges(found: Results, part: Part, name: str) -> Iterator[str]:
    """Which methods of a tuned figure have values on an edge of what was tried."""
    sweep = found.sweeps.get(part.sweep)
    if sweep is None:
        return
    for label, own in found.plan.searched_as(part, found.plan.figure(part, name)).items():
        points = sweep["algorithms"][own]["points"]
        if any(point["best"] and _on_edge(point["values"], points) for point in points):
            yield label


def pilots(found: Results) -> str:
    lines = ["## What the paper leaves open", "", PILOTS]
    for name, asked in found.plan.pilots.items():
        run = found.pilots.get(name)
        lines += ["", f"**{asked['question']}**"]
        if run is None:
            lines[-1] += f" {NOT_RUN.capitalize()}."
            continue
        metric = asked.get("metric", "train_loss")
        data = f"`{asked['experiment']}`, {run.rounds} rounds, {run.seeds} seeds"
        columns = shown(run)
        rows = [
            [m.label, "ours" if _reading(m.label) in asked["ours"] else "", *(value(m, c) for c in columns)]
            for m in run.methods
        ]
        lines += ["", f"{data}.", "", markdown(["reading", "", *(c.replace("_", " ") for c in columns)], rows)]
        lines += ["", *(f"- {line}" for _, _, line in findings(run, asked["ours"], metric))]
    return "\n".join(lines)


def better_readings(found: Results, run: Source) -> Iterator[str]:
    """What the pilots on the same data say against the readings that a figure was run with."""
    there = {str(words["name"]) for words in run.run.config["algorithms"].values()}
    there |= {ALIASES.get(name, name) for name in there}
    for name, pilot in found.pilots.items():
        asked = found.plan.pilots[name]
        if pilot.data != run.data:
            continue
        for method, better, line in findings(pilot, asked["ours"], asked.get("metric", "train_loss")):
            if better and method in there:
                where = f"[pilot](#what-the-paper-leaves-open) of {pilot.rounds} rounds on `{asked['experiment']}`"
                yield f"- A {where} speaks against a reading: {line}"


def _reading(label: str) -> str:
    return label.partition(": ")[2]


def findings(run: Source, ours: list[str], metric: str) -> Iterator[tuple[str, bool, str]]:
    """Of each method: its name, whether another reading is better than ours, and that in words."""
    by: dict[str, list[MethodValues]] = {}
    for m in run.methods:
        by.setdefault(m.label.partition(": ")[0], []).append(m)
    for name, own in by.items():
        table = {m.label: m for m in own}
        us = next((m for m in own if _reading(m.label) in ours), None)
        empty = [m.label for m in own if m.constant]
        alive = [m for m in own if metric in m.values and not m.constant]
        # who is no better than a constant has learned no more than it
        alive = [m for m in alive if all(compare(table, m.label, e, metric).verdict == SUPPORTED for e in empty)]
        lost = [f"{_reading(m.label)} {m.lost.split(' (')[0]}" for m in own if m.lost]
        what, beside = metric.replace("_", " "), f" ({', '.join(lost)})" if lost else ""
        if us is None or not alive:
            yield name, False, f"{name}: no reading learns anything{beside}."
            continue
        sign = -1 if metric in LOWER else 1
        ordered = sorted(alive, key=lambda m: -sign * m.values[metric].mean)
        best, second = ordered[0], (*ordered, None)[1]
        worse = compare(table, best.label, us.label, metric).verdict == SUPPORTED
        if best is us and second and compare(table, us.label, second.label, metric).verdict != SUPPORTED:
            words = f"ours, {_reading(us.label)}, cannot be told from {_reading(second.label)}"
        elif best is us:
            words = f"ours, {_reading(us.label)}, has the best {what}"
        elif worse:
            both = f"{value(best, metric)} against {value(us, metric)}"
            words = f"{_reading(best.label)} has a better {what} than ours, {_reading(us.label)}: {both}"
        else:
            words = f"ours, {_reading(us.label)}, cannot be told from the best, {_reading(best.label)}"
        yield name, worse, f"{name}: {words}{beside}."


def advice(found: Results) -> str:
    """Which method when, by a rule."""
    problems: dict[str, dict[str, list[Source]]] = {}
    titles: dict[str, str] = {}
    absent: dict[tuple[str, str], list[str]] = {}
    for (setting, name), run in found.figures.items():
        config = run.run.config
        if any("group" in words for words in config["algorithms"].values()):
            continue  # an ablation of local steps is no choice between methods
        key = json.dumps([config["problem"], run.rounds], sort_keys=True)
        titles.setdefault(key, find(name).title)
        absent.setdefault((key, setting), []).extend(missing(name, run))
        problems.setdefault(key, {}).setdefault(setting, []).append(run)
    rows = []
    for key, by in problems.items():
        for setting, runs in by.items():
            gone = ", ".join(dict.fromkeys(absent[key, setting]))
            without = f" ({NOT_RUN}: {gone})" if gone else ""
            rows.append([titles[key] + without, SETTINGS.get(setting, setting), *recommended(runs)])
    heads = ["where", "values", "best test accuracy", "as good", "take", "because it"]
    return f"## Which method when\n\n{ADVICE}\n\n" + (markdown(heads, rows) if rows else f"{NOT_RUN.capitalize()}.")


def times(found: Results) -> str:
    lines = ["## Times", ""]
    if not found.times:
        return "\n".join([*lines, f"{NOT_RUN.capitalize()}."])
    lines += [TIMES, ""]
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in found.times:
        if row.get("done", True):
            parts.setdefault(str(row["part"]), []).append(row)
    rows = [[name, *_sums(own)] for name, own in parts.items()]
    begun = [row for row in found.times if not row.get("done", True)]
    if begun:
        rows.append([f"begun: {', '.join(dict.fromkeys(str(row['part']) for row in begun))}", *_sums(begun, "–")])
    rows.append(["**all**", *_sums(found.times, _steps([row for own in parts.values() for row in own]))])
    lines.append(markdown(["part", "runs", "local steps, all seeds", "in rounds", "by the clock"], rows))
    return "\n".join(lines)


def _sums(rows: list[dict[str, Any]], steps: str = "") -> list[str]:
    clock = covered((began, wall) for row in rows for began, wall in row["spans"])
    inside = math.fsum(row.get("rounds_seconds", 0) for row in rows)
    return [str(len(rows)), steps or _steps(rows), duration(inside), duration(clock)]


def _steps(rows: list[dict[str, Any]]) -> str:
    return count(math.fsum(row.get("steps", 0) * row.get("seeds", 0) for row in rows))
