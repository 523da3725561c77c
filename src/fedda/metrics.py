"""Metrics by their names: which direction is better, and which one chooses the best model of a run."""

import math
from collections.abc import Mapping
from typing import Any, Literal

Better = Literal["lower", "higher", ""]

LOWER = frozenset(("loss", "error", "gap", "norm", "objective", "residual", "perplexity", "mae", "mse", "rmse"))
HIGHER = frozenset(("accuracy", "precision", "recall", "f1", "auc", "r2"))
CHOOSING = ("validation_accuracy", "validation_loss")  # the first that a row has chooses the best model


def direction(metric: str) -> Better:
    """Which values of a metric are better, by the words in its name; empty if neither is.

    >>> direction("test_accuracy"), direction("validation_loss"), direction("density")
    ('higher', 'lower', '')
    """
    words = metric.replace("-", "_").split("_")
    if not LOWER.isdisjoint(words):
        return "lower"
    return "higher" if words[-1] in HIGHER else ""


def is_better(metric: str, value: float, than: float) -> bool:
    """Whether a value of a metric is better than another one. NaN is worse than any number.

    >>> is_better("validation_loss", 0.1, 0.2), is_better("validation_accuracy", 0.1, math.nan)
    (True, True)
    """
    if math.isnan(value) or math.isnan(than):
        return not math.isnan(value)
    return value < than if direction(metric) == "lower" else value > than


def choosing_metric(row: Mapping[str, Any]) -> str | None:
    """The metric by which the best model is chosen, from a row of a run; None without validation samples.

    >>> choosing_metric({"validation_loss": 0.3, "test_accuracy": 0.9})
    'validation_loss'
    """
    return next((metric for metric in CHOOSING if metric in row), None)
