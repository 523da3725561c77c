"""For an existing Flower app: a Strategy that replaces Flower's own."""

import copy
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as Base
from torch import nn

from ..checks import one_line, refuse_unknown
from ..problems.neural import Loss
from ..run import Run
from .checkpoint import ROWS
from .reported import Wanted
from .results import by_name, with_values
from .server import Plan, current_statistics, refuse_simulated, serve

COUNTS = ("round", "seed")  # in a row; the rest are metrics


class Strategy(Base):
    """An algorithm of fedda as a Flower strategy: `Strategy(Net(), loss, "fedda-mvr", {"lr": 0.05}, clients=10)`.

    `start` has the arguments and the result of Flower's strategies. An algorithm may exchange more than models, and
    more than once per round, so the rounds are those of `serve`, with its checks, checkpoint and report in `out`. The
    hooks that Flower would call once per round are not used.

    Args:
        model: the network.
        loss: a function of its output and the targets, a mean over the batch.
        algorithm: its name (`fedda list algorithms`).
        params: its hyper-parameters.
        test: the server's own test set (x, y).
        metrics: more metrics than the loss and the accuracy, as in `fedda.problem`: the sites must have the same names.
        trainable: the parameters to train, by a pattern such as "head.*"; the same as at the sites.
        plan: the settings of a run, as in an app's pyproject.toml: clients, cohort, batch, out, ...
    """

    def __init__(
        self, model: nn.Module, loss: Loss, algorithm: str = "fedavg", params: Mapping[str, Any] | None = None,
        test: tuple[Any, Any] | None = None, metrics: Wanted = None, trainable: str | Sequence[str] | None = None,
        **plan: Any,
    ):  # fmt: skip
        refuse_simulated(plan)
        refuse_unknown("Strategy", plan, {f.name for f in fields(Plan)} - {"algorithm", "params"})
        self.model, self.loss, self.test, self.metrics, self.trainable = model, loss, test, metrics, trainable
        self.plan = Plan(algorithm=algorithm, params=json.dumps(dict(params or {})), **plan)

    def summary(self) -> None:
        """Print what will be run."""
        print(f"fedda: {self.plan.table}, {self.plan.clients} clients, results in {self.plan.out}")

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600,
        train_config: ConfigRecord | None = None, evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:  # fmt: skip
        """Run all rounds.

        Args:
            grid: Flower's connection to the nodes.
            initial_arrays: the first model, a state_dict.
            num_rounds: how many.
            timeout: seconds to wait for the replies of a round.
            train_config: not used.
            evaluate_config: not used.
            evaluate_fn: a function of the round and the model to metrics, called after evaluations.
        """
        if train_config or evaluate_config:
            warnings.warn("Strategy: no config is sent; give hyper-parameters as params", stacklevel=2)
        plan = replace(self.plan, rounds=num_rounds, timeout=float(timeout))
        first, result = self._initial(initial_arrays), Result()

        def judge(tau: int, arrays: ArrayRecord) -> None:
            metrics = evaluate_fn(tau, arrays) if evaluate_fn else None
            if metrics is not None:
                result.evaluate_metrics_serverapp[tau] = metrics

        def after(run: Run) -> None:
            if evaluate_fn:
                judge(run.round, _arrays(first, run))

        self.summary()
        if not plan.resume:
            judge(0, initial_arrays)
        run = serve(
            grid, plan, lambda: first, self.loss, self.test, after_round=after, metrics=self.metrics,
            trainable=self.trainable,
        )  # fmt: skip
        result.arrays = _arrays(first, run)
        rows = Path(plan.out) / ROWS
        for row in map(json.loads, rows.read_text().splitlines() if rows.exists() else ()):  # no rows with every = 0
            metrics: Any = {
                name: value for name, value in row.items() if name not in COUNTS and isinstance(value, int | float)
            }
            result.evaluate_metrics_clientapp[row["round"]] = MetricRecord(metrics)
        return result

    def _initial(self, arrays: ArrayRecord) -> nn.Module:
        model = copy.deepcopy(self.model)
        try:
            model.load_state_dict(arrays.to_torch_state_dict())
        except RuntimeError as why:
            raise ValueError(f"Strategy: initial_arrays must be a state_dict of the model: {one_line(why)}") from None
        return model

    def _unused(self, *_: Any, **__: Any) -> NoReturn:
        """Not used: an algorithm may exchange more than one message per round. Call `start`."""
        raise NotImplementedError("fedda exchanges more than one message per round: call start")

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _unused


def _arrays(model: nn.Module, run: Run) -> ArrayRecord:
    values = by_name(run.problem.layout, run.server.x) | current_statistics(run)
    return ArrayRecord(with_values(model, values).state_dict())
