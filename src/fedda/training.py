"""A run from start to end. The loop is a generator: logging, checkpoints and early stopping are ordinary code in the
`for` that consumes it."""

import io
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import checks
from .aggregation import Budget, Wrapper
from .arguments import with_hints
from .best import MISSING, NO_PERSONAL_BEST
from .checks import warn
from .clients import PERSONAL_ALREADY, FineTuning
from .core import Algorithm, Problem, map_fields
from .engines import Engine, Vectorised
from .engines.simulated import PERSONAL
from .evaluations import EvaluationPlan, plan_evaluations, warn_of_few
from .extras import needed_for
from .problems.exporting import write_model
from .problems.gradients.tuning import measured_threads, threads
from .problems.neural import Neural
from .problems.trained import trained_model, trained_state
from .rules.schedules import RateDecay
from .run import Run
from .track import Tracker


@with_hints
def rounds(
    algorithm: Algorithm,
    problem: Problem,
    rounds: int,
    *,
    cohort: float | None = None,
    seed: int | Sequence[int] = 0,
    x0: Tensor | Mapping[str, Tensor] | None = None,
    engine: str | Engine = "auto",
    device: Any = None,
    weights: str | None = None,
    sampling: str = "uniform",
    drop: float = 0.0,
    availability: Any = None,
    force: bool = False,
    aggregation: Sequence[Wrapper] = (),
    state: dict[str, Tensor] | None = None,
    budget: Mapping[str, Any] | Budget | None = None,
) -> Iterator[Any]:
    """The server's state after each round: an iterator, for loops of your own.

    With `state`, it begins with the round after that state.

    Args:
        algorithm: what `fedda.make` gives.
        problem: what `fedda.problem`, `fedda.load` or `fedda.Quadratic` gives.
        rounds: the last round, counted from the start of the run, also if it resumes.
        cohort: clients per round, a whole number or a share such as 0.1; all of them by default.
        seed: of the first model, cohorts, batches and random layers. Several seeds run as one program.
        x0: the first model: a flat vector, or a state_dict of the network.
        engine: "auto", "sequential", "vectorised", or an engine of `fedda.engines`.
        device: the device to which the problem is moved first, such as "cuda".
        weights: how replies are averaged: "uniform" (the default), or "samples" as in McMahan's FedAvg.
        sampling: "uniform", or "samples": a client with twice the samples is drawn twice as often.
        drop: the probability that a client's reply gets lost.
        availability: when clients can take part: a CSV file with the columns client, on, off, or such rows.
        force: run even if the first effective rate is far too large.
        aggregation: what is done to replies before they are averaged, in this order (`fedda.aggregation`).
        state: `result.state` of an earlier call. The run resumes, bit for bit.
        budget: {"epsilon": 8.0, "delta": 1e-5}: the run ends before this privacy loss is exceeded.

    Returns:
        An iterator of states; `server.x` is the model, [1, d], or [replicas, 1, d] for several seeds.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0]], b=[[2.0]])
    >>> for server in fedda.rounds(fedda.make("fedavg", lr=0.5, steps=1), problem, rounds=2):
    ...     print(server.x)
    tensor([[1.]], dtype=torch.float64)
    tensor([[1.5000]], dtype=torch.float64)
    """
    checks.check("rounds", rounds=rounds)
    run = Run(
        for_rounds(algorithm, problem, rounds), problem, cohort, seed, x0, engine, device, weights, force, state,
        aggregation, budget, sampling=sampling, drop=drop, availability=availability,
    )  # fmt: skip
    refuse_other_data(run, state)
    return (run.step() for _ in range(run.round, affordable(run, rounds)))


def data_of(run: Run) -> dict[str, Tensor]:
    """The hash of the data, as a part of a state."""
    return {"data": torch.frombuffer(bytearray.fromhex(run.problem.fingerprint or "00"), dtype=torch.uint8)}


def refuse_other_data(run: Run, state: Mapping[str, Tensor] | None) -> None:
    """Refuse a state of a run on other data; the first rank compares."""
    if state is None or "data" not in state or run.world.rank:
        return
    if not torch.equal(state["data"].cpu(), data_of(run)["data"]):
        raise ValueError("train: the state is of a run on other data; to start from its model, give x0=result.x")


