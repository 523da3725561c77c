"""The best model so far of each replica, by a metric of the validation samples. Checkpoints keep it too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .runs.metrics import is_better, metric, validation_metric

PREFIX = "best."  # of the names in a state
METRICS = f"{PREFIX}metrics."
NO_PERSONAL_BEST = "personal parameters are kept for the last round only, so there is no best model: take the last one"
MISSING = "there is no validation metric by which to choose the best model"


class BestModels:
    """One model, its round and its metrics for each replica; empty before the first evaluation.

    `chosen_by` is the metric that decides, by default the validation accuracy, or the validation loss if there are no
    classes; `directions` are those of a run's own metrics.

    >>> best = BestModels()
    >>> for round, loss in enumerate((2.0, 1.0, 3.0)):
    ...     best.update(torch.full((1, 1), float(round)), [{"round": round, "validation_loss": loss}])
    >>> best.rounds, best.x, best.metrics
    ([1], tensor([[1.]]), [{'validation_loss': 1.0}])
    """

    def __init__(self, state: Mapping[str, Tensor] | None = None, device: Any = None):
        self.chosen_by: str | None = None
        self.directions: Mapping[str, Any] = {}
        state = state or {}
        self.x = state[f"{PREFIX}x"].to(device) if f"{PREFIX}x" in state else None
        self.rounds: list[int] = state[f"{PREFIX}round"].reshape(-1).tolist() if self.x is not None else []
        columns = {
            name.removeprefix(METRICS): v.reshape(-1).tolist() for name, v in state.items() if name.startswith(METRICS)
        }
        self.metrics = [{name: column[i] for name, column in columns.items()} for i in range(len(self.rounds))]

    def update(self, x: Tensor, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep the models x [..., 1, d] whose rows are better than earlier ones; of two equal ones, the first."""
        key = self.chosen_by or validation_metric(rows[0])
        if key is None:
            return
        metrics = [{name: value for name, value in row.items() if isinstance(value, float)} for row in rows]
        if self.x is None:
            self.x, self.rounds, self.metrics = x.clone(), [row["round"] for row in rows], metrics
            return
        side = metric(key, self.directions).better
        better = [is_better(new[key], old[key], side) for new, old in zip(metrics, self.metrics, strict=True)]
        if not any(better):
            return
        choice = torch.tensor(better, device=x.device).view(*x.shape[:-2], 1, 1)
        self.x = torch.where(choice, x, self.x)
        for i in (i for i, one in enumerate(better) if one):
            self.rounds[i], self.metrics[i] = rows[i]["round"], metrics[i]

    def state(self) -> dict[str, Tensor]:
        """Everything as tensors with the axis of the replicas, if there is one, in front."""
        if self.x is None:
            return {}
        names = dict.fromkeys(name for one in self.metrics for name in one)
        columns = {f"{PREFIX}round": torch.tensor(self.rounds)}
        for name in names:
            values = [one.get(name, math.nan) for one in self.metrics]
            columns[METRICS + name] = torch.tensor(values, dtype=torch.float64)
        lead, device = self.x.shape[:-2], self.x.device
        return {f"{PREFIX}x": self.x} | {name: v.view(lead).to(device) for name, v in columns.items()}
