"""docs/choosing.md: which method to take for which task, from the kept results of the studies alone."""

import json
import math
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedda.claims.student import quantile
from fedda.report.style import pen_of

from .methods import ADAPTIVE
from .summary import TARGET, best

SEEDS = 5  # of a method that is finished
TASKS = {
    "cifar10-heterogeneous": "Images, clients that differ",
    "cifar10": "Images, clients that are alike",
    "shakespeare": "Text",
}
ABOUT = {  # the data; the network and the length
    "cifar10-heterogeneous": (
        "CIFAR-10, 10 clients, 80 % of a client's images are of one class",
        "the paper's CNN, 5 local steps, 4000 rounds",
    ),
    "cifar10": (
        "CIFAR-10, 10 clients with the same share of each class",
        "the paper's CNN, 5 local steps, 4000 rounds",
    ),
    "shakespeare": (
        "the next character of Shakespeare's plays, 10 of 99 speaking roles per round",
        "a transformer of two layers, 5 local steps, 600 rounds",
    ),
}
PICTURE = "images/choosing.png"


@dataclass(frozen=True)
class Method:
    """The kept records of one method on one task, and what the summary says about them."""

    name: str
    summary: dict[str, Any]
    records: list[dict[str, Any]]

    @property
    def finals(self) -> dict[int, dict[str, float]]:
        """The finals that did not diverge, by seed."""
        return {int(row["seed"]): row for row in self.summary["finals"]}

    @property
    def finished(self) -> bool:
        return len(self.finals) == SEEDS

    @property
    def test(self) -> float:
        return statistics.fmean(row["test"] for row in self.finals.values())

    @property
    def rounds(self) -> float:
        """To the target, the median over seeds."""
        return statistics.median(row["to_target"] for row in self.finals.values())

    @cached_property
    def bytes_per_round(self) -> float:
        """Up and down, of all clients together."""
        record = next(r for r in self.records if r["stage"] == "finals")
        return float(record["bytes_up"] + record["bytes_down"]) / record["rounds"]

    def against(self, other: "Method") -> tuple[float, float]:
        """The paired difference in test accuracy and half of its 95 % t interval."""
        pairs = [row["test"] - other.finals[seed]["test"] for seed, row in self.finals.items() if seed in other.finals]
        return statistics.fmean(pairs), quantile(0.05, len(pairs) - 1) * statistics.stdev(pairs) / math.sqrt(len(pairs))

    def by_rate(self) -> dict[float, float]:
        """The best validation score of the grid at each rate, relative to the best rate."""
        rate = ADAPTIVE.get(self.name, "lr")
        found: dict[float, float] = {}
        for record in self.records:
            if record["stage"] == "stage1" and record["rows"] and not record["diverged"]:
                value = record["point"][rate]
                found[value] = max(found.get(value, -math.inf), best(record)[1])
        top = max(found, key=lambda value: found[value])
        return {value / top: found[value] for value in sorted(found)}


def read_task(folder: Path) -> list[Method]:
    """The methods of a task, the best first; those without finals in the order of the summary."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    methods = []
    for name, own in summary.items():
        files = sorted(folder.glob(f"{name}-*.jsonl"))
        lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
        records = [record for record in map(json.loads, lines) if record["method"] == name]
        methods.append(Method(name, own, records))
    return sorted(methods, key=lambda m: -m.test if m.finals else math.inf)


@dataclass(frozen=True)
class Advice:
    """What to take: of the methods that are as good as the best, the one that sends the fewest bytes to the target."""

    take: Method
    equal: list[Method]  # not told apart from the best
    rival: Method  # the best of the others
    difference: tuple[float, float]  # of `take` and `rival`


def advise(methods: list[Method]) -> Advice:
    finished = [m for m in methods if m.finished]
    first, *others = finished
    equal = [first, *(m for m in others if sum(m.against(first)) >= 0)]
    take = min(equal, key=lambda m: (m.rounds * m.bytes_per_round, -m.test))
    rival = next(m for m in finished if m is not take)
    return Advice(take, [m for m in equal if m is not take], rival, take.against(rival))


# -- text --------------------------------------------------------------------------------------------------------------
PAGE = """\
# Which method should I take?

