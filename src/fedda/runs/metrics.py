"""Which direction of a metric is better and how it is shown: one table for tables, reports, sweeps and stopping."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Better = Literal["higher", "lower", ""]

PARTS = ("train", "validation", "test", "best_test")  # metrics of these samples are named PART_NAME
# Of a name, or of its last word. A run with metrics of a user's own records their directions.
DIRECTIONS: dict[str, Better] = {
    **dict.fromkeys(("accuracy", "f1", "auc", "r2"), "higher"),
    **dict.fromkeys(("loss", "mae", "rmse", "perplexity", "error", "objective", "gap", "norm", "residual"), "lower"),
}
PERCENT = ("accuracy", "density", "nonzero")


@dataclass(frozen=True)
class ShownMetric:
    """How a metric is shown; `better` is empty if neither direction is better."""

    key: str
    name: str
    percent: bool
    better: Better


def metric(key: str, directions: Mapping[str, Any] | None = None) -> ShownMetric:
    """Describe a metric by its name; `directions` are those of a run's own metrics.

    >>> metric("test_accuracy")
    ShownMetric(key='test_accuracy', name='Test accuracy', percent=True, better='higher')
    >>> metric("validation_cost", {"cost": "lower"}).better
    'lower'
    """
    parts = key.replace("-", "_").split("_")
    own = (directions or {}).get(own_name(key))
    better: Better = DIRECTIONS.get(own_name(key), DIRECTIONS.get(parts[-1], ""))
    better = "lower" if "loss" in parts else better
    if own == "higher" or own == "lower":
        better = own
    return ShownMetric(key, " ".join(parts).capitalize(), parts[-1] in PERCENT, better)


def own_name(key: str) -> str:
    """The name of a metric without the part of the data.

    >>> own_name("validation_f1"), own_name("objective")
    ('f1', 'objective')
    """
    for part in PARTS:
        if key.startswith(f"{part}_"):
            return key[len(part) + 1 :]
    return key


def is_better(value: float, best: float, better: Better) -> bool:
    """Whether a value is strictly better than the best so far; NaN never is, and every number is better than NaN.

    >>> is_better(0.9, 0.8, "higher"), is_better(0.9, math.nan, "lower"), is_better(math.nan, 0.5, "lower")
    (True, True, False)
    """
    if math.isnan(value) or math.isnan(best):
        return not math.isnan(value)
    return value < best if better == "lower" else value > best


def validation_metric(keys: Collection[str]) -> str | None:
    """The metric by which models are chosen if the user names none: the validation accuracy, or the validation loss if
    there are no classes; None without validation samples.

    >>> validation_metric({"train_loss", "validation_loss"})
    'validation_loss'
    """
    return next((key for key in ("validation_accuracy", "validation_loss") if key in keys), None)
