"""What is left of the whole study, and how long it takes by the times of what was run.

    python -m fedda_paper.study --missing

A piece is whole by itself; the first are the most useful ones. The times are those of the kept records: of the same
task, else of the task that is named, times the ratio of the arithmetic of a round. A program runs beside others, so the
sum of the programs' times is divided by the number of processes.
"""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedda.experiments import find
from fedda.runs.formats import duration
from fedda.runs.reading import kept as kept_file
from fedda.runs.reading import read_lines

from .methods import (
    FINALS,
    TUNING,
    StudyMethod,
    constrained_methods,
    methods,
    sparse_methods,
    tuned_further,
    untuned_methods,
    with_setting,
    with_steps,
)
from .protocol import KEPT, Records, State, read, stage_rounds, state
from .setting import CHOSEN_ON, UNTUNED, Reader, chosen_settings

TASKS = Path(__file__).parent / "tasks"
L1 = "colon-l1"
AGAIN = "-again"  # the end of the folder of a second tuning


@dataclass(frozen=True)
class Piece:
    """A study of one task: its folder in the results, and where the times of an untried task are taken from."""

    folder: str
    task: str  # a built-in experiment, or a file of `tasks`
    why: str
    steps: int | None = None  # local steps other than the tuned ones: the rate alone is tuned again
    again: bool = False  # six more points for each method: again the rate alone
    untuned: bool = False  # the same rates on every task, and nothing is chosen
    new: bool = False  # no tuning: every method has the setting that was chosen on other tasks
    like: str = "cifar10-heterogeneous"  # the task with known times
    limit: float = 1.0  # of the weights that are not 0: the methods are those that take a penalty
    prox: dict[str, Any] | None = None  # a constraint: the methods are those that take one
    cost: float = 1.0  # arithmetic of a round, as a multiple of that task's

    @property
    def source(self) -> str:
        own = TASKS / f"{self.task}.toml"
        return str(own) if own.is_file() else self.task

    @property
    def based_on(self) -> str:
        """The folder with the chosen values, for a piece that tunes the rate alone."""
        return self.task if self.rate_alone else self.folder

    @property
    def rate_alone(self) -> bool:
        return bool(self.steps or self.again)


