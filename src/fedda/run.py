"""The state of a run: an algorithm on a problem, and how one round advances it. `rows.py` reports on it."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from operator import gt
from typing import Any

import torch
from torch import Tensor

from . import checks, rng, rows
from .aggregation import Budget, Wrapper, gaussian
from .aggregation.cohort import Aggregated, check_wrappers, refuse_unfit, residuals
from .aggregation.compression import bytes_of
from .aggregation.dry_run import decays_weights, takes_client_steps
from .aggregation.noise import privacy
from .arguments import (
    check_device,
    check_engine,
    check_rates,
    check_seeds,
    check_shapes,
    flat_point,
    refuse_other_frozen,
)
from .best import BestModels
from .checks import warn
from .clients import FineTuning, client_rows
from .core import Algorithm, Cohort, Problem, bind_to_problem, positive
from .engines import Engine
from .engines.counting import Counting, Counts
from .engines.graphs import NoGraph, capture
from .engines.participation import Draws, Participation, cohort_size
from .engines.programs import CpuProgram, NoProgram, Trial
from .engines.simulated import PERSONAL, Simulation
from .evaluations import Patience
from .recording import is_recording
from .rules.schedules import RateDecay
from .user_code import has_user_code

logger = logging.getLogger(__name__)
# Seconds and number of rounds on a CPU after which a round is compiled: compiler and trial take about a second, and the
# trial at least four rounds.
COMPILE_AFTER = 1.0, 20
PATIENCE = 3  # rounds in a row without a finite reply, after which a run (or a replica) has ended


def warn_of_sizes(sizes: Tensor) -> None:
    """Warn if the clients have very different numbers of samples, and nobody chose how they are weighted."""
    if len(sizes) and int(sizes.max()) >= 10 * int(sizes.min()):
        warn(
            f"clients have {int(sizes.min())} to {int(sizes.max())} samples and the same weight: weights='samples' "
            "weights them by their samples, as McMahan et al. 2017 do; weights='uniform' says that you want this"
        )


def refuse_other_state(state: Any, algorithm: Algorithm, shape: tuple[int, ...]) -> None:
    """Refuse a state of another algorithm, of another model or of another number of seeds."""
    if not isinstance(state, Mapping):
        raise ValueError(f"train: state must be result.state of an earlier call, got a {type(state).__name__}")
    fields = {f"server.{name}" for name in algorithm.Server._fields} | {"round"}  # type: ignore[attr-defined]
    missing = sorted(fields - state.keys())
    if missing:
        owner = type(algorithm).__name__
        raise ValueError(
            f"train: the state has no {missing[0]!r}: it is not of a run of {owner}, or of another version of fedda"
        )
    if tuple(state["server.x"].shape) != shape:
        given = list(state["server.x"].shape)
        raise ValueError(f"train: the state is of another model or of other seeds: x is {given}, not {list(shape)}")


def horizons(thing: Any) -> Iterator[float]:
    """The local steps over which the rates of an algorithm change."""
    if isinstance(thing, RateDecay) and thing.horizon is not None:
        yield float(thing.horizon)
    if is_dataclass(thing) and not isinstance(thing, type):
        for field in fields(thing):
            yield from horizons(getattr(thing, field.name))


class Diverged(RuntimeError):
    """No client gave a finite reply, several rounds in a row."""


class Run:
    """The state of a run, for code that needs more than `train` and `rounds` give.

    Args:
        algorithm: what `fedda.make` gives.
        problem: what `fedda.problem`, `fedda.load` or `fedda.Quadratic` gives.
        cohort: clients per round, a whole number or a share such as 0.1; all of them by default.
        seed: of the first model, cohorts, batches and random layers. Several seeds run as one program.
        x0: the first model: a flat vector, or a state_dict of the network.
        engine: "auto", "sequential", "vectorised", or an engine of `fedda.engines`.
        device: the device to which the problem is moved first, such as "cuda".
        weights: how replies are averaged: "uniform" (the default), or "samples" as in McMahan's FedAvg.
        force: run even if the first effective rate is far too large.
        state: `result.state` of an earlier call. The run resumes, bit for bit.
        aggregation: what is done to replies before they are averaged, in this order (`fedda.aggregation`).
        budget: {"epsilon": 8.0, "delta": 1e-5}: the run ends before this privacy loss is exceeded.
        draws: where cohorts and batches come from; by default a hash of the seed.
        charged: starts and rounds that the privacy budget has paid for already.
        sampling: "uniform", or "samples": a client with twice the samples is drawn twice as often.
        drop: the probability that a client's reply gets lost.
        availability: when clients can take part: a CSV file with the columns client, on, off, or such rows.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]], noise=0.1)
    >>> run = Run(fedda.make("fedavg"), problem, seed=[0, 1, 2])
    >>> run.step().x.shape  # [replicas, 1, d]
    torch.Size([3, 1, 1])
    """

    def __init__(
        self,
        algorithm: Algorithm,
        problem: Problem,
        cohort: float | None = None,
        seed: int | Sequence[int] = 0,
        x0: Tensor | Mapping[str, Tensor] | None = None,
        engine: str | Engine = "auto",
        device: Any = None,
        weights: str | None = None,
        force: bool = False,
        state: dict[str, Tensor] | None = None,
        aggregation: Sequence[Wrapper] = (),
        budget: Mapping[str, Any] | Budget | None = None,
        draws: Draws | None = None,
        charged: tuple[int, int] = (0, 0),
        sampling: str = "uniform",
        drop: float = 0.0,
        availability: Any = None,
    ):
        if not isinstance(algorithm, Algorithm):
            raise ValueError(f"train: the algorithm must be an object, as fedda.make gives it, got {algorithm!r}")
        if x0 is not None and state is not None:
            raise ValueError("train: a state has its own model: give x0 or state, not both")
        self.cohort = cohort_size(cohort, problem.clients)
        if weights is None and sampling == "uniform":
            warn_of_sizes(problem.sizes)
        weights = "uniform" if weights is None else weights
        checks.one_of("train", "weights", weights, ("uniform", "samples"))
        names = problem.client_names or range(problem.clients)
        participation = Participation.of(sampling, drop, availability, names, weights)
        self.seeds, engine = check_seeds(seed), check_engine(engine)
        self.problem = engine.prepare(problem if device is None else problem.to(check_device(device)), self.cohort)
        algorithm = algorithm.with_steps_of(self.problem)
        check_shapes(algorithm, len(self.seeds), self.problem.d)
        like = torch.empty((), dtype=self.problem.dtype, device=self.problem.device)
        self.algorithm = bind_to_problem(algorithm, like, self.problem.layout)
        self.lead = (len(self.seeds),) if isinstance(seed, Sequence) else ()  # the axis of the replicas
        check_rates(self.algorithm, like.new_zeros(*self.lead, 1, 1))
        seeds = torch.tensor(self.seeds, device=like.device).view(*self.lead, 1)
        self.noise_key = rng.key(seeds, rng.NOISE)
        if state is not None:
            refuse_other_state(state, self.algorithm, (*self.lead, 1, self.problem.d))
        start = self._first_point(x0) if state is None else state["server.x"].to(like.device)
        self.aggregation = check_wrappers(aggregation)
        refuse_unfit(self.aggregation, self.algorithm, start)
        if self.algorithm.unequal and not takes_client_steps(self.algorithm, start):
            raise ValueError(
                f"{type(algorithm).__name__}: epochs, steps='proportional' and stragglers need a task that takes its "
                "steps by `for i, move in client.steps(self.steps)` and changes them by `x = move(x, new)`"
            )
        if positive(self.algorithm.weight_decay) and not decays_weights(self.algorithm, start):
            raise ValueError(
                f"{type(algorithm).__name__}: weight_decay has no effect: its task must step from self.decayed(x, eta)"
            )
        memory = (*algorithm.memory, *residuals(self.aggregation, self.algorithm, start))
        self.simulation = Simulation(self.problem, engine, seeds, weights, memory, draws, self.algorithm, participation)
        self.world = self.simulation.world
        if len(set(self.world.collect(start.cpu().contiguous().view(torch.uint8).numpy().tobytes()))) > 1:
            raise ValueError(
                "train: the processes begin with different models: seed torch before you build the network"
            )
        if self.problem.d_personal:
            self.simulation.memory[PERSONAL] = self._first_personal(x0)
        self.privacy = privacy(
            self.aggregation, self.algorithm, start, problem.clients, self.cohort,
            None if budget is None else Budget.of(budget), self.simulation.draws.secret, charged,
        )  # fmt: skip
        if self.privacy is not None and not participation.uniform:
            raise ValueError(
                "train: privacy is accounted for cohorts drawn uniformly: leave out sampling, availability"
            )
        self.counts, self.round = Counts(), 0
        self.best = BestModels(state, like.device)  # on the validation samples
        self.best.directions = self.problem.directions
        zeros = torch.zeros(self.lead, dtype=torch.int64, device=like.device)
        self.dropped = zeros  # replies that were not finite, summed over rounds
        self.silent = zeros.clone()  # rounds in a row without a finite reply
        self.idle = zeros.clone()  # gradients in `counts` that clients did not compute, because they were not active
        self.patience: Patience | None = None  # for a run that may stop early
        self.first_rates: list[float] | None = None  # eta_0 / min h of every replica, if the algorithm has one
        self.graph: torch.cuda.CUDAGraph | None = None
        self.wants_graph = self._can_capture(engine, bool(self.simulation.memory))
        self.program: CpuProgram | None = None  # a round on a CPU
        self.trial: Trial | None = None
        self.wants_program = self._can_compile(engine)
        self.spent = [0.0, 0]  # seconds and number of rounds that a program may replace
        if state is None:
            self._start(start, force)
        else:
            self._load(state)

    def _first_point(self, x0: Tensor | Mapping[str, Tensor] | None) -> Tensor:
        d = self.problem.d
        if isinstance(x0, Mapping):
            refuse_other_frozen(x0, self.problem.frozen)
            x0 = flat_point(x0, self.problem.layout)
        if x0 is None:
            x = torch.stack([self.problem.start(seed) for seed in self.seeds])
        else:
            try:
                point = torch.as_tensor(x0)
            except (TypeError, ValueError, RuntimeError):
                hint = "; give its state_dict()" if hasattr(x0, "state_dict") else ""
                raise ValueError(
                    f"train: x0 must be a flat vector or a state_dict, got a {type(x0).__name__}{hint}"
                ) from None
            if point.shape not in ((d,), (*self.lead, d)) or not bool(point.isfinite().all()):
                raise ValueError(
                    f"train: x0 must be a flat vector of {d} finite numbers, got shape {list(point.shape)}"
                )
            x = point.to(device=self.problem.device, dtype=self.problem.dtype).expand(len(self.seeds), d)
        return x.clone().view(*self.lead, 1, d)

    def _first_personal(self, x0: Any) -> Tensor:
        """The first personal parameters of this process's clients, [..., clients, n]."""
        owned = self.simulation.owned
        if isinstance(x0, Mapping):
            first = flat_point(x0, self.problem.personal_layout).expand(len(self.seeds), -1)
        else:
            first = torch.stack([self.problem.personal_start(seed) for seed in self.seeds])
        first = first.to(device=self.problem.device, dtype=self.problem.dtype).view(*self.lead, 1, -1)
        return first.expand(*self.lead, owned.stop - owned.start, -1).clone()

    def _can_capture(self, engine: Engine, memory: bool) -> bool:
        if self.problem.device.type != "cuda" or not engine.graph:
            return False
        why = ""
        if not self.world.can_capture(memory):
            why = "the ranks exchange data through the host"
        elif not all(wrapper.reproducible for wrapper in self.aggregation):
            why = "private noise is drawn on the host"
        if why:
            warn(f"rounds run eagerly, which is slower: {why}")
        return not why

    def _can_compile(self, engine: Engine) -> bool:
        """Whether a program may replace rounds on a CPU."""
        reproducible = all(wrapper.reproducible for wrapper in self.aggregation)
        return self.problem.device.type == "cpu" and engine.graph and self.world.size == 1 and reproducible

    def _calls_user_code(self) -> bool:
        """Whether a round calls code that is not of this library. A program would no longer call it."""
        rules = (self.algorithm, self.aggregation, self.simulation.draws, self.simulation.engine)
        return self.problem.calls_user_code or has_user_code(rules)

    @torch.no_grad()
    def _start(self, x: Tensor, force: bool) -> None:
        everyone = self.simulation.everyone()
        counting = self._counting(everyone)
        self.server = self.algorithm.init(x, self._aggregated(counting, -1))
        self.idle = self.idle + counting.idle
        if not bool(everyone.finite.any(dim=-1).all()):
            raise Diverged("no client gave a finite reply at the start: look at the data and at x0")
        rate = self.algorithm.first_rate(self.server)
        if rate is not None:
            self.first_rates = torch.as_tensor(rate).expand(*self.server.x.shape[:-1], 1).flatten().tolist()
            if self.absurd.any() and not force:
                raise ValueError(
                    f"{type(self.algorithm).__name__}: the first effective rate eta_0 / min h = "
                    f"{max(self.first_rates):.3g} must be <= {self.problem.max_rate:g} on this problem: lower lr, "
                    "raise eps or w, set mu0='nu0', or force it"
                )

    @property
    def absurd(self) -> Tensor:
        """The replicas whose first step is larger than the problem allows."""
        if self.first_rates is None:
            return torch.zeros(len(self.seeds), dtype=torch.bool)
        return torch.tensor(self.first_rates) > self.problem.max_rate * (1 + 1e-6)  # lr = eps is a rate of 1, rounded

    @property
    def ended(self) -> Tensor:
        """The replicas that have diverged: they keep their state while the others continue."""
        return self.silent >= PATIENCE

    # -- one round ----------------------------------------------------------------------------------------------------
    def step(self) -> Any:
        """One round; the new server state."""
        self.advance()
        # The next replay of a graph overwrites the state.
        return self.server if self.graph is None else type(self.server)(*(v.clone() for v in self.server))

    @torch.no_grad()
    def advance(self) -> None:
        """One round. On a GPU it is captured once and then replayed; a divergence is noticed at the next evaluation. On
        a CPU a program takes over when the run has lasted for a while; its results are the same to the bit."""
        if self.wants_graph:
            self._capture()
        if self.graph is not None:
            self.graph.replay()
            self.counts = self.counts + self.counts_per_round
            self.round += 1
            return
        if self.program is not None:
            self._set_state(self.program(*self._round_state()))
            self.counts, self.idle = self.counts + self.counts_per_round, self.idle + self.counts_per_round.gradients
        else:
            begin = time.perf_counter()
            server, alive, self.silent, self.dropped, self.idle = self._round(self.round)
            if not bool(alive.all()):
                server = self._keep_ended(alive, server)
            self.server = server
            self.spent = [self.spent[0] + time.perf_counter() - begin, self.spent[1] + 1]
        self.round += 1
        self.raise_if_diverged()
        if self.wants_program and all(map(gt, self.spent, COMPILE_AFTER)):
            self.compile(wait=False, force=False)

    def _round(self, tau: int | Tensor) -> tuple[Any, Tensor, Tensor, Tensor, Any]:
        """The next server state; which replicas had a finite reply; then, for each replica, how many rounds in a row
        had none, how many replies were dropped and how many gradients were not computed."""
        cohort = self.simulation.cohort(tau, self.cohort)
        counting = self._counting(cohort)
        server = self.algorithm.round(self.server, self._aggregated(counting, tau))
        alive = cohort.finite.any(dim=-1) & ~self.ended
        # A round in which no client is available, or in which all replies get lost, is not a sign of divergence.
        silent = torch.where(alive, 0, self.silent + cohort.replying.any(dim=-1))
        dropped = ~cohort.finite if cohort.available is None else cohort.available & ~cohort.finite
        return server, alive, silent, self.dropped + dropped.sum(dim=-1), self.idle + counting.idle

    def _counting(self, cohort: Cohort) -> Counting:
        return Counting(cohort, self.counts, bytes_of=bytes_of(self.aggregation) if self.aggregation else None)

    def _aggregated(self, counting: Cohort, tau: int | Tensor) -> Cohort:
        """The cohort as the algorithm sees it, in round tau; -1 is the start."""
        if not self.aggregation:
            return counting
        return Aggregated(counting, self.aggregation, rng.fold(self.noise_key, tau + 1), self._new_key)

    def _new_key(self) -> bytes:
        """A new secret key, the same on all ranks."""
        return self.world.share(gaussian.new_key() if self.world.rank == 0 else b"")

    def set_gradients(self, gradients: int, full_gradients: int) -> None:
        """Set the gradient counts, which the remote clients of a federation report.

        Args:
            gradients: mini-batch gradients so far.
            full_gradients: passes over all data so far.
        """
        self.counts = replace(self.counts, gradients=gradients, full_gradients=full_gradients)

    def add_bytes(self, up: int, down: int) -> None:
        """Count bytes that travelled besides the tensors: those of secure aggregation.

        Args:
            up: bytes from the clients to the server.
            down: bytes from the server to the clients.
        """
        self.counts = replace(self.counts, bytes_up=self.counts.bytes_up + up, bytes_down=self.counts.bytes_down + down)

    def _keep_ended(self, alive: Tensor, server: Any) -> Any:
        """The new state of the replicas that are alive, the old state (with its step counter) of the others."""
        alive = alive[..., None, None]
        return type(server)(*(torch.where(alive, new, old) for new, old in zip(server, self.server, strict=True)))

    def _round_state(self) -> list[Tensor]:
        return [
            *self.server,
            self.dropped,
            self.silent,
            self.idle,
            torch.tensor(self.round, device=self.problem.device),
        ]

    def _set_state(self, state: Sequence[Tensor]) -> None:
        *server, self.dropped, self.silent, self.idle, _ = state
        self.server = type(self.server)(*server)

    def _next_state(self, *state: Tensor) -> list[Tensor]:
        """The state after a round, for any state before it; the host reads no number.

        A program takes as many gradients in every round, the round itself only those that it needs. So that the states
        are comparable, the idle gradients are given minus those that were counted.
        """
        before, counts = self._round_state(), self.counts
        self.counts = Counts()
        try:
            self._set_state(state)
            server, alive, silent, dropped, idle = self._round(state[-1])
            if is_recording():
                self.counts_per_round = self.counts
            idle = idle - self.counts.gradients
            return [*self._keep_ended(alive, server), dropped, silent, idle, state[-1] + 1]
        finally:
            self._set_state(before)
            self.counts = counts

    @torch.no_grad()
    def compile(self, wait: bool = True, force: bool = True) -> None:
        """Compile a round on a CPU, if that is possible. The results are the same to the bit.

        Args:
            wait: wait for the compiler. Otherwise it works in the background, and a later call looks whether it has
                finished.
            force: use the program in any case. Otherwise the faster of program and round is used, and a round that
                calls code of yours (an algorithm, a schedule) is not compiled, because a program would not call it.
        """
        try:
            if not self._can_compile(self.simulation.engine):
                raise NoProgram("that needs the vectorised engine in one process, and no secret noise")
            if self.trial is None:
                if not force and self._calls_user_code():
                    raise NoProgram("they call code of the user")
                kept = list(self.simulation.memory.values())
                self.trial = Trial(self._next_state, self._round_state(), kept)
            if not (wait or self.trial.ready()):
                return
            plain, compiled = self.trial.compare(self._round_state())
            if not force and compiled > plain:
                raise NoProgram(f"that takes {1e3 * compiled:.3g} ms, the round itself {1e3 * plain:.3g} ms")
            self.program = self.trial.program
        except NoProgram as why:
            logger.info("rounds are not compiled: %s", why)
        self.wants_program, self.trial = False, None

    def _capture(self) -> None:
        """Capture a round as a CUDA graph; if that fails, rounds run eagerly."""
        self.wants_graph = False
        self.tau = tau = torch.tensor(self.round, device=self.problem.device)  # on self, as a graph holds no tensor
        self.server = type(self.server)(*(v.clone() for v in self.server))  # the graph writes to these tensors
        counts = self.counts

        def step() -> list[Tensor]:
            self.counts = Counts()
            server, alive, silent, dropped, idle = self._round(tau)
            return [*self._keep_ended(alive, server), dropped, silent, idle, tau + 1]

        state = [*self.server, self.dropped, self.silent, self.idle, tau]
        try:
            with self.problem.arithmetic():
                self.graph = capture(step, state, list(self.simulation.memory.values()))
        except NoGraph as why:
            warn(f"rounds run eagerly, which is slower: {why}")
        self.counts, self.counts_per_round = counts, self.counts

    def raise_if_diverged(self) -> None:
        """Raise `Diverged` if no replica has had a finite reply for several rounds."""
        if bool(self.ended.all()):
            raise Diverged(
                f"{type(self.algorithm).__name__}: no client gave a finite reply in {PATIENCE} rounds in a row "
                f"(up to round {self.round}): the run has diverged; lower lr"
            )

    def set_patience(
        self, evaluations: int | None, metric: str | None, seeds: int, state: Mapping[str, Tensor] | None
    ) -> None:
        """Stop after some evaluations without an improvement of a validation metric, which also decides which model is
        the best.

        Args:
            evaluations: how many; None for never.
            metric: its name; the validation accuracy or loss by default.
            seeds: rows of an evaluation.
            state: the state of a resumed run, or None.
        """
        self.patience = Patience.of(evaluations, metric, self.problem, seeds, state)
        if self.patience is not None:
            self.best.chosen_by = self.patience.name

    # -- the privacy budget ---------------------------------------------------------------------------------------
    def last_round(self, rounds: int) -> int:
        """The last of `rounds` rounds that the privacy budget allows; all of them without a budget.

        Args:
            rounds: how many rounds are wanted.
        """
        return rounds if self.privacy is None else self.privacy.last_round(rounds)

    def stop_reason(self, done: int, rounds: int) -> str:
        """Why a run ends early; empty if it does not.

        Args:
            done: its last round.
            rounds: how many were wanted.
        """
        if self.privacy is None or self.privacy.last_round(rounds) == rounds:
            return ""
        return self.privacy.stop_reason(done, rounds)

    # -- reports and checkpoints ----------------------------------------------------------------------------------
    @torch.no_grad()
    def evaluate(self, detail: bool = False, samples: int | None = None) -> list[dict[str, Any]]:
        """Evaluate the model: one row for each seed, with counts so far and metrics.

        Args:
            detail: add the density of every layer and, if the algorithm has one, the gradient mapping, which takes a
                pass over all data.
            samples: estimate the metrics of the training samples from about so many, and say so in `train_samples`; all
                by default.
        """
        self.raise_if_diverged()
        reported = rows.report(self, detail, samples)
        self.best.update(self.server.x, reported)
        return reported

    def client_rows(self, tuning: FineTuning | None = None) -> list[dict[str, Any]]:
        """One row for each seed and client: the metrics of the model on the client's own samples.

        Args:
            tuning: also evaluate each client after local steps.
        """
        self.raise_if_diverged()
        return client_rows(self, tuning)

    def total_counts(self) -> Counts:
        """The counts of all ranks: bytes are counted for the whole cohort, gradients by the rank that computes them."""
        here = torch.tensor([self.counts.gradients, self.counts.full_gradients], dtype=torch.float64)
        gradients, full = map(int, self.world.sum([here])[0].tolist())
        return replace(self.counts, gradients=gradients, full_gradients=full)

    def total_idle(self) -> Tensor:
        """The idle gradients of all ranks, one number for each replica."""
        return self.world.sum([self.idle.double()])[0].to(torch.int64)

    def state(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, as tensors. With several ranks, rank 0 has all of it."""
        tensors = {f"server.{name}": value for name, value in self.server._asdict().items()}
        memory = self.simulation.memory
        tensors |= {f"memory.{name}": self.world.gather(value, value.dim() - 2) for name, value in memory.items()}
        tensors |= {f"counts.{name}": torch.tensor(value) for name, value in asdict(self.total_counts()).items()}
        idle = self.total_idle()
        tensors |= {} if self.patience is None else self.patience.state()
        tensors |= {"idle": idle} if bool(idle.any()) else {}  # few algorithms have inactive clients
        if length := self._horizon():
            tensors["horizon"] = torch.tensor(length, dtype=torch.float64)
        tensors |= self.best.state()
        return tensors | {"round": torch.tensor(self.round), "dropped": self.dropped, "silent": self.silent}

    def _horizon(self) -> float:
        """The local steps over which a rate changes; 0 if none does."""
        return max(horizons(self.algorithm), default=0.0)

    def _load(self, state: dict[str, Tensor]) -> None:
        device, Server = self.problem.device, self.algorithm.Server
        self.server = Server(*(state[f"server.{name}"].to(device) for name in Server._fields))  # type: ignore[attr-defined]
        length = self._horizon()
        if "horizon" in state and length != float(state["horizon"]):
            warn(
                f"train: the state's rate was made for a run of {float(state['horizon']):g} local steps, this one for "
                f"{length:g}: it does not continue where it was; give the schedule a horizon that holds for both"
            )
        if not self.algorithm.accepts(self.server):
            raise ValueError("train: the state is of a run with another lr_mode")
        for name in self.simulation.memory:
            if f"memory.{name}" not in state:
                raise ValueError(
                    f"train: the state has no client memory {name!r}: it is of a run with other aggregation or personal"
                )
            clients = state[f"memory.{name}"].shape[-2]
            if clients != self.problem.clients:
                raise ValueError(
                    f"train: the state is of a run with {clients} clients, the problem has {self.problem.clients}"
                )
            self.simulation.memory[name] = state[f"memory.{name}"][..., self.simulation.owned, :].to(device, copy=True)
        self.counts = Counts(**{name: int(state[f"counts.{name}"]) for name in asdict(self.counts)})
        self.round = int(state["round"])
        self.dropped, self.silent = state["dropped"].to(device), state["silent"].to(device)
        if self.world.rank:  # these are summed over the ranks, and rank 0 has them
            self.counts = replace(self.counts, gradients=0, full_gradients=0)
        elif "idle" in state:
            self.idle = state["idle"].to(device)
