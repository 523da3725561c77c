"""What the kept records of the study say about each method of a task, and which method to take."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from fedda.registry import algorithms, proxes
from fedda.runs.formats import size
from fedda.runs.student import quantile

from .methods import ADAMW, ADAPTIVE, first_rate
from .missing import AGAIN
from .records import lines
from .rules import mean
from .summary import best, out

NEAR = 0.05  # of accuracy, or of the loss: rates that lose less are good
SEEDS = 5  # of a method that is finished


@dataclass(frozen=True)
class StudyTask:
    """A task of the study in words: its kind, its data, its network and length."""

    kind: str
    data: str
    network: str
    short: str = ""  # its head in the overview
    varies: str = ""  # the task that it varies: its numbers stand in a table beside that one's, and nothing is taken


CNN = "the paper's CNN, 5 local steps, 4000 rounds"
DIGITS = "1,797 digits of 8x8 pixels, 10 clients"
PERCEPTRON = "a perceptron with 32 hidden units, 5 local steps"
TASKS = {
    "cifar10-heterogeneous": StudyTask(
        "Images, clients that differ",
        "CIFAR-10, 10 clients, 80 % of a client's images are of one class",
        CNN,
        "Images,\nclients differ",
    ),
    "cifar10": StudyTask(
        "Images, clients that are alike",
        "CIFAR-10, 10 clients with the same share of each class",
        CNN,
        "Images,\nclients alike",
    ),
    "cifar10-resnet": StudyTask(
        "Images, clients that differ, a residual network",
        "CIFAR-10, 10 clients, 80 % of a client's images are of one class, random crops and flips",
        "ResNet-8 with GroupNorm, 5 local steps, 4000 rounds",
        "Images,\nresidual network",
    ),
    "cifar10-rho95": StudyTask(
        "Images, clients with almost one class",
        "CIFAR-10, 10 clients, 95 % of a client's images are of one class",
        CNN,
        varies="cifar10-heterogeneous",
    ),
    "cifar10-rho50": StudyTask(
        "Images, clients that differ a little",
        "CIFAR-10, 10 clients, 50 % of a client's images are of one class",
        CNN,
        varies="cifar10-heterogeneous",
    ),
    "cifar10-heterogeneous-i20": StudyTask(
        "Images, clients that differ, long rounds",
        "CIFAR-10, 10 clients, 80 % of a client's images are of one class",
        "the paper's CNN, 20 local steps, 4000 rounds",
        varies="cifar10-heterogeneous",
    ),
    "digits-heterogeneous": StudyTask(
        "Small data, clients that differ",
        f"{DIGITS}, 80 % of a client's images are of one class",
        f"{PERCEPTRON}, 300 rounds, on a CPU in float32",
        "Small data,\nclients differ",
    ),
    "digits-alike": StudyTask(
        "Small data, clients that are alike",
        f"{DIGITS} with the same share of each class",
        f"{PERCEPTRON}, 300 rounds, on a CPU in float32",
        varies="digits-heterogeneous",
    ),
    "digits-rho50": StudyTask(
        "Small data, clients that differ a little",
        f"{DIGITS}, 50 % of a client's images are of one class",
        f"{PERCEPTRON}, 300 rounds, on a CPU in float32",
        varies="digits-heterogeneous",
    ),
    "digits-rho95": StudyTask(
        "Small data, clients with almost one class",
        f"{DIGITS}, 95 % of a client's images are of one class",
        f"{PERCEPTRON}, 300 rounds, on a CPU in float32",
        varies="digits-heterogeneous",
    ),
    "digits-heterogeneous-i20": StudyTask(
        "Small data, clients that differ, long rounds",
        f"{DIGITS}, 80 % of a client's images are of one class",
        "a perceptron with 32 hidden units, 20 local steps, 300 rounds, on a CPU in float32",
        varies="digits-heterogeneous",
    ),
    "digits-many": StudyTask(
        "Small data, few of many clients per round",
        "1,797 digits of 8x8 pixels, 5 of 50 clients per round, Dirichlet shares of the classes, alpha = 0.3",
        f"{PERCEPTRON}, 600 rounds, on a CPU in float32",
        "Small data,\nfew of many",
    ),
    "breast-cancer": StudyTask(
        "A small table",
        "569 tumours, 30 columns, 10 hospitals, Dirichlet shares of the classes, alpha = 0.5",
        "logistic regression, 5 local steps, 300 rounds, on a CPU in float32",
        "Table",
    ),
    **{
        f"digits-sparse-{percent}": StudyTask(
            f"A sparse model with at most {percent} % of the weights, clients that differ",
            f"{DIGITS}, 80 % of a client's images are of one class; L1",
            f"{PERCEPTRON}, 300 rounds, on a CPU in float32",
        )
        for percent in (10, 25, 50)
    },
    **{
        f"digits-{name}": StudyTask(
            f"{what}, clients that differ",
            f"{DIGITS}, 80 % of a client's images are of one class; {how}",
            f"{PERCEPTRON}, 300 rounds, on a CPU in float32",
        )
        for name, what, how in (
            ("nonnegative", "Weights that are not negative", "biases may be negative"),
            ("l1-ball", "Weights in an L1 ball", "radius 100"),
        )
    },
    "femnist-perceptron": StudyTask(
        "Handwriting, few of many writers, a perceptron",
        "FEMNIST, 20 of 400 writers per round",
        "a perceptron with 64 hidden units, 5 local steps, 400 rounds, on a CPU in float32",
        "Handwriting,\nperceptron",
    ),
    "femnist-tenth": StudyTask(
        "Handwriting, few of many writers", "FEMNIST, 50 of 500 writers per round", CNN, "Handwriting"
    ),
    "femnist-all": StudyTask(
        "Handwriting, all writers", "FEMNIST, all 500 writers per round", CNN, varies="femnist-tenth"
    ),
    "shakespeare": StudyTask(
        "Text, a transformer",
        "the next character of Shakespeare's plays, 10 of 99 speaking roles per round",
        "a transformer of two layers, 5 local steps, 600 rounds",
        "Text,\ntransformer",
    ),
    "shakespeare-gru": StudyTask(
        "Text, a small GRU",
        "the next character of Shakespeare's plays, 10 of 99 speaking roles per round",
        "a GRU with 16 units, 5 local steps, 120 rounds, on a CPU in float32",
        "Text,\nsmall GRU",
    ),
    "shakespeare-small": StudyTask(
        "Text, a small transformer",
        "the next character of Shakespeare's plays, 10 of 99 speaking roles per round",
        "a transformer with one layer of width 32, 5 local steps, 150 rounds, on a CPU in float32",
        "Text,\nsmall transformer",
    ),
    "shakespeare-lstm": StudyTask(
        "Text, an LSTM",
        "the next character of Shakespeare's plays, 10 of 99 speaking roles per round",
        "an LSTM, 5 local steps, 600 rounds",
        "Text,\nLSTM",
    ),
}


@dataclass(frozen=True)
class StudiedMethod:
    """The kept records of one method on one task, and what the summary says about them.

    Scores are accuracies or, on a task without classes, minus the losses: more is better.
    """

    name: str
    summary: dict[str, Any]
    records: list[dict[str, Any]]
    first: "StudiedMethod | None" = None  # the result of the first tuning, if that of the second counts

    @property
    def finals(self) -> dict[int, dict[str, float]]:
        """The finals that did not diverge, by seed."""
        return {int(row["seed"]): row for row in self.summary["finals"]}

    @property
    def finished(self) -> bool:
        return len(self.finals) == SEEDS

    @property
    def whole(self) -> bool:
        """Whether nothing is left to run: all finals were run, or every point of the grid diverged."""
        ended = len(self.finals) + self.summary["diverged finals"] == SEEDS
        return ended or 0 < self.summary["tried"] == self.summary["diverged"]

    @property
    def sparse(self) -> bool:
        """Whether the study limits the share of weights that are not 0."""
        return any("limit" in record for record in self.records)

    @property
    def proximal(self) -> bool:
        """Whether the study has a penalty or a constraint here, so that few methods take part."""
        return self.sparse or any("prox" in record["words"] for record in self.records)

    @property
    def call(self) -> str:
        """The call that makes it as the finals had it."""
        words = next(record["words"] for record in self.records if record["stage"] == "finals")
        return call(self.name, words | self.summary["chosen"])

    @property
    def test(self) -> float:
        """The mean test score."""
        return statistics.fmean(row["test"] for row in self.finals.values())

    @property
    def rounds(self) -> float:
        """To the target, the median over seeds."""
        return statistics.median(row["to_target"] for row in self.finals.values())

    @cached_property
    def bytes_per_round(self) -> float:
        """Up and down, of all clients together."""
        record = next(r for r in self.records if r["stage"] == "finals" and not r.get("diverged"))
        return float(record["bytes_up"] + record["bytes_down"]) / record["rounds"]

    def interval(self, where: str = "test") -> tuple[float, float]:
        """The mean score over seeds, at the best checkpoint ("test") or at the end ("end"), and its t interval."""
        return t_interval([row[where] for row in self.finals.values()])

    def mean(self, what: str) -> float:
        """Of a number of the finals, over seeds."""
        return statistics.fmean(row[what] for row in self.finals.values())

    def against(self, other: "StudiedMethod") -> tuple[float, float]:
        """The paired difference in test scores and its t interval."""
        return t_interval(
            [row["test"] - other.finals[s]["test"] for s, row in self.finals.items() if s in other.finals]
        )

    @property
    def rate(self) -> str:
        return ADAPTIVE.get(self.name, "lr")

    def by_rate(self) -> dict[float, float]:
        """The best validation score of the first tuning's grid at each rate, relative to the best rate."""
        scores: dict[float, float] = {}
        for record in (self.first or self).records:
            if record["stage"] == "stage1" and not out(record):
                value = record["point"][self.rate]
                scores[value] = max(scores.get(value, -math.inf), best(record)[1])
        top = max(scores, key=lambda value: scores[value])
        return {value / top: scores[value] for value in sorted(scores)}


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of the 95 % t interval of the mean.

    >>> mean, half = t_interval([1.0, 2.0, 3.0])
    >>> round(mean, 3), round(half, 3)  # 4.303 times 1 / sqrt(3)
    (2.0, 2.484)
    """
    if len(values) < 2:
        return statistics.fmean(values), math.inf
    return statistics.fmean(values), quantile(0.05, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def read_task(folder: Path) -> list[StudiedMethod]:
    """The methods of a task, the best first. If the second tuning is whole, the better one counts for each method."""
    first, second = read_tuning(folder), {m.name: m for m in read_second_tuning(folder)}
    if not {m.name for m in first if m.finals} <= {m.name for m in second.values() if m.whole}:
        return first
    return in_order([better(m, second[m.name]) if m.finals else m for m in first])


def read_second_tuning(folder: Path) -> list[StudiedMethod]:
    """The second tuning of a task, as far as it was run."""
    again = folder.with_name(folder.name + AGAIN)
    return read_tuning(again) if (again / "summary.json").is_file() else []


def better(first: StudiedMethod, second: StudiedMethod) -> StudiedMethod:
    """The tuning with the better mean on validation data; of equals the first."""
    one, other = (mean(m.summary["validation of chosen"]) for m in (first, second))
    return replace(second, first=first) if other > one else first


def in_order(methods: list[StudiedMethod]) -> list[StudiedMethod]:
    """The best first; those without finals last, as they are."""
    return sorted(methods, key=lambda m: -m.test if m.finals else math.inf)


def read_tuning(folder: Path) -> list[StudiedMethod]:
    """The methods of one folder of records."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    methods = []
    for name, own in summary.items():
        records = [record for record in map(json.loads, lines(folder, name)) if record["method"] == name]
        methods.append(StudiedMethod(name, own, records))
    return in_order(methods)


