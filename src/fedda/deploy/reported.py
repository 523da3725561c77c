"""The metrics that sites report about a model: their columns, their bounds, and what the server makes of the means.

A metric of samples travels as its mean over the samples of a site, and the mean over sites is that of a simulation. A
metric of a whole set, such as F1, cannot be averaged to that of all sites' samples together, which never meet. The
weighted mean of the sites' own values has a name of its own: `train_site_mean_f1`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..problems import Neural
from ..problems.evaluation import finished, means
from ..problems.metrics import OF_SEQUENCES, SHARE, Function, Metric, find_metrics
from .wire import Refused

Wanted = Mapping[str, Function] | Sequence[str] | None  # as in `fedda.problem(metrics=...)`
SET = "train_site_mean_"  # before the name of a metric that needs a whole set


def columns_of(names: Sequence[str]) -> tuple[str, ...]:
    """The columns that a site may report if a server has asked for the metrics with these names.

    >>> columns_of(["f1"])[-2:]
    ('train_f1', 'train_site_mean_f1')
    """
    known = dict.fromkeys([*OF_SEQUENCES, *names])
    return "train_loss", "train_accuracy", *(f"{start}{name}" for name in known for start in ("train_", SET))


@dataclass(frozen=True)
class ReportedMetrics:
    """What a server accepts: the loss, the accuracy, the metrics of sequences, and those that were given to it."""

    own: dict[str, Metric] = field(default_factory=dict)

    @classmethod
    def of(cls, metrics: Wanted) -> "ReportedMetrics":
        return cls(find_metrics(metrics))

    @property
    def names(self) -> list[str]:
        """The names of the metrics that every site must have."""
        return list(self.own)

    @property
    def columns(self) -> tuple[str, ...]:
        return columns_of(self.names)

    @property
    def metrics(self) -> dict[str, Metric]:
        return OF_SEQUENCES | self.own

    def check_columns(self, names: Sequence[Any]) -> None:
        """Refuse columns that were not asked for; a site may lack some of the others."""
        for name in names:
            if name not in self.columns:
                raise Refused(f"{str(name)[:40]!r} is not a metric that the server asked for")
        if list(names) != [name for name in self.columns if name in names] or "train_loss" not in names:
            raise Refused("the metrics must be a loss and others, each of them once")

    def check(self, column: str, value: float, limit: float) -> None:
        """Refuse a value that is not possible."""
        if not math.isfinite(value):
            raise Refused(f"{column} is not finite")
        low, high = self._bounds(column)
        if not low <= value <= high:
            raise Refused(f"{column} must be in [{low:g}, {high:g}], got {value:.3g}")
        if abs(value) > limit:
            raise Refused(f"{column} is {value:.3g}; the limit is {limit:.3g}")

    def _bounds(self, column: str) -> tuple[float, float]:
        if column == "train_accuracy":
            return SHARE
        metric = self.metrics.get(column.removeprefix(SET).removeprefix("train_"))
        return (-math.inf, math.inf) if metric is None else metric.bounds

    def row(self, pairs: dict[str, tuple[float, float]]) -> dict[str, Tensor]:
        """The columns of a row, from {column: (mean over sites, their weight)}. A column counts if sites with more than
        half of the weight have it: one site alone cannot add it."""
        most = max((weight for _, weight in pairs.values()), default=0.0)
        values = {
            name: torch.tensor(mean, dtype=torch.float64) for name, (mean, weight) in pairs.items() if 2 * weight > most
        }
        return finished(self.metrics, values)


def site_columns(own: Neural, x: Tensor, statistics: Tensor | None, names: Sequence[str]) -> dict[str, Tensor]:
    """The columns of a site, in their order: means over its samples, before `of_mean`, and metrics of its whole set. A
    metric of a set that has no value, such as the AUC of one class, is left out."""
    every = means(own.totals(x, torch.ones(1, dtype=torch.float64), statistics=statistics))
    for name in own.set_metrics:
        value = every.pop(f"train_{name}")
        if bool(value.isfinite()):
            every[f"{SET}{name}"] = value
    return {column: every[column] for column in columns_of(names) if column in every}


def refuse_missing(own: Mapping[str, Metric], names: Sequence[Any], owner: str) -> None:
    """Refuse to report metrics that this site, or this relay, does not have."""
    for name in names:
        if name not in own:
            raise Refused(
                f"it has no metric {str(name)[:40]!r}, which the server asks for: give it as {owner}(metrics=...)"
            )