Find the row of your task. Every method was tuned with the same budget on validation data. It was then run on five new
partitions of the data, each with its own seed. Results against FedDA stand here like any other.

{advice}

{rest}
- **Sparse models, constraints, penalties**: FedDA, fedda-cv and FedDualAvg take any
  [proximal map](algorithms/README.md). If clients differ, only fedda-cv ends at the exact solution.
  [The L1 path on colon histology](../paper/fedda_paper/study/README.md#what-was-run) compares accuracy and sparsity.

![Test accuracy of the finals, and validation accuracy against the rate]({picture})

Left: test accuracy of each method at the checkpoint that is best on validation data, with the 95 % t interval of the
mean over five seeds; an open circle has fewer. Right: the best validation accuracy that each method reaches at a rate,
after a quarter of the rounds. A flat line means that the rate is easy to choose. If a line ends early on the right,
the next rate diverged or was not tried.

## How to read it

- *Take* is the method that sends the fewest bytes to {target:.0%} test accuracy among those that are as good as the
  best. *As good* means that the 95 % t interval of the paired difference to the best contains 0.
- *Sent* counts all clients, up and down.
- Methods of the SGD type were tuned over 9 rates, each constant and with a cosine schedule; the others over 6 rates and
  3 values of a second hyper-parameter. They were not offered the cosine, which both leaders on images use.
- The studies ran in bf16 on one GPU. [The rules, and what was not run](../paper/fedda_paper/study/README.md).

{details}
This page is made from `paper/results/study` by `fedda reproduce --docs`.
"""


def page(results: Path) -> str:
    """The text of docs/choosing.md."""
    tasks = {name: read_task(results / "study" / name) for name in TASKS}
    finished = {name: own for name, own in tasks.items() if any(m.finished for m in own)}
    advice = {name: advise(own) for name, own in finished.items()}
    target = f"{TARGET:.0%}"
    heads = ["your task", "take", "test accuracy", f"rounds to {target}", f"sent to {target}", "as good"]
    rest = first_try([own.take for own in advice.values()])
    rest += [unfinished(name, own) for name, own in tasks.items() if name not in finished]
    parts = [
        f"## {TASKS[name]}\n\n{'; '.join(ABOUT[name])}.\n\n" + "\n".join(details(own)) + "\n"
        for name, own in finished.items()
    ]
    return PAGE.format(
        advice="\n".join(table([*heads, "ahead of the next by"], [row(name, own) for name, own in advice.items()])),
        rest="\n".join(rest), picture=PICTURE, target=TARGET, details="\n".join(parts),
    )  # fmt: skip


def row(name: str, advice: Advice) -> list[str]:
    take, (mean, half) = advice.take, advice.difference
    return [
        f"**{TASKS[name]}** ({ABOUT[name][0]})", f"{link(take)}, {settings(take)}", accuracy(take),
        f"{take.rounds:,.0f}", sent(take), ", ".join(f"`{m.name}`" for m in advice.equal) or "none",
        f"{100 * mean:+.2f} ± {100 * half:.2f} points (`{advice.rival.name}`)",
    ]  # fmt: skip


def first_try(taken: list[Method]) -> list[str]:
    """A line if one method with the same hyper-parameters is the one to take on every finished task."""
    if len({(method.name, settings(method)) for method in taken}) > 1:
        return []
    first = taken[0]
    text = f"`{first.name}`, {settings(first)}. These values won on all {len(taken)} tasks of the table."
    return [f"- **A first try without tuning**: {text}"]


def unfinished(name: str, methods: list[Method]) -> str:
    """One line about a task whose finals were not run: the best points of stage 2 so far."""

    def loss(method: Method) -> float:
        late = [r for r in method.records if r["stage"] == "stage2" and r["rows"] and not r["diverged"]]
        return -max(best(record)[1] for record in late)

    seeds = {record["seed"] for method in methods for record in method.records if record["stage"] == "stage2"}
    values = ", ".join(f"`{m.name}` {loss(m):.3f}" for m in sorted(methods, key=loss)[:4])
    return (
        f"- **{TASKS[name]}** ({'; '.join(ABOUT[name])}): not decided, because the finals were not run.\n"
        f"  The smallest validation losses while tuning, with {len(seeds)} seed{'s' * (len(seeds) > 1)}: {values}.\n"
        '  FedDA\'s methods have a relative epsilon there (`eps_mode="relative"`).'
    )


def details(methods: list[Method]) -> list[str]:
    """All methods of a task, the best first."""
    first = next(m for m in methods if m.finished)
    target = f"{TARGET:.0%}"
    heads = ["method", "hyper-parameters", "test accuracy", "against the first", f"rounds to {target}",
             f"sent to {target}", "note"]  # fmt: skip
    lines = []
    for method in (m for m in methods if m.finals):
        mean, half = method.against(first) if method is not first and len(method.finals) > 1 else (0.0, 0.0)
        diverged = method.summary["diverged finals"]
        missing = SEEDS - len(method.finals) - diverged
        notes = [] if method.summary["interior"] else ["at an edge of its grid: a lower bound"]
        notes += [f"{diverged} of {SEEDS} diverged"] if diverged else []
        notes += [f"{missing} of {SEEDS} not run"] if missing else []
        lines.append([
            link(method), settings(method), accuracy(method),
            "" if method is first else f"{100 * mean:+.2f} ± {100 * half:.2f}",
            f"{method.rounds:,.0f}" if math.isfinite(method.rounds) else "not reached", sent(method), "; ".join(notes),
        ])  # fmt: skip
    return table(heads, lines)


def link(method: Method) -> str:
    return f"[`{method.name}`](algorithms/{method.name}.md)"


def settings(method: Method) -> str:
    point = {name: value for name, value in method.summary["chosen"].items() if value != "constant"}
    return ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{v} {k}" for k, v in point.items())


def sent(method: Method) -> str:
    return f"{method.rounds * method.bytes_per_round / 1e9:.1f} GB" if math.isfinite(method.rounds) else ""


def accuracy(method: Method) -> str:
    values = [100 * row["test"] for row in method.finals.values()]
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f} %"


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows)]


# -- picture -----------------------------------------------------------------------------------------------------------
def draw(results: Path, path: Path) -> None:
    """The picture of the page: a row for each finished task."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import PercentFormatter

    tasks = {name: read_task(results / "study" / name) for name in TASKS}
    tasks = {name: own for name, own in tasks.items() if any(m.finished for m in own)}
    figure, rows = plt.subplots(
        len(tasks), 2, figsize=(12, 4.2 * len(tasks)), squeeze=False, layout="constrained",
        gridspec_kw={"width_ratios": [1, 1.3]},
    )  # fmt: skip
    for (task, methods), (left, right) in zip(tasks.items(), rows, strict=True):
        shown = [m for m in methods if len(m.finals) > 1]
        for place, method in enumerate(reversed(shown)):
            colour, dash = pen_of(method.name)
            values = [r["test"] for r in method.finals.values()]
            half = quantile(0.05, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
            finished = "full" if method.finished else "none"
            left.errorbar(method.test, place, xerr=half, fmt="o", color=colour, capsize=3, fillstyle=finished)
            points = method.by_rate()
            right.plot(
                list(points), list(points.values()), color=colour, dashes=dash or (None, None), marker=".",
                label=method.name, linewidth=1.6,
            )  # fmt: skip
        left.set_yticks(range(len(shown)), [m.name for m in reversed(shown)])
        low = min(m.test for m in shown)
        left.set_xlim(low - 0.02, max(m.test for m in shown) + 0.02)
        left.set(title=TASKS[task], xlabel="test accuracy")
        right.set(
            title="How much the rate matters",
            xlabel="rate, relative to the best",
            ylabel="validation accuracy",
            xscale="log",
        )
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        left.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        right.set_xlim(0.008, 13)
        handles, labels = right.get_legend_handles_labels()
        right.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)
