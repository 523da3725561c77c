"""What a study came to: summary.json for programs, summary.md for people."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from fedda.runs.student import quantile

# The test accuracy that the rounds are counted to, or minus the test loss, by the beginning of the task's name; 70 % on
# all other tasks.
TARGETS = {
    "digits": 0.9, "breast-cancer": 0.95, "femnist-tenth": 0.8, "femnist-all": 0.8, "shakespeare": -1.75,
    "shakespeare-gru": -2.3, "shakespeare-small": -2.3,
}  # fmt: skip


def target_of(task: str) -> float:
    """The target of a task, by its name or the name of its file."""
    known = [name for name in TARGETS if Path(task).stem.startswith(name)]
    return TARGETS[max(known, key=len)] if known else 0.7


def within_limit(record: dict[str, Any]) -> list[list[Any]]:
    """The rows that count: if the study limits the share of weights that are not 0, those of models within it."""
    if "limit" not in record:
        return list(record["rows"])
    at = record["columns"].index("nonzero")
    return [row for row in record["rows"] if row[at] <= record["limit"]]


def out(record: dict[str, Any]) -> bool:
    """Whether a run diverged, or has no row that counts."""
    return bool(record["diverged"]) or not within_limit(record)


def scores(record: dict[str, Any], part: str, every_row: bool = False) -> dict[int, float]:
    """What a run is judged by on a part of the data, by round: the accuracy or, without classes, minus the loss."""
    columns = record["columns"]
    name, sign = (f"{part}_accuracy", 1) if f"{part}_accuracy" in columns else (f"{part}_loss", -1)
    return {row[0]: sign * row[columns.index(name)] for row in (record["rows"] if every_row else within_limit(record))}


def best(record: dict[str, Any], part: str = "validation") -> tuple[int, float]:
    """The round of the best score on validation data, the first of equals, and a score there."""
    by_round = scores(record, "validation")
    at = max(by_round, key=lambda number: (by_round[number], -number))
    return at, scores(record, part)[at]


def final(record: dict[str, Any]) -> dict[str, float]:
    """A final in numbers: at the checkpoint, at the end (the last 5 % of the rounds), and the rounds to the target."""
    found, every = scores(record, "test"), scores(record, "test", every_row=True)
    last = min(0.95 * record["rounds"], record["rows"][-1][0] - 1)  # one row at least
    late = [score for number, score in every.items() if number > last]
    reached = [number for number, score in found.items() if score >= target_of(record.get("task", ""))]
    return {
        "seed": record["seed"], "round": best(record)[0], "validation": best(record)[1],
        "test": best(record, "test")[1], "end": statistics.fmean(late),
        "to_target": reached[0] if reached else math.inf, **sparsity(record, last),
    }  # fmt: skip


def sparsity(record: dict[str, Any], last: float) -> dict[str, float]:
    """The share of weights that are not 0, at the checkpoint and at the end; nothing if it is not limited."""
    if "limit" not in record:
        return {}
    by_round = {row[0]: row[record["columns"].index("nonzero")] for row in record["rows"]}
    late = [share for number, share in by_round.items() if number > last]
    return {"nonzero": by_round[best(record)[0]], "nonzero_end": statistics.fmean(late)}


def summary(states: dict[str, Any], kept: dict[Any, dict[str, Any]], rounds: int) -> dict[str, str]:
    """The two files."""
    found = {name: of_method(name, now, kept) for name, now in states.items()}
    return {"summary.json": json.dumps(found, indent=1) + "\n", "summary.md": page(found, rounds)}


def of_method(name: str, now: Any, kept: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    records = [record for (method, *_), record in kept.items() if method == name]

    def tuned(stage: str, point: Any) -> list[float]:
        own = [r for r in records if r["stage"] == stage and r["point"] == point]
        return [best(r)[1] for r in own if not out(r)]

    finals = [r for r in records if r["stage"] == "finals" and r["point"] == now.chosen]
    return {
        "tried": len(now.tried),
        "diverged": sum(out(r) for r in records if r["stage"] == "stage1"),
        "best of stage 1": now.first, "validation in stage 1": tuned("stage1", now.first),
        "best of stage 2": now.second, "validation in stage 2": tuned("stage2", now.second),
        "interior": now.interior, "chosen": now.chosen, "validation of chosen": tuned("stage2", now.chosen),
        "diverged finals": sum(out(r) for r in finals),
        "finals": sorted((final(r) for r in finals if not out(r)), key=lambda row: row["seed"]),
    }  # fmt: skip


def page(found: dict[str, dict[str, Any]], rounds: int) -> str:
    """A table, the best method first."""
    heads = ["method", "best of stage 1", "validation", "chosen", "validation", "interior", "test at checkpoint",
             "at the end", "rounds to target", "against the first"]  # fmt: skip
    order = sorted(found, key=lambda name: -test(found[name]))
    first = found[order[0]]["finals"] if order else []
    unit = (
        "losses" if any(value < 0 for own in found.values() for value in own["validation in stage 1"]) else "in percent"
    )
    lines = [f"{rounds} rounds; {unit}; mean ± standard deviation over seeds with a partition each.", ""]
    lines += ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for name in order:
        own = found[name]
        finals = own["finals"]
        reached = [row["to_target"] for row in finals]
        cells = [
            name, words(own["best of stage 1"]), percent(own["validation in stage 1"]), words(own["chosen"]),
            percent(own["validation of chosen"]), {True: "yes", False: "no", None: ""}[own["interior"]],
            percent([row["test"] for row in finals]) + lost(own["diverged finals"]),
            percent([row["end"] for row in finals]),
            f"{statistics.median(reached):g}" if reached else "", against(finals, first),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def test(own: dict[str, Any]) -> float:
    return statistics.fmean(row["test"] for row in own["finals"]) if own["finals"] else -math.inf


def against(finals: list[dict[str, float]], first: list[dict[str, float]]) -> str:
    """The paired difference in test accuracy, or in the loss, with a 95 % t interval."""
    theirs = {row["seed"]: row["test"] for row in first}
    pairs = [row["test"] - theirs[row["seed"]] for row in finals if row["seed"] in theirs]
    if finals is first or len(pairs) < 2:
        return ""
    half = quantile(0.05, len(pairs) - 1) * statistics.stdev(pairs) / math.sqrt(len(pairs))
    if finals[0]["test"] < 0:
        return f"{-statistics.fmean(pairs):+.4f} ± {half:.4f}"
    return f"{100 * statistics.fmean(pairs):+.2f} ± {100 * half:.2f}"


def lost(diverged: int) -> str:
    return f" ({diverged} diverged)" if diverged else ""


def percent(values: list[float]) -> str:
    """A mean and a deviation in percent; scores below 0 are losses."""
    if not values:
        return ""
    if values[0] < 0:
        spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
        return f"{-statistics.fmean(values):.4f}{spread}"
    spread = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.2f}{spread}"


def words(point: dict[str, Any] | None) -> str:
    return ", ".join(f"{word} {value}" for word, value in point.items()) if point else ""
