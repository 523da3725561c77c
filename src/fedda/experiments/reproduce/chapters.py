"""Chapters of the page beside the figures: tuning, pilots, advice, times."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from fedda.report.format import count, duration, plain

from ..claims.compare import LOWER, SUPPORTED, compare
from ..claims.runs import Source
from ..claims.values import Method
from ..config import find
from .estimate import covered
from .results import Results, methods
from .tables import markdown, recommended, shown, value

SETTINGS = {"paper": "at the paper's values", "tuned": "tuned"}
NOT_RUN = "not run"
TUNING = """Every method has as many points, rounds and seeds as every other; the best is the best on a fifth of the
training samples that no client trains on. Rates alone are tuned (and gamma, where there is a penalty): FedDA's and
STEM's c stays the paper's. An edge of the grid is marked: beyond it nothing was tried."""
PILOTS = """Short runs of the possible readings ([deviations](deviations.md)); ours is the one that the presets
take. Compared by the verdict rule: a difference counts from two standard errors on."""
ADVICE = """By a rule, not by taste: of the methods whose test accuracy is not below the best one's by more than two
standard errors, the one that sends the fewest bytes (then, takes the fewest gradients); with a penalty, the
sparsest. Tuned values where they were run, else the paper's."""
TIMES = """`In rounds` are the seconds of all runs in their rounds; `by the clock` is with captures, evaluations and
checkpoints, and counts once what several processes did side by side. What parts share stands in the first that ran
it."""


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
    for i, point in enumerate(own["points"]):
        text = ", ".join(f"{word} {plain(v)}" for word, v in point["values"].items())
        came = point["note"].split(":")[0] if point["value"] is None else plain(point["value"])
        cells.append(f"{text}: {came}")
        if point["best"]:
            edge = len(point["values"]) == 1 and i in (0, len(own["points"]) - 1)
            chosen = f"**{text}**" + (" (edge)" if edge else "")
    return [label, "; ".join(cells), chosen]


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
            for m in methods(run)
        ]
        lines += ["", f"{data}.", "", markdown(["reading", "", *(c.replace("_", " ") for c in columns)], rows)]
        lines += ["", *(f"- {line}" for line in findings(run, asked["ours"], metric))]
    return "\n".join(lines)


def _reading(label: str) -> str:
    return label.partition(": ")[2]


def findings(run: Source, ours: list[str], metric: str) -> Iterator[str]:
    """Of each method: whether our reading is the best, as good as it, or worse."""
    by: dict[str, list[Method]] = {}
    for m in methods(run):
        by.setdefault(m.label.partition(": ")[0], []).append(m)
    for name, own in by.items():
        table = {m.label: m for m in own}
        us = next((m for m in own if _reading(m.label) in ours), None)
        alive = [m for m in own if metric in m.values]
        lost = [f"{_reading(m.label)} {m.lost.split(' (')[0]}" for m in own if m.lost]
        what, beside = metric.replace("_", " "), f" ({', '.join(lost)})" if lost else ""
        if us is None or not alive:
            yield f"{name}: nothing to compare{beside}."
            continue
        sign = -1 if metric in LOWER else 1
        ordered = sorted(alive, key=lambda m: -sign * m.values[metric].mean)
        best, second = ordered[0], (*ordered, None)[1]
        better = compare(table, best.label, us.label, metric).verdict
        if best is us and second and compare(table, us.label, second.label, metric).verdict != SUPPORTED:
            words = f"ours, {_reading(us.label)}, cannot be told from {_reading(second.label)}"
        elif best is us:
            words = f"ours, {_reading(us.label)}, has the best {what}"
        elif better == SUPPORTED:
            both = f"{value(best, metric)} against {value(us, metric)}"
            words = f"{_reading(best.label)} has a better {what} than ours, {_reading(us.label)}: {both}"
        else:
            words = f"ours, {_reading(us.label)}, cannot be told from the best, {_reading(best.label)}"
        yield f"{name}: {words}{beside}."


def advice(found: Results) -> str:
    """Which method when, by a rule."""
    problems: dict[str, dict[str, list[Source]]] = {}
    titles: dict[str, str] = {}
    for (setting, name), run in found.figures.items():
        config = run.run.config
        if any("group" in words for words in config["algorithms"].values()):
            continue  # an ablation of local steps is no choice between methods
        key = json.dumps([config["problem"], run.rounds], sort_keys=True)
        titles.setdefault(key, find(name).title)
        problems.setdefault(key, {}).setdefault(setting, []).append(run)
    rows = []
    for key, by in problems.items():
        setting = "tuned" if "tuned" in by else next(iter(by))
        rows.append([titles[key], SETTINGS.get(setting, setting), *recommended(by[setting])])
    heads = ["where", "values", "best test accuracy", "as good", "take", "because it"]
    return f"## Which method when\n\n{ADVICE}\n\n" + (markdown(heads, rows) if rows else f"{NOT_RUN.capitalize()}.")


def times(found: Results) -> str:
    lines = ["## Times", ""]
    if not found.times:
        return "\n".join([*lines, f"{NOT_RUN.capitalize()}."])
    lines += [TIMES, ""]
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in found.times:
        parts.setdefault(str(row["part"]), []).append(row)
    rows = [[name, *_sums(own)] for name, own in parts.items()]
    rows.append(["**all**", *_sums(found.times)])
    lines.append(markdown(["part", "runs", "local steps, all seeds", "in rounds", "by the clock"], rows))
    return "\n".join(lines)


def _sums(rows: list[dict[str, Any]]) -> list[str]:
    def total(*words: str) -> float:
        return math.fsum(math.prod(row.get(word, 0) for word in words) for row in rows)

    clock = covered((began, wall) for row in rows for began, wall in row["spans"])
    return [str(len(rows)), count(total("steps", "seeds")), duration(total("rounds_seconds")), duration(clock)]
