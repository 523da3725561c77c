"""When a run is evaluated, on how many samples, and when it stops because its model no longer improves."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks
from .checks import warn
from .core import Problem
from .runs.metrics import is_better, metric, validation_metric

SMALL = 4_000  # samples, training and held out together, up to which every evaluation takes all of them
FEWEST = 2_000  # training samples of an estimate
GRADIENT = 2  # forward passes that cost as much as a gradient: 3 by operations, 2.3 measured for a small CNN
MOST = 100  # evaluations of a run, about, before the last one


class EvaluationPlan(NamedTuple):
    """A run is evaluated at the start, after every `every` rounds and at the end. `samples` is about the number of
    training samples of each evaluation but the last, which takes all of them; None if each of them does."""

    every: int
    samples: int | None


def plan_evaluations(
    problem: Problem, rounds: int, cohort: int, steps: Any, every: int | None, evaluate: str | int | None
) -> EvaluationPlan:
    """The plan for a run. `evaluate` is "all", a number of training samples, or None: evaluation then costs at most
    about a fifth of the run, as far as counted samples tell. Small data sets are always evaluated whole.

    The plan depends on numbers of samples only, not on measured times, so that a run can be repeated.
    """
    if isinstance(evaluate, bool) or not (evaluate in (None, "all") or isinstance(evaluate, int)):
        raise ValueError(f"train: evaluate must be 'all' or a number of training samples, got {evaluate!r}")
    default = max(1, rounds // MOST)
    counted = problem.evaluated()
    if isinstance(evaluate, int):
        checks.count("train", "evaluate", evaluate)
        if counted is None:
            raise ValueError(f"train: evaluate = {evaluate} needs samples, which a {type(problem).__name__} has not")
        return EvaluationPlan(every or default, evaluate if evaluate < counted.train else None)
    if evaluate == "all" or counted is None or counted.train + counted.others <= SMALL:
        return EvaluationPlan(every or default, None)
    # A quarter of the work in rounds is a fifth of all work. The last evaluation takes all samples.
    trained = rounds * cohort * (steps if isinstance(steps, int) else 1) * counted.batch
    left = GRADIENT * trained / 4 - counted.train - counted.others
    fewest = min(FEWEST, counted.train)
    if every is None:
        evaluations = max(1, min(-(-rounds // default), int(left / (fewest + counted.others))))
        every = max(default, -(-rounds // evaluations))
    samples = int(left / -(-rounds // every) - counted.others) // 100 * 100
    return EvaluationPlan(every, max(fewest, samples) if samples < counted.train else None)


def warn_of_few(plan: EvaluationPlan, rounds: int, patience: int | None) -> None:
    """Warn if a run is evaluated so seldom that its patience cannot act."""
    if patience is not None and rounds <= plan.every * patience:
        warn(
            f"patience = {patience} has no effect: the run of {rounds} rounds is evaluated every {plan.every} rounds; "
            "give a smaller every"
        )


class Patience:
    """Counts the evaluations without an improvement of a validation metric, for each seed.

    >>> patience = Patience(2, "validation_loss", "lower", 1)
    >>> [patience([{"validation_loss": loss}]) for loss in (1.0, 0.9, 0.95, 0.91)]
    [False, False, False, True]
    """

    def __init__(self, evaluations: int, name: str, better: Any, seeds: int):
        self.evaluations, self.name, self.better = evaluations, name, better
        self.best = torch.full((seeds,), math.nan, dtype=torch.float64)
        self.waited = torch.zeros(seeds, dtype=torch.int64)

    @classmethod
    def of(
        cls, evaluations: int | None, name: str | None, problem: Problem, seeds: int, state: Mapping[str, Tensor] | None
    ) -> "Patience | None":
        """The patience of a run, which resumes if `state` is given; None if the user asks for none."""
        if evaluations is None:
            if name is not None:
                raise ValueError(f"train: metric is for patience: give patience=5 as well, got metric={name!r}")
            return None
        checks.count("train", "patience", evaluations)
        keys = [f"validation_{own}" for own in problem.metric_names("validation")]
        if not keys:
            raise ValueError("train: patience needs validation samples: give the problem a share, validation=0.1")
        if name is not None and name not in keys:
            raise ValueError(
                f"train: metric must be a validation metric, got {name!r}; {checks.nearest(str(name), keys)}"
            )
        name = name or validation_metric(keys) or keys[0]
        patience = cls(evaluations, name, metric(name, problem.directions).better, seeds)
        if state is not None and "patience.best" in state:
            patience.best, patience.waited = (
                state["patience.best"].cpu().clone(),
                state["patience.waited"].cpu().clone(),
            )
        return patience

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Note the rows of an evaluation, one for each seed. Whether all seeds have stopped improving."""
        for i, row in enumerate(rows):
            value = row.get(self.name)
            value = math.nan if value is None else float(value)
            if self.waited[i] >= self.evaluations:
                continue  # this seed has stopped, and waits for the others
            if is_better(value, float(self.best[i]), self.better):
                self.best[i], self.waited[i] = value, 0
            else:
                self.waited[i] += 1
        return self.exhausted

    @property
    def exhausted(self) -> bool:
        return bool((self.waited >= self.evaluations).all())

    def reason(self, round: int) -> str:
        times = f"{self.evaluations} evaluation{'s' * (self.evaluations > 1)}"
        return f"stopped after round {round}, {self.name} has not improved in {times}"

    def state(self) -> dict[str, Tensor]:
        return {"patience.best": self.best.clone(), "patience.waited": self.waited.clone()}
