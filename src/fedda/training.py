"""A run from start to end. The loop is a generator: logging, checkpoints and early stopping are ordinary code in the
`for` that consumes it."""

import io
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from . import checks
from .arguments import TrainOptions, check_options
from .best import MISSING
from .core import Algorithm, Problem, map_fields
from .problems.exporting import write_model
from .problems.neural import Neural
from .problems.trained import trained_model, trained_state
from .rules.schedules import RateDecay
from .run import Run


def rounds(algorithm: Algorithm, problem: Problem, rounds: int, **options: Unpack[TrainOptions]) -> Iterator[Any]:
    """The server's state after each round.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0]], b=[[2.0]])
    >>> for server in fedda.rounds(fedda.make("fedavg", lr=0.5, steps=1), problem, rounds=2):
    ...     print(server.x)
    tensor([[1.]], dtype=torch.float64)
    tensor([[1.5000]], dtype=torch.float64)
    """
    checks.check("rounds", rounds=rounds)
    check_options(options)
    run = Run(for_rounds(algorithm, rounds), problem, **options)
    return (run.step() for _ in range(affordable(run, rounds)))


class History(list[dict[str, Any]]):
    """The rows of a run: round, seed, steps, gradients, bytes_up, bytes_down, seconds, metrics."""

    def to_pandas(self) -> Any:
        import pandas

        return pandas.DataFrame(self)


@dataclass(frozen=True)
class TrainedModel:
    """A model of a run, one for each seed."""

    x: Tensor  # the parameters, [d], or [replicas, d] for several seeds
    run: Run

    def model(self, seed: int | None = None) -> nn.Module:
        """The trained network as an nn.Module in eval mode. It takes samples as they were given to the problem: if the
        problem standardises them, so does the module. With several seeds, `seed` says which; the first by default."""
        return trained_model(*self._network(seed))

    def state_dict(self, seed: int | None = None) -> dict[str, Tensor]:
        """The state_dict of the user's own module, after training."""
        return trained_state(*self._network(seed))

    def _network(self, seed: int | None) -> tuple[Neural, Tensor, Tensor]:
        problem, seeds = self.run.problem, self.run.seeds
        if not isinstance(problem, Neural):
            raise ValueError(f"model: the problem has no network, it is a {type(problem).__name__}; take result.x")
        if seed is not None and seed not in seeds:
            raise ValueError(f"model: seed must be one of {', '.join(map(str, seeds))}, got {seed!r}")
        number = 0 if seed is None else seeds.index(seed)
        x = self.x[number] if self.x.dim() == 2 else self.x
        return problem, x, self.run.simulation.weights


@dataclass(frozen=True)
class Best(TrainedModel):
    """The best model of a run on the validation samples. With several seeds, each has its own best round."""

    round: int | list[int]  # one, or one for each seed, as the metrics
    metrics: dict[str, float] | list[dict[str, float]]

    def __repr__(self) -> str:
        return f"Best(round={self.round}, parameters={self.x.shape[-1]:,})"


@dataclass(frozen=True)
class Result(TrainedModel):
    """A trained model, the rows of its run, and the state from which the run can be resumed."""

    history: History
    server: Any

    def __repr__(self) -> str:
        last = self.history[-1] if self.history else {}
        metrics = ", ".join(f"{k}={v:.4g}" for k, v in last.items() if k.startswith(("train_", "validation_", "test_")))
        return f"Result(round={last.get('round')}, parameters={self.x.shape[-1]:,}, {metrics})"

    @property
    def state(self) -> dict[str, Tensor]:
        """Everything that the run needs to resume, for `train(..., state=...)`. With several processes, all of them
        must ask for it, and all get the same."""
        state, world = self.run.state(), self.run.world
        if world.size == 1:
            return {name: value.clone() for name, value in state.items()}
        content = io.BytesIO()  # the first rank has all of it
        torch.save(state, content)
        shared: dict[str, Tensor] = torch.load(io.BytesIO(world.share(content.getvalue())), map_location="cpu")
        return shared

    @property
    def best(self) -> Best:
        """The model that was best on the validation samples: by `validation_accuracy`, or by `validation_loss` if the
        targets are not classes. It is chosen among the rounds that were evaluated."""
        best = self.run.best
        if best.x is None:
            raise ValueError(f"best: {MISSING}; give the problem validation=0.1")
        one = not self.run.lead
        rounds, metrics = (best.rounds[0], best.metrics[0]) if one else (best.rounds, best.metrics)
        return Best(best.x.squeeze(-2).clone(), self.run, rounds, metrics)


def train(
    algorithm: Algorithm,
    problem: Problem,
    rounds: int,
    every: int | None = None,
    detail: bool = False,
    **options: Unpack[TrainOptions],
) -> Result:
    """Run for `rounds` rounds. The model is evaluated at the start, after every `every` rounds (by default about 100
    times in all) and at the end. `detail` adds the density of every layer and the gradient mapping.

    >>> import fedda
    >>> problem = fedda.load("digits", partition="dominant_class", rho=0.8)
    >>> result = fedda.train(fedda.make("fedavg", lr=0.1), problem, rounds=20, cohort=5, seed=0)
    >>> result.history[-1]["test_accuracy"] > 0.5
    True
    """
    checks.check("train", rounds=rounds)
    every = max(1, rounds // 100) if every is None else every
    checks.check("train", every=every)
    check_options(options)
    run = Run(for_rounds(algorithm, rounds), problem, **options)
    rounds = affordable(run, rounds)
    history = History(row | {"seconds": 0.0} for row in run.evaluate(detail))
    for seconds in timed(run, rounds, every):
        history.extend(row | {"seconds": seconds} for row in run.evaluate(detail))
    return Result(run.server.x.squeeze(-2), run, history, run.server)


def export(result: TrainedModel, path: str | Path, seed: int | None = None) -> Path:
    """Write the model of `result` or `result.best` to a file: .pt, .safetensors or .onnx. With several seeds, `seed`
    says which; the first by default."""
    return write_model(Path(path), *result._network(seed))


def for_rounds(algorithm: Algorithm, rounds: int) -> Algorithm:
    """The algorithm for a run of this length, on which its schedules may depend. `Run` refuses other objects."""
    if not isinstance(algorithm, Algorithm):
        return algorithm
    horizon = rounds * algorithm.steps  # the local steps of the run

    def bound(value: Any) -> Any:
        if isinstance(value, RateDecay) and value.horizon is None:
            return replace(value, horizon=horizon)
        return map_fields(value, bound)

    return map_fields(algorithm, bound)


def affordable(run: Run, rounds: int) -> int:
    """The last round that the privacy budget allows, with a warning if it is not the last of `rounds`."""
    last = run.last_round(rounds)
    if why := run.stop_reason(last, rounds):
        warnings.warn(f"train: {why}: the run ends there", stacklevel=3)
    return last


def timed(run: Run, rounds: int, every: int, seconds: float = 0.0) -> Iterator[float]:
    """Advance to `rounds`, with a pause for evaluation after every `every` rounds. It yields the seconds spent so far,
    without the pauses."""
    while run.round < rounds:
        began = time.perf_counter()
        run.advance()
        while run.round < rounds and run.round % every:
            run.advance()
        if run.problem.device.type == "cuda":
            torch.cuda.synchronize(run.problem.device)
        seconds += time.perf_counter() - began
        yield seconds