class History(list[dict[str, Any]]):
    """The rows of a run: a list of dicts with round, seed, steps, gradients, bytes_up, bytes_down, seconds and metrics.

    Args:
        iterable: rows; none by default.
    """

    def to_pandas(self) -> Any:
        """The rows as a pandas.DataFrame, one column for each name."""
        with needed_for("to_pandas"):
            import pandas
        return pandas.DataFrame(self)


@dataclass(frozen=True)
class TrainedModel:
    """A model of a run, one for each seed.

    Args:
        x: the parameters, [d], or [replicas, d] for several seeds.
        run: the run.
    """

    x: Tensor  # the parameters, [d], or [replicas, d] for several seeds
    run: Run

    def model(self, seed: int | None = None, client: Any = None) -> nn.Module:
        """The trained network as an nn.Module in eval mode. It takes samples as they were given to the problem: if the
        problem standardises them, so does the module.

        Args:
            seed: the seed whose model is meant, if there are several; the first by default.
            client: the client whose personal parameters are meant, named as in `result.clients`; by default their mean
                over clients.
        """
        return trained_model(*self._network(seed, client))

    def state_dict(self, seed: int | None = None, client: Any = None) -> dict[str, Tensor]:
        """The state_dict of the user's own module, after training.

        Args:
            seed: the seed whose model is meant, if there are several; the first by default.
            client: the client whose personal parameters are meant, named as in `result.clients`; by default their mean
                over clients.
        """
        return trained_state(*self._network(seed, client))

    def _network(self, seed: int | None, client: Any) -> tuple[Neural, Tensor, Tensor, int | None]:
        """The problem, the parameters, the weights of the clients, and the number of the client."""
        problem, seeds = self.run.problem, self.run.seeds
        if not isinstance(problem, Neural):
            raise ValueError(f"model: the problem has no network, it is a {type(problem).__name__}; take result.x")
        if seed is not None and seed not in seeds:
            raise ValueError(f"model: seed must be one of {', '.join(map(str, seeds))}, got {seed!r}")
        replica = 0 if seed is None else seeds.index(seed)
        x = self.x[replica] if self.x.dim() == 2 else self.x
        if problem.personal:
            kept = self.run.simulation.memory[PERSONAL]
            kept = self.run.world.gather(kept, kept.dim() - 2)
            problem = problem.personalised(kept[replica] if kept.dim() == 3 else kept)
        number = None if client is None else problem.number_of(client)
        return problem, x, self.run.simulation.objective, number


@dataclass(frozen=True)
class Best(TrainedModel):
    """The best model of a run on the validation samples. With several seeds, each has its own best round."""

    round: int | list[int]  # one, or one for each seed, as the metrics
    metrics: dict[str, float] | list[dict[str, float]]

    def __repr__(self) -> str:
        return f"Best(round={self.round}, parameters={self.x.shape[-1]:,})"


@dataclass(frozen=True)
class Result(TrainedModel):
    """A trained model, the rows of its run, and the state from which the run can be resumed. `train` makes it.

    Args:
        x: the parameters, [d], or [replicas, d] for several seeds.
        run: the run.
        history: the rows of all evaluations.
        server: the last state of the server.
        stopped: why the run ended before its last round; empty if it did not.
        fine_tuning: what `personalise` asked for.
    """

    history: History
    server: Any
    stopped: str = ""  # why the run ended before its last round; empty if it did not
    fine_tuning: FineTuning | None = None

    def __repr__(self) -> str:
        rows = self.history[-len(self.run.seeds) :]
        names = [k for k in rows[0] if k.startswith(("train_", "validation_", "test_")) and k != "train_samples"]
        means = ", ".join(f"{name}={sum(row[name] for row in rows) / len(rows):.4g}" for name in names)
        seeds = f", means of {len(rows)} seeds" if len(rows) > 1 else ""
        return f"Result(round={rows[0]['round']}, parameters={self.x.shape[-1]:,}{seeds}, {means})"

    @property
    def state(self) -> dict[str, Tensor]:
        """Everything that the run needs to resume, for `train(..., state=...)`. With several processes, all of them
        must ask for it, and all get the same."""
        state, world = self.run.state() | data_of(self.run), self.run.world
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
        if self.run.problem.d_personal:
            raise ValueError(f"best: {NO_PERSONAL_BEST}")
        if best.x is None:
            raise ValueError(f"best: {MISSING}; give the problem validation=0.1")
        one = not self.run.lead
        rounds, metrics = (best.rounds[0], best.metrics[0]) if one else (best.rounds, best.metrics)
        return Best(best.x.squeeze(-2).clone(), self.run, rounds, metrics)

    @cached_property
    def clients(self) -> History:
        """One row for each client and seed: the metrics of the final model on the client's own samples, and with
        `personalise` also those after local steps from it (`tuned_...`)."""
        with threads(threads_of(self.run)):
            return History(self.run.client_rows(self.fine_tuning))


