"""Tables of the page: values with their spread, and what a rule makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from fedda.claims.compare import INCONCLUSIVE, LOWER, SPARSE, SUPPORTED, compare
from fedda.claims.runs import ALIASES, Source
from fedda.claims.steps import NEAR, a_round
from fedda.claims.values import MethodValues, measure
from fedda.report import style
from fedda.runs.curves import number
from fedda.runs.formats import count, size, spread

FALL = 0.02  # of test accuracy, from the best round to the end, is worth a word
FOUR = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table.

    >>> print(markdown(["a", "b"], [["1", "2"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def value(method: MethodValues, metric: str) -> str:
    """A mean over seeds with its standard deviation, of the last 5 % of the rounds."""
    if method.lost:
        first = " the first" if " of " in method.lost else ""
        return f"{method.lost.split(' (')[0]}{first and ','}{first} after round {_alive(method, metric)}"
    found = method.values.get(metric)
    if found is None:
        return "–"
    std = found.se * math.sqrt(found.seeds) if found.seeds > 1 else None
    return spread(found.mean, std, style.metric(metric).percent)


def _alive(method: MethodValues, metric: str) -> int:
    """The last evaluated round at which every seed had a finite number."""
    rounds: dict[int, bool] = {}
    for row in method.rows:
        rounds[row["round"]] = rounds.get(row["round"], True) and math.isfinite(number(row.get(metric)))
    return max((r for r, fine in rounds.items() if fine), default=0)


def shown(run: Source) -> list[str]:
    """The metrics of a run that a table shows: sparsity where there is any."""
    return [*FOUR, *(m for m in ("density", "nonzero") if m in run.run.metrics)]


def final(run: Source) -> str:
    """What every method of a run came to; in bold the best of each column and what cannot be told from it."""
    found, columns = run.methods, shown(run)
    table = {m.label: m for m in found}
    best = {m: best_of(found, m) if len(found) > 1 else None for m in columns}
    cell = {(m.label, c): value(m, c) for m in found for c in columns}
    cell |= {(m, c): f"**{text}**" for (m, c), text in cell.items() if as_good(table, table[m], best[c], c)}
    rows = [[known_as(m, columns), *(cell[m.label, c] for c in columns), str(m.seeds)] for m in found]
    return markdown(["method", *(style.metric(c).name.lower() for c in columns), "seeds"], rows)


def survivors(run: Source) -> Iterator[str]:
    """Where some seeds diverged, what the others came to: a word, no result, for they were chosen by their success."""
    for method in run.methods:
        rows = [row for row in method.rows if row["seed"] not in method.broken]
        if method.broken and rows:
            rest = measure(method.label, rows, method.rounds)
            values = f"test accuracy {value(rest, 'test_accuracy')}, train loss {value(rest, 'train_loss')}"
            yield f"- {method.label}: {rest.seeds} of its seeds did not diverge, with {values}."


def fallen(run: Source) -> Iterator[str]:
    """Who was far better on test samples before the end, and when."""
    for method in run.methods:
        end = method.values.get("test_accuracy")
        if end is None:
            continue
        curve = run.run.curves[method.label]["test_accuracy"]
        best = int(curve.mean.argmax())
        was, at = curve.mean[best], int(curve.round[best])
        if was - end.mean > FALL:
            then = f"its test accuracy was {100 * was:.1f} % at round {at}, and ends at {100 * end.mean:.1f} %"
            yield f"- {method.label} falls back: {then}."


def worse(run: Source, before: Source) -> Iterator[str]:
    """Who ends with a lower test accuracy than at the paper's values."""
    there = {m.label: m for m in before.methods}
    for method in run.methods:
        other = there.get(method.label)
        if other is None or "test_accuracy" not in other.values or "test_accuracy" not in method.values:
            continue
        table = {"before": other, "now": method}
        if compare(table, "before", "now", "test_accuracy").verdict == SUPPORTED:
            both = f"{value(other, 'test_accuracy')}, tuned {value(method, 'test_accuracy')}"
            yield f"- {method.label} ends worse than at the paper's values: test accuracy {both}."