# The tasks that are tuned a second time.
TUNED_TASKS = {
    "digits-heterogeneous": "digits, rho = 0.8",
    "digits-many": "digits, 5 of 50 clients per round",
    "digits-alike": "digits, rho = 0",
    "digits-rho50": "digits, rho = 0.5",
    "digits-rho95": "digits, rho = 0.95",
    "breast-cancer": "a table",
    "shakespeare-gru": "text, a small GRU",
    "femnist-perceptron": "writers, perceptron",
    "shakespeare-small": "text, a small transformer",
    "cifar10-heterogeneous": "images, rho = 0.8",
    "cifar10": "images, rho = 0",
}
# Tasks on which nothing is tuned; the task with known times, and the arithmetic of a round as a multiple of its own.
NEW_TASKS = (
    ("femnist-small", "writers, 20 of 400 per round, a small CNN", "femnist-perceptron", 3.0),
    ("colon-batchnorm", "colon histology, a small CNN with BatchNorm", "femnist-perceptron", 6.0),
    ("shakespeare-deep", "text, a small transformer of two layers", "shakespeare-small", 1.0),
    ("femnist-linear", "writers, 20 of 400 per round, a linear model", "femnist-perceptron", 1.0),
)
# Costs: a round of the kept figure on FEMNIST takes 1.4 times as long as one on CIFAR-10, and all writers are ten times
# as many. ResNet-8 has 0.9 times the multiply-adds of the CNN, but on the general path, which takes 2.1 times as long
# (as the CNN with BatchNorm). The LSTM has 1.2 times the weights of the transformer. 20 steps are four times 5.
PIECES = (
    Piece("shakespeare", "shakespeare", "text, transformer", like="shakespeare"),
    Piece("cifar10-heterogeneous", "cifar10-heterogeneous", "images, rho = 0.8"),
    Piece("cifar10", "cifar10", "images, rho = 0", like="cifar10"),
    Piece("digits-heterogeneous", "digits-heterogeneous", "digits, rho = 0.8", like="digits-heterogeneous"),
    Piece("digits-many", "digits-many", "digits, 5 of 50 clients per round", like="digits-heterogeneous", cost=0.5),
    Piece("digits-alike", "digits-alike", "digits, rho = 0", like="digits-heterogeneous"),
    Piece("digits-rho50", "digits-rho50", "digits, rho = 0.5", like="digits-heterogeneous"),
    Piece("digits-rho95", "digits-rho95", "digits, rho = 0.95", like="digits-heterogeneous"),
    Piece(
        "digits-heterogeneous-i20",
        "digits-heterogeneous",
        "digits, rho = 0.8, 20 local steps",
        20,
        like="digits-heterogeneous",
        cost=4.0,
    ),
    Piece(
        "femnist-perceptron",
        "femnist-perceptron",
        "writers, 20 of 400 per round, perceptron",
        like="digits-heterogeneous",
        cost=18.0,
    ),
    Piece("shakespeare-gru", "shakespeare-gru", "text, a small GRU", like="femnist-perceptron", cost=3.0),
    Piece("shakespeare-small", "shakespeare-small", "text, a small transformer", like="shakespeare-gru", cost=2.0),
    Piece("breast-cancer", "breast-cancer", "a table, logistic regression", like="digits-heterogeneous", cost=0.5),
    *(
        Piece(
            f"digits-sparse-{percent}",
            "digits-heterogeneous",
            f"digits, rho = 0.8, at most {percent} % of the weights",
            like="digits-heterogeneous",
            limit=percent / 100,
            cost=4.0,
        )
        for percent in (10, 25, 50)
    ),
    Piece(
        "digits-nonnegative",
        "digits-heterogeneous",
        "digits, rho = 0.8, no negative weights",
        like="digits-heterogeneous",
        prox={"kind": "nonnegative", "on": "*.weight"},
    ),
    Piece(
        "digits-l1-ball",
        "digits-heterogeneous",
        "digits, rho = 0.8, weights in an L1 ball",
        like="digits-heterogeneous",
        prox={"kind": "l1-ball", "radius": 100.0},
    ),
    *(
        Piece(f"{task}{AGAIN}", task, f"{what}, tuned again", again=True, like=task)
        for task, what in TUNED_TASKS.items()
    ),
    *(
        Piece(f"{task}{UNTUNED}", task, f"{what}, one setting for all tasks", untuned=True, like=like, cost=cost)
        for task, what, like, cost in (
            *((task, what, task, 1.0) for task, what in TUNED_TASKS.items() if task in CHOSEN_ON),
            ("cifar10-small", "images, rho = 0.8, a small CNN", "femnist-perceptron", 2.0),
        )
    ),
    *(
        Piece(task, task, f"{what}, one setting from other tasks", new=True, like=like, cost=cost)
        for task, what, like, cost in NEW_TASKS
    ),
    Piece("cifar10-resnet", "cifar10-resnet", "images, rho = 0.8, ResNet-8, augmentation", cost=1.9),
    Piece("femnist-tenth", "femnist-tenth", "writers, 10 % per round", cost=1.4),
    Piece("shakespeare-lstm", "shakespeare-lstm", "text, LSTM", like="shakespeare", cost=1.2),
    Piece("cifar10-rho95", "cifar10-rho95", "images, rho = 0.95"),
    Piece("cifar10-rho50", "cifar10-rho50", "images, rho = 0.5"),
    Piece("cifar10-heterogeneous-i20", "cifar10-heterogeneous", "images, rho = 0.8, 20 local steps", 20, cost=4.0),
    Piece("femnist-all", "femnist-all", "writers, all per round", cost=14.0),
)


@dataclass(frozen=True)
class Left:
    """Programs of a piece that were not run: how many, and their time."""

    programs: int
    seconds: float
    methods: tuple[str, ...]
    measured: bool  # on this task itself


def all_methods(piece: Piece, results: Path, reader: Reader = read) -> dict[str, StudyMethod]:
    """The methods that can do the task of a piece."""
    if piece.untuned:
        return untuned_methods(CHOSEN_ON[piece.task])
    if piece.new:
        return {each.method.name: with_setting(each.method, each.rate) for each in chosen_settings(results, reader)}
    if piece.prox:
        return constrained_methods(piece.prox)
    return sparse_methods(piece.limit) if piece.limit < 1 else methods(find(piece.source).name)


def methods_of(piece: Piece, results: Path, reader: Reader = read) -> dict[str, StudyMethod]:
    """The methods of a piece; if it tunes the rate alone, those whose values were chosen already."""
    experiment = find(piece.source)
    known = all_methods(piece, results, reader)
    if not piece.rate_alone:
        return known
    kept = reader(results / piece.based_on)
    chosen = {name: state(method, kept, experiment.rounds).chosen for name, method in known.items()}
    return {
        name: with_steps(known[name], point, piece.steps) if piece.steps else tuned_further(known[name], point)
        for name, point in chosen.items()
        if point is not None
    }