Tasks = dict[str, list[StudiedMethod]]


def read_tasks(results: Path) -> Tasks:
    """The methods of every task of the study."""
    folders = {name: results / "study" / name for name in TASKS}
    return {name: read_task(folder) for name, folder in folders.items() if (folder / "summary.json").is_file()}


def finished(tasks: Tasks) -> Tasks:
    """The tasks on which some method has all its finals."""
    return {name: own for name, own in tasks.items() if any(m.finished for m in own)}


def decided(tasks: Tasks) -> Tasks:
    """Of these, the tasks on which a method is taken."""
    return {name: own for name, own in finished(tasks).items() if not TASKS[name].varies}


@dataclass(frozen=True)
class Recommendation:
    """What to take: of the methods that are as good as the best, the one that sends the fewest bytes to the target."""

    take: StudiedMethod
    equal: list[StudiedMethod]  # the others that are as good as the best
    rival: StudiedMethod  # the best of the others
    difference: tuple[float, float]  # of `take` and `rival`, with its t interval

    @property
    def told_apart(self) -> bool:
        mean, half = self.difference
        return abs(mean) > half


def equally_good(methods: list[StudiedMethod]) -> list[StudiedMethod]:
    """The best of the finished methods, and those before the first one that is clearly worse; the best come first.

    So a method whose results vary much is not as good only because its interval is wide.
    """
    whole = [m for m in methods if m.finished]
    return list(takewhile(lambda m: m is whole[0] or sum(m.against(whole[0])) >= 0, whole))