@with_hints
def train(
    algorithm: Algorithm,
    problem: Problem,
    rounds: int,
    every: int | None = None,
    detail: bool = False,
    evaluate: str | int | None = None,
    on_evaluation: Callable[[list[dict[str, Any]]], Any] | None = None,
    patience: int | None = None,
    metric: str | None = None,
    progress: bool = False,
    track: Tracker | Sequence[Tracker] = (),
    personalise: str | None = None,
    *,
    cohort: float | None = None,
    seed: int | Sequence[int] = 0,
    x0: Tensor | Mapping[str, Tensor] | None = None,
    engine: str | Engine = "auto",
    device: Any = None,
    weights: str | None = None,
    sampling: str = "uniform",
    drop: float = 0.0,
    availability: Any = None,
    force: bool = False,
    aggregation: Sequence[Wrapper] = (),
    state: dict[str, Tensor] | None = None,
    budget: Mapping[str, Any] | Budget | None = None,
) -> Result:
    """Train a problem by an algorithm. The model is evaluated at the start, on the way, and at the end.

    Args:
        algorithm: what `fedda.make` gives.
        problem: what `fedda.problem`, `fedda.load` or `fedda.Quadratic` gives.
        rounds: the last round, counted from the start of the run, also if it resumes.
        every: evaluate after every so many rounds. By default evaluation costs at most about a fifth of the work, with
            about 100 evaluations of small data and fewer of large test sets.
        detail: add the density of every layer and the gradient mapping to the rows.
        evaluate: "all", or about how many training samples an evaluation takes. By default all of up to 4,000; of more,
            a fixed random subset (`train_samples` in the rows says how many). The last evaluation takes all samples.
        on_evaluation: a function of the rows of an evaluation, one for each seed. The run stops if it returns True.
        patience: stop after so many evaluations without an improvement on validation samples. With several seeds, the
            run stops when each of them has come to that point.
        metric: what must improve for `patience`, and which model is `result.best`: the validation accuracy by default,
            or the validation loss if there are no classes.
        progress: show the rounds on stderr.
        track: one tracker, or several: they get every row (`fedda.track`).
        personalise: "fine-tune 5" or "fine-tune 5 lr 0.1": `result.clients` also has metrics after local steps.
        cohort: clients per round, a whole number or a share such as 0.1; all of them by default.
        seed: of the first model, cohorts, batches and random layers. Several seeds run as one program.
        x0: the first model: a flat vector, or a state_dict of the network.
        engine: "auto", "sequential", "vectorised", or an engine of `fedda.engines`.
        device: the device to which the problem is moved first, such as "cuda".
        weights: how replies are averaged: "uniform" (the default), or "samples" as in McMahan's FedAvg.
        sampling: "uniform", or "samples": a client with twice the samples is drawn twice as often.
        drop: the probability that a client's reply gets lost.
        availability: when clients can take part: a CSV file with the columns client, on, off, or such rows.
        force: run even if the first effective rate is far too large.
        aggregation: what is done to replies before they are averaged, in this order (`fedda.aggregation`).
        state: `result.state` of an earlier call. The run resumes, bit for bit.
        budget: {"epsilon": 8.0, "delta": 1e-5}: the run ends before this privacy loss is exceeded.

    >>> import fedda
    >>> problem = fedda.load("digits", partition="dominant_class", rho=0.8)
    >>> result = fedda.train(fedda.make("fedavg", lr=0.1), problem, rounds=20, cohort=5, seed=0)
    >>> result.history[-1]["test_accuracy"] > 0.5
    True
    """
    checks.check("train", rounds=rounds)
    if every is not None:
        checks.check("train", every=every)
    if on_evaluation is not None and not callable(on_evaluation):
        raise ValueError(f"train: on_evaluation must be a function of rows, got {on_evaluation!r}")
    if not isinstance(problem, Problem):
        raise ValueError(
            f"train: the problem must be one of fedda.problem or fedda.load, got a {type(problem).__name__}"
        )
    fine_tuning = FineTuning.of(personalise)
    if fine_tuning is not None and problem.d_personal:
        raise ValueError(PERSONAL_ALREADY)
    run = Run(
        for_rounds(algorithm, problem, rounds), problem, cohort, seed, x0, engine, device, weights, force, state,
        aggregation, budget, sampling=sampling, drop=drop, availability=availability,
    )  # fmt: skip
    if state is not None and rounds <= run.round:
        raise ValueError(
            f"train: the state is after round {run.round}, and rounds counts from the start of the run: give more than "
            f"{run.round}, got {rounds}"
        )
    refuse_other_data(run, state)
    rounds = affordable(run, rounds)
    plan = plan_evaluations(run.problem, rounds, run.cohort, run.algorithm.steps, every, evaluate)
    run.set_patience(patience, metric, len(run.seeds), state)
    warn_of_few(plan, rounds, patience)
    seen = state is not None and "patience.best" in state  # the patience of a resumed run knows the first rows
    history, stopped = History(), ""
    with threads(threads_of(run)), Watch(run, rounds, progress, track) as watch:
        for seconds in itertools.chain([0.0], timed(run, rounds, plan.every, watch.advanced)):
            rows, stopped = evaluate_once(run, rounds, detail, plan, on_evaluation, seconds, bool(history) or not seen)
            history.extend(rows)
            watch.evaluated(rows)
            if stopped:
                break
        watch.ended(stopped)
    return Result(run.server.x.squeeze(-2), run, history, run.server, stopped, fine_tuning)