def programs_left(method: StudyMethod, now: State, kept: Records) -> Iterator[tuple[str, int]]:
    """The stage and the number of points of every program that is still to be run, if no grid is extended."""
    yield from ((job.stage, len(job.points)) for job in now.jobs)
    begun = now.jobs[0].stage if now.jobs and not method.once else ""
    if begun == "stage1":
        yield from (("stage2", KEPT + (method.paper is not None)) for _ in TUNING)
    if begun in ("stage1", "stage2"):
        tried = any(name == method.name and method.last in json.loads(point) for name, _, point, _ in kept)
        if method.last and not tried and not any(method.last in point for job in now.jobs for point in job.points):
            yield from (("stage2", 2) for _ in TUNING)
        yield from (("finals", 1) for _ in FINALS)


def rates_of(kept: Records) -> dict[str, float]:
    """Seconds per round of a program, by stage: the median over what was run; `seconds` is that of a whole program."""
    found: dict[str, list[float]] = {}
    for (_, stage, _, _), record in kept.items():
        if record["rows"] and not record["diverged"]:
            found.setdefault(stage, []).append(record["seconds"] / record["rounds"])
    return {stage: statistics.median(values) for stage, values in found.items()}


def left(piece: Piece, results: Path, reader: Reader = read) -> Left:
    """What is left of a piece."""
    kept, rounds = reader(results / piece.folder), find(piece.source).rounds
    own, like = rates_of(kept), rates_of(reader(results / piece.like))
    like = {"finals": like.get("stage2", 0.0)} | like  # a task without finals
    programs, seconds, names = 0, 0.0, []
    known = methods_of(piece, results, reader)
    if piece.new and not known:  # their settings are not known yet
        known = {name: with_setting(method, method.axes[0].values[0]) for name, method in untuned_methods().items()}
    for name, method in known.items():
        todo = list(programs_left(method, state(method, kept, rounds), kept))
        programs += len(todo)
        names += [name] if todo else []
        for stage, _ in todo:
            length = stage_rounds(method, stage, rounds)
            seconds += length * own.get(stage, piece.cost * like[stage])
    return Left(programs, seconds, tuple(names), bool(own) or not programs)


def l1_left(results: Path) -> list[str]:
    """The labels of the L1 path, `method gamma`, that were not run to their last round for every seed."""
    folder = results / L1
    experiment = find(str(folder / "config.toml"))
    done: dict[str, int] = {}
    for file in folder.glob("*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            record: dict[str, Any] = json.loads(line)
            if record["rows"] and record["rows"][-1][0] >= experiment.rounds:
                gamma = record["point"]["gamma"]
                done[f"{record['method']} {gamma:g}"] = done.get(f"{record['method']} {gamma:g}", 0) + 1
    labels = {label: f"{label.split()[0]} {float(label.split()[1]):g}" for label in experiment.algorithms}
    return [label for label, name in labels.items() if done.get(name, 0) < len(experiment.seeds)]


def l1_seconds(results: Path, labels: int) -> float | None:
    """The time of some labels of the L1 path, by the slowest method of the kept figure with the same network."""
    figure = results.parent / "paper-batchnorm" / "colon"
    if not figure.is_dir():
        return None
    rows = [row for _, _, row in read_lines(kept_file(figure, "timings.jsonl"))]
    rate = max(row["seconds"] / row["round"] for row in rows if row["round"])
    return labels * find(str(results / L1 / "config.toml")).rounds * float(rate)


def table(results: Path, workers: int) -> Iterator[list[str]]:
    """A row for each piece, and one for the L1 path."""
    reader = cache(read)
    for piece in PIECES:
        rest = left(piece, results, reader)
        by = "this task" if rest.measured else f"{piece.cost:g} x {piece.like}"
        everyone = len(rest.methods) >= len(all_methods(piece, results, reader))
        who = "all methods" if everyone else ", ".join(rest.methods)
        time = [duration(rest.seconds / workers), by] if rest.programs else ["", ""]
        yield [piece.folder, piece.why, str(rest.programs) if rest.programs else "complete", who, *time]
    if (results / L1 / "config.toml").is_file():
        labels = l1_left(results)
        seconds = l1_seconds(results, len(labels)) if labels else None
        time = ["", ""] if seconds is None else [duration(seconds / workers), "the figure on colon"]
        yield [L1, "L1 path (`fedda run`)", str(len(labels)) if labels else "complete", ", ".join(labels), *time]


HEADS = ["piece", "what", "programs left", "methods", "device time", "by the times of"]