def known_as(method: MethodValues, columns: Sequence[str] = ()) -> str:
    """A method with what a reader of its numbers must know."""
    notes = ["constant predictor"] if method.constant else []
    if "density" in columns and not method.words.get("prox"):
        notes.append("no penalty")
    if method.unreduced:
        notes.append("alpha = 1: no variance reduction")
    return method.label + (f" ({', '.join(notes)})" if notes else "")


def best_of(found: Sequence[MethodValues], metric: str) -> MethodValues | None:
    """The best of those that learned something; in sparsity, of those with zeros."""
    alive = [m for m in found if metric in m.values and not m.constant]
    if metric in SPARSE:
        alive = [m for m in alive if sparse(m)]
    sign = -1 if metric in LOWER else 1
    return max(alive, key=lambda m: sign * m.values[metric].mean, default=None)


def sparse(method: MethodValues) -> bool:
    """Whether some weights are exactly zero."""
    return "nonzero" in method.values and method.values["nonzero"].mean < 1


def recommended(runs: Sequence[Source]) -> tuple[str, str, str, str]:
    """Of the runs of one problem: the most accurate method on test samples, those as good, the one to take, and why.

    As good is what does not lose to the best by more than two standard errors. To be taken is the one of these that
    sends the fewest bytes a round, then takes the fewest gradients; where some of these are sparse, the sparsest.
    """
    found: dict[str, MethodValues] = {}
    for run in runs:
        for method in run.methods:
            name = str(method.words.get("name", method.label))
            key = method.label if method.label.endswith("-l1") else ALIASES.get(name, name)
            steps = method.words.get("steps")
            found.setdefault(f"{key} ({steps})" if " (" in method.label else key, method)
    table = {m.label: m for m in found.values()}
    best = best_of(list(table.values()), "test_accuracy")
    if best is None:
        return "none trained", "–", "none", "every method diverged or predicts a constant"
    equal = [m for m in table.values() if as_good(table, m, best, "test_accuracy")]
    others = ", ".join(known_as(m) for m in equal if m is not best) or "no other"
    chosen, why = _chosen(equal)
    return f"{known_as(best)}, {value(best, 'test_accuracy')}", others, known_as(chosen), why


def _chosen(equal: Sequence[MethodValues]) -> tuple[MethodValues, str]:
    """Of methods that are as good as each other the one to take, and why."""
    if len(equal) == 1:
        return equal[0], "is alone"
    if zeros := [m for m in equal if sparse(m)]:
        chosen = min(zeros, key=lambda m: m.values["density"].mean)
        return chosen, f"is the sparsest of them, density {value(chosen, 'density')}"
    least = min(map(_sent, equal))
    near = [m for m in equal if math.isclose(_sent(m), least, rel_tol=NEAR)]
    chosen = min(near, key=lambda m: (_gradients(m), -m.values["test_accuracy"].mean))
    why = f"sends the fewest bytes of them, {size(least)} a round"
    return chosen, why + (
        f", and of those with as few takes the fewest gradients, {count(_gradients(chosen))}" if len(near) > 1 else ""
    )


def as_good(table: dict[str, MethodValues], method: MethodValues, best: MethodValues | None, metric: str) -> bool:
    """Whether it is the best, or does not lose to the best by the verdict rule."""
    if best is None or metric not in method.values or method.constant:
        return False
    return method is best or compare(table, best.label, method.label, metric).verdict == INCONCLUSIVE


def _sent(method: MethodValues) -> float:
    """Bytes of a round, up and down, of all clients."""
    return math.fsum(a_round(method, metric) or 0.0 for metric in ("bytes_up", "bytes_down"))


def _gradients(method: MethodValues) -> float:
    """Taken to the end, by all clients."""
    return float(max(method.rows, key=lambda row: row["round"])["gradients"])
