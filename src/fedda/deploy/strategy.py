"""For those who have a Flower app already: a Strategy in place of Flower's, and a handler beside their own."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as Base
from torch import Tensor, nn

from ..checks import one_line
from ..problems.neural import Loss
from .checkpoint import Checkpoint
from .client import Site
from .server import Plan, serve
from .trained import filled, saved

COUNTS = ("round", "seed")  # of a row; the rest are metrics


class Strategy(Base):
    """An algorithm of ours as a Flower strategy: `Strategy(Net(), loss, "fedda-mvr", {"lr": 0.05}, clients=10)`.

    `start` takes and gives what Flower's own do. Inside, an algorithm may exchange more than models, and more than
    once a round, so the rounds are those of `serve`, with its checks, checkpoint and report in `out`; the hooks that
    Flower would call once a round are not used.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, algorithm: str = "fedavg", words: Mapping[str, Any] | None = None,
        test: tuple[Any, Any] | None = None, **plan: Any,
    ):  # fmt: skip
        self.model, self.loss, self.test = model, loss, test
        self.plan = Plan(algorithm=algorithm, words=json.dumps(dict(words or {})), **plan)

    def summary(self) -> None:
        print(f"fedda: {self.plan.table}, {self.plan.clients} clients, results in {self.plan.out}")

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600,
        train_config: ConfigRecord | None = None, evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:  # fmt: skip
        """All rounds, from these arrays (a state_dict) on."""
        if train_config or evaluate_config:
            warnings.warn("Strategy: no config is sent; hyper-parameters are the algorithm's own words", stacklevel=2)
        plan = replace(self.plan, rounds=num_rounds, timeout=float(timeout))
        first, result = self._begun(initial_arrays), Result()

        def judge(tau: int, arrays: ArrayRecord) -> None:
            found = evaluate_fn(tau, arrays) if evaluate_fn else None
            if found is not None:
                result.evaluate_metrics_serverapp[tau] = found

        def after(words: str) -> None:
            print(words)
            if evaluate_fn:
                state = saved(plan.out)
                judge(int(state["round"]), _arrays(first, state["server.x"]))

        self.summary()
        if not plan.resume:
            judge(0, initial_arrays)
        run = serve(grid, plan, lambda: copy.deepcopy(first), self.loss, self.test, after)
        result.arrays = _arrays(first, run.server.x)
        rows = Checkpoint(Path(plan.out)).rows
        for row in map(json.loads, rows.read_text().splitlines() if rows.exists() else ()):  # none with every = 0
            metrics: Any = {
                name: value for name, value in row.items() if name not in COUNTS and isinstance(value, int | float)
            }
            result.evaluate_metrics_clientapp[row["round"]] = MetricRecord(metrics)
        return result

    def _begun(self, arrays: ArrayRecord) -> nn.Module:
        made = copy.deepcopy(self.model)
        try:
            made.load_state_dict(arrays.to_torch_state_dict())
        except RuntimeError as why:
            raise ValueError(f"Strategy: initial_arrays must be a state_dict of the model: {one_line(why)}") from None
        return made

    def _unused(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("an exchange of fedda's is not one message a round: call start")

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _unused


def _arrays(model: nn.Module, x: Tensor) -> ArrayRecord:
    return ArrayRecord(filled(model, x).state_dict())


def join(app: ClientApp, load: Callable[[Context], Site]) -> ClientApp:
    """Let a ClientApp take part in a Strategy of ours; its own `train` and `evaluate` stay as they are."""

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return load(context).answer(message, context)

    return app
