"""What a proposal is worth: trained beside the experiment's own values."""

from __future__ import annotations

from typing import Any

from ..algorithms.fedda import FedDA
from ..checks import one_of
from ..experiments.config import Experiment
from ..rules.estimators import Mvr
from ..run import Run
from .advice import Advice

METRICS = ("train_loss", "test_loss", "test_accuracy")


def analysed(experiment: Experiment, label: str | None = None) -> str:
    """The FedDA of an experiment that is asked about, or the first: the theorem has the MVR estimator only.

    >>> from fedda.experiments import find
    >>> analysed(find("digits"))
    'fedda-mvr'
    """
    made = {name: experiment.build(name) for name in experiment.algorithms}
    known = [name for name, own in made.items() if type(own) is FedDA and isinstance(own.estimator, Mvr)]
    if not known:
        words = "such as fedda-mvr: Theorem 1 is about no other"
        raise ValueError(f"theory: {experiment.name} holds no FedDA with the MVR estimator, {words}")
    if label is not None:
        one_of("theory", "--label", label, known)
    return label or known[0]


def trial(experiment: Experiment, algorithm: FedDA, advice: Advice, problem: Any) -> dict[str, dict[str, float]]:
    """Train both for the experiment's rounds: {who: {metric: mean over its seeds}} after the last."""
    results: dict[str, dict[str, float]] = {}
    for who, made in ((advice.own.who, algorithm), (advice.proposed.who, advice.algorithm(algorithm))):
        run = Run(
            made, problem, experiment.cohort, experiment.seeds, weights=experiment.weights, force=True,
            aggregation=experiment.wrappers(),
        )  # fmt: skip
        for _ in range(experiment.rounds):
            run.advance()
        ends = run.evaluate()
        names = [name for name in METRICS if name in ends[0]]
        results[who] = {name: sum(row[name] for row in ends) / len(ends) for name in names}
    return results
