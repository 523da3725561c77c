"""Tables of the page: values with their spread, and the rules that choose methods by them."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

from fedda.claims.compare import INCONCLUSIVE, LOWER, SPARSE, SUPPORTED, better
from fedda.claims.kinds import NEAR, a_round
from fedda.claims.runs import ALIASES, Source
from fedda.claims.values import ROUNDS, MethodValues, measure
from fedda.runs.curves import number
from fedda.runs.formats import count, size, spread
from fedda.runs.metrics import metric as metric_of
from fedda.runs.reading import RecordedRun

FALL = 0.02  # a note is written if the test accuracy falls by more, from its best round to the end
FOUR = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def folded(title: str, *body: str) -> str:
    """A part of a page that opens with a click, on GitHub and in the documentation site."""
    return "\n".join([f'<details markdown="1"><summary>{title}</summary>', "", "\n\n".join(body), "", "</details>"])


def cell(method: MethodValues, metric: str) -> str:
    """The mean over seeds and its standard deviation, of the last 5 % of the rounds."""
    if method.lost:
        first = ", the first" if " of " in method.lost else ""
        return f"{method.lost.split(' (')[0]}{first} after round {_last_finite(method, metric)}"
    value = method.values.get(metric)
    if value is None:
        return "–"
    std = value.se * math.sqrt(value.seeds) if value.seeds > 1 else None
    return spread(value.mean, std, metric_of(metric).percent)


def _last_finite(method: MethodValues, metric: str) -> int:
    """The last evaluated round at which every seed had a finite number."""
    rounds: dict[int, bool] = {}
    for row in method.rows:
        rounds[row["round"]] = rounds.get(row["round"], True) and math.isfinite(number(row.get(metric)))
    return max((r for r, finite in rounds.items() if finite), default=0)


def columns_of(run: Source) -> list[str]:
    """The metrics that a table of a run shows; sparsity only if there is any."""
    return [*FOUR, *(m for m in ("density", "nonzero") if m in run.run.metrics and has_penalty(run.run))]


def has_penalty(run: RecordedRun) -> bool:
    """Whether some method of a run has a penalty; without any, its sparsity says nothing."""
    return any(run.params(label).get("prox") for label in run.labels)


def final_values(run: Source) -> str:
    """The final values of every method; bold are the best of a column and those that cannot be told from it."""
    columns = columns_of(run)
    best = {metric: best_of(run.methods, metric) if len(run.methods) > 1 else None for metric in columns}
    targets = {method.target for method in run.methods} - {None}
    rows = []
    for method in run.methods:
        cells = [f"**{cell(method, m)}**" if as_good(method, best[m], m) else cell(method, m) for m in columns]
        cells += [rounds_to_target(method)] * len(targets)
        rows.append([name_with_notes(method, columns), *cells, str(method.seeds)])
    heads = [*(metric_of(m).name.lower() for m in columns), *(f"rounds to {100 * (t or 0):g} %" for t in targets)]
    return markdown(["method", *heads, "seeds"], rows)


def rounds_to_target(method: MethodValues) -> str:
    """The mean number of rounds until the test accuracy is at the target; of the seeds that reach it, if not all do."""
    value = method.values.get(ROUNDS)
    if value is None:
        return "–"
    there = [rounds for seed, rounds in value.by_seed.items() if seed not in value.open]
    of_all = f" ({len(there)} of {value.seeds} seeds)" if value.open else ""
    return f"{statistics.fmean(there):,.0f}{of_all}" if there else "not reached"


def survivors(run: Source) -> Iterator[str]:
    """If some seeds diverged, the values of the others: a note only, as success selected them."""
    for method in run.methods:
        rows = [row for row in method.rows if row["seed"] not in method.broken]
        if method.broken and rows:
            rest = measure(method.label, rows, method.rounds)
            values = f"test accuracy {cell(rest, 'test_accuracy')}, train loss {cell(rest, 'train_loss')}"
            yield f"- {method.label}: {rest.seeds} of its seeds did not diverge, with {values}."


def fallen(run: Source) -> Iterator[str]:
    """The methods whose test accuracy was far better before the end, and when."""
    for method in run.methods:
        end = method.values.get("test_accuracy")
        if end is None:
            continue
        curve = run.run.curves[method.label]["test_accuracy"]
        best = int(curve.mean.argmax())
        if curve.mean[best] - end.mean > FALL:
            peak = f"its test accuracy was {100 * curve.mean[best]:.1f} % at round {int(curve.round[best])}"
            yield f"- {method.label} falls back: {peak}, and ends at {100 * end.mean:.1f} %."


def worse(run: Source, before: Source) -> Iterator[str]:
    """The methods that end with a lower test accuracy than at the paper's values."""
    earlier = {m.label: m for m in before.methods}
    for method in run.methods:
        other = earlier.get(method.label)
        if other is None or "test_accuracy" not in other.values or "test_accuracy" not in method.values:
            continue
        if better(other, method, "test_accuracy") == SUPPORTED:
            both = f"{cell(other, 'test_accuracy')}, tuned {cell(method, 'test_accuracy')}"
            yield f"- {method.label} ends worse than at the paper's values: test accuracy {both}."