def evaluate_once(
    run: Run, rounds: int, detail: bool, plan: EvaluationPlan, on_evaluation: Callable[..., Any] | None,
    seconds: float, count: bool,
) -> tuple[list[dict[str, Any]], str]:  # fmt: skip
    """The rows of an evaluation, and why the run stops here; empty if it does not. `count`: for the patience."""

    def evaluate(samples: int | None) -> list[dict[str, Any]]:
        return [row | {"seconds": seconds} for row in run.evaluate(detail, samples)]

    everything = None if plan.samples is None else run.problem.evaluated_samples(None)
    rows, stopped = evaluate(everything if run.round >= rounds else plan.samples), ""
    if run.patience is not None and (run.patience(rows) if count else run.patience.exhausted):
        stopped = run.patience.reason(run.round)
    if on_evaluation is not None and bool(on_evaluation(rows)):
        stopped = stopped or f"stopped after round {run.round} by on_evaluation"
    if run.round >= rounds:
        return rows, ""
    if stopped and everything is not None:  # the last evaluation takes all samples
        rows = evaluate(everything)
    return rows, stopped


def threads_of(run: Run) -> int:
    """One thread or all of them, whichever is faster by measurement. All ranks take the first one's answer."""
    number = 1
    if run.world.rank == 0:
        paths = isinstance(run.simulation.engine, Vectorised)
        share = -(-run.cohort // run.world.size)
        number = measured_threads(run.problem, share * len(run.seeds) if paths else 1)
    return int(run.world.share(str(number).encode()))


class Watch:
    """Shows and tracks a run of `train`; only the first rank does."""

    def __init__(self, run: Run, rounds: int, progress: bool, track: Tracker | Sequence[Tracker]):
        self.run, self.rounds, self.label = run, rounds, type(run.algorithm).__name__
        trackers = track if isinstance(track, list | tuple) else [track]
        for tracker in trackers:
            if not isinstance(tracker, Tracker):
                raise ValueError(f"train: track must be a tracker, such as fedda.track.tensorboard(), got {tracker!r}")
        self.trackers = [] if run.world.rank else list(trackers)
        self.display: Any = None
        if progress and not run.world.rank:
            from .progress import watcher  # needs rich

            self.display = watcher([self.label])

    def __enter__(self) -> "Watch":
        fields = {
            name: value for name, value in vars(self.run.algorithm).items() if isinstance(value, int | float | str)
        }
        config = {"algorithm": self.label, "rounds": self.rounds, "cohort": self.run.cohort, "seeds": self.run.seeds}
        for tracker in self.trackers:
            tracker.begin(config | fields)
        if self.display is not None:
            self.display.__enter__()
            paths = self.run.problem.gradient_paths
            if paths is not None and paths.choice:
                self.display.note(paths.choice)
            self.display.begin(self.label, self.run.round, self.rounds)
        return self

    def __exit__(self, *why: Any) -> None:
        if self.display is not None:
            self.display.__exit__(*why)
        for tracker in self.trackers:
            tracker.end()

    def advanced(self) -> None:
        if self.display is not None:
            self.display.advance(self.label, self.run.round, None)

    def evaluated(self, rows: list[dict[str, Any]]) -> None:
        for tracker in self.trackers:
            for row in rows:
                tracker.log({"algorithm": self.label, **row})
        if self.display is not None:
            self.display.advance(self.label, self.run.round, rows)

    def ended(self, stopped: str) -> None:
        if self.display is not None:
            self.display.end(self.label, f"done: {stopped}" if stopped else "done")


def export(result: TrainedModel, path: str | Path, seed: int | None = None, client: Any = None) -> Path:
    """Write a trained model to a file for PyTorch or ONNX Runtime.

    Args:
        result: the result of `train`, or its `best`.
        path: the file; its suffix .pt, .safetensors or .onnx says the format.
        seed: the seed whose model is meant, if there are several; the first by default.
        client: the client whose personal parameters are meant, named as in `result.clients`; by default their mean over
            clients.

    Returns:
        The path of the file.
    """
    if not isinstance(result, TrainedModel):
        raise ValueError(f"export: give the result of fedda.train, or its best, got a {type(result).__name__}")
    return write_model(Path(path), *result._network(seed, client))


def for_rounds(algorithm: Algorithm, problem: Problem, rounds: int) -> Algorithm:
    """The algorithm for a run of this length, on which its schedules may depend. `Run` refuses other objects."""
    if not isinstance(algorithm, Algorithm):
        return algorithm
    horizon = rounds * algorithm.with_steps_of(problem).steps  # the local steps of the run

    def bound(value: Any) -> Any:
        if isinstance(value, RateDecay) and value.horizon is None:
            return replace(value, horizon=horizon)
        return map_fields(value, bound)

    return map_fields(algorithm, bound)


def affordable(run: Run, rounds: int) -> int:
    """The last round that the privacy budget allows, with a warning if it is not the last of `rounds`."""
    last = run.last_round(rounds)
    if why := run.stop_reason(last, rounds):
        warn(f"train: {why}: the run ends there")
    return last


def timed(run: Run, rounds: int, every: int, advanced: Callable[[], None] = lambda: None) -> Iterator[float]:
    """Advance to `rounds`, with a pause for evaluation after every `every` rounds. It yields the seconds spent so far,
    without the pauses, and calls `advanced` after every round."""
    seconds = 0.0
    while run.round < rounds:
        began = time.perf_counter()
        run.advance()
        advanced()
        while run.round < rounds and run.round % every:
            run.advance()
            advanced()
        if run.problem.device.type == "cuda":
            torch.cuda.synchronize(run.problem.device)
        seconds += time.perf_counter() - began
        yield seconds