def advise(methods: list[StudiedMethod]) -> Recommendation:
    """`methods` are sorted, the best first."""
    equal = equally_good(methods)
    take = min(equal, key=lambda m: (m.rounds * m.bytes_per_round, -m.test))
    rival = next(m for m in methods if m.finished and m is not take)
    return Recommendation(take, [m for m in equal if m is not take], rival, take.against(rival))


# -- in words ----------------------------------------------------------------------------------------------------------
def link(method: StudiedMethod, docs: str = "") -> str:
    return linked(method.name, docs)


def linked(name: str, docs: str = "") -> str:
    """The name of a method, with a link to its page."""
    return f"[`{name}`]({docs}algorithms/{'local-adapt' if name == ADAMW else name}.md)"


def settings(point: dict[str, Any]) -> str:
    """A point in words.

    >>> settings({"lr": 0.0316, "schedule": "cosine"}), settings({"lr": 0.1, "schedule": "constant"})
    ('lr 0.0316, cosine schedule', 'lr 0.1')
    """
    shown = {name: value for name, value in point.items() if value != "constant"}
    return ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{v} {k}" for k, v in shown.items())


def call(name: str, words: dict[str, Any]) -> str:
    """The call that makes a method with these words; those that are the defaults are left out, but for rates.

    >>> call("fedavgm", {"lr": 0.0316, "schedule": "cosine"}), call("fedcm", {"lr": 0.1, "momentum": 0.9})
    ('fedda.make("fedavgm", lr=fedda.schedules.cosine(0.0316))', 'fedda.make("fedcm", lr=0.1)')
    >>> call("stem", {"lr": 0.1, "alpha0": 0.3, "w": 1000.0})
    'fedda.make("stem", lr=0.1, w=1000.0, c=3000.0)'
    >>> call("fedda", {"lr": 0.3, "schedule": "cosine", "warmup": 0.05})
    'fedda.make("fedda")'
    >>> call("fedda", {"lr": 0.1, "schedule": "cosine", "warmup": 0.05})
    'fedda.make("fedda", lr=fedda.schedules.cosine(0.1, warmup=0.05))'
    """
    algorithm = "local-adapt" if name == ADAMW else name
    given = {word: value for word, value in words.items() if value != "constant"}
    if "alpha0" in given:
        given["c"] = float(f"{given.pop('alpha0') / first_rate(given['lr'], given['w']) ** 2:.4g}")
    falls, warmup = given.pop("schedule", "") == "cosine", given.pop("warmup", 0.0)
    penalty = {"prox": f"fedda.prox.L1({given.pop('gamma')!r})"} if "gamma" in given else {}
    if "prox" in given:
        table = dict(given.pop("prox"))
        kind = table.pop("kind")
        parts = ", ".join(f"{word}={value!r}" for word, value in table.items())
        penalty = {"prox": f"fedda.prox.{proxes.find(kind).build.__name__}({parts})"}
    defaults = algorithms.find(algorithm).defaults
    shown = {k: repr(v) for k, v in given.items() if k.endswith("lr") or k not in defaults or defaults[k] != v}
    shown |= penalty
    if falls:
        rate = ADAPTIVE.get(name, "lr")
        rises = {"warmup": warmup} if warmup else {}
        shown[rate] = f"fedda.schedules.cosine({given[rate]!r}{''.join(f', {k}={v!r}' for k, v in rises.items())})"
        if defaults.get(rate) == {"kind": "cosine", "start": given[rate]} | rises:
            del shown[rate]
    arguments = ", ".join([json.dumps(algorithm), *(f"{word}={value}" for word, value in shown.items())])
    return f"fedda.make({arguments})"