def name_with_notes(method: MethodValues, columns: Sequence[str] = ()) -> str:
    """A method's label, with what a reader of its numbers must know."""
    notes = ["constant predictor"] if method.constant else []
    if "density" in columns and not method.params.get("prox"):
        notes.append("no penalty")
    if method.unreduced:
        notes.append("alpha = 1: no variance reduction")
    return method.label + (f" ({', '.join(notes)})" if notes else "")


def best_of(methods: Sequence[MethodValues], metric: str) -> MethodValues | None:
    """The best method that is not a constant predictor; for a metric of sparsity, the best with zeros."""
    candidates = [m for m in methods if metric in m.values and not m.constant and (metric not in SPARSE or sparse(m))]
    sign = -1 if metric in LOWER else 1
    return max(candidates, key=lambda m: sign * m.values[metric].mean, default=None)


def sparse(method: MethodValues) -> bool:
    """Whether some weights are exactly zero."""
    return "nonzero" in method.values and method.values["nonzero"].mean < 1


def as_good(method: MethodValues, best: MethodValues | None, metric: str) -> bool:
    """Whether a method is the best, or a t test over seeds does not tell it from the best."""
    if best is None or metric not in method.values or method.constant:
        return False
    return method is best or better(best, method, metric) == INCONCLUSIVE


def recommended(runs: Sequence[Source]) -> tuple[str, str, str, str]:
    """For the runs of one problem: the best method in test accuracy, those as good, the recommended one, and why.

    A method is as good as the best if a t test over seeds does not tell them apart. Of these, the recommended one
    is the sparsest if some are sparse, else the one that sends the fewest bytes per round, then takes the fewest
    gradients.
    """
    methods: dict[str, MethodValues] = {}
    for run in runs:
        for method in run.methods:
            name = str(method.params.get("name", method.label))
            key = method.label if method.label.endswith("-l1") else ALIASES.get(name, name)
            steps = f" ({method.params.get('steps')})" if " (" in method.label else ""
            methods.setdefault(key + steps, method)
    table = {m.label: m for m in methods.values()}
    best = best_of(list(table.values()), "test_accuracy")
    if best is None:
        return "none trained", "–", "none", "every method diverged or predicts a constant"
    equal = [m for m in table.values() if as_good(m, best, "test_accuracy")]
    others = ", ".join(name_with_notes(m) for m in equal if m is not best) or "no other"
    method, why = recommend(equal)
    return f"{name_with_notes(best)}, {cell(best, 'test_accuracy')}", others, name_with_notes(method), why


def recommend(equal: Sequence[MethodValues]) -> tuple[MethodValues, str]:
    """The recommended one of methods that are as good as each other, and why."""
    if len(equal) == 1:
        return equal[0], "is alone"
    if with_zeros := [m for m in equal if sparse(m)]:
        method = min(with_zeros, key=lambda m: m.values["density"].mean)
        return method, f"is the sparsest of them, density {cell(method, 'density')}"
    least = min(map(_bytes_per_round, equal))
    near = [m for m in equal if math.isclose(_bytes_per_round(m), least, rel_tol=NEAR)]
    method = min(near, key=lambda m: (_gradients(m), -m.values["test_accuracy"].mean))
    why = f"sends the fewest bytes of them, {size(least)} a round"
    if len(near) > 1:
        why += f", and of those with as few takes the fewest gradients, {count(_gradients(method))}"
    return method, why


def _bytes_per_round(method: MethodValues) -> float:
    """Up and down, of all clients."""
    return math.fsum(a_round(method, metric) or 0.0 for metric in ("bytes_up", "bytes_down"))


def _gradients(method: MethodValues) -> float:
    """The gradients of all clients in all rounds."""
    return float(max(method.rows, key=lambda row: row["round"])["gradients"])