def score(mean: float, half: float | None = None) -> str:
    """An accuracy, or a loss if the score is negative, with half of its interval.

    >>> score(0.7536, 0.0066), score(-1.628)
    ('75.36 ± 0.66 %', '1.628')
    """
    if mean < 0:
        return f"{-mean:.3f}" + ("" if half is None else f" ± {half:.3f}")
    return f"{100 * mean:.2f}" + ("" if half is None else f" ± {100 * half:.2f}") + " %"


def difference(mean: float, half: float, loss: bool) -> str:
    """Of two scores: in points of accuracy, or in the loss.

    >>> difference(0.0004, 0.0043, loss=False), difference(0.012, 0.001, loss=True)
    ('+0.04 ± 0.43', '-0.012 ± 0.001')
    """
    return f"{-mean:+.3f} ± {half:.3f}" if loss else f"{100 * mean:+.2f} ± {100 * half:.2f}"


def target(value: float) -> str:
    """The target of a task: an accuracy, or a loss if it is negative.

    >>> target(0.7), target(-1.75)
    ('70 %', 'a loss of 1.75')
    """
    return f"a loss of {-value:g}" if value < 0 else f"{100 * value:.0f} %"


def sent(method: StudiedMethod) -> str:
    return size(method.rounds * method.bytes_per_round) if math.isfinite(method.rounds) else ""


def rounds(method: StudiedMethod) -> str:
    """How many rounds the target takes."""
    return f"{method.rounds:,.0f}" if math.isfinite(method.rounds) else "not reached"


def good_rates(method: StudiedMethod) -> str:
    """The factor between the largest and the smallest rate that are almost as good as the best one."""
    scores = method.by_rate()
    near = [rate for rate, score in scores.items() if score >= max(scores.values()) - NEAR]
    return f"× {max(near) / min(near):.0f}"
