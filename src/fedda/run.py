"""The state of a run: an algorithm on a problem, one round after the other."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from . import checks, rng
from .aggregation import Aggregated, Budget, Wrapper, checked, gaussian, privacy, refuse_unfit, residuals
from .aggregation.compression import bytes_of
from .arguments import checked_seeds, made_engine, refuse_shapes, usable_device
from .core import Algorithm, Client, Cohort, Problem, bind_to_problem, on_client
from .engines import Counting, Counts, Draws, Engine, Simulation
from .engines.graphs import NoGraph, captured

PATIENCE = 3  # rounds without a single finite client before a run ends


class Diverged(RuntimeError):
    """Every client's reply was non-finite, several rounds in a row."""


class Run:
    """The state of a run and how it goes on. `seed` may be several seeds: they run as replicas of one program.

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
        cohort: int | None = None,
        seed: int | Sequence[int] = 0,
        x0: Tensor | None = None,
        engine: str | Engine = "auto",
        device: Any = None,
        weights: str = "uniform",
        force: bool = False,
        state: dict[str, Tensor] | None = None,
        aggregation: Sequence[Wrapper] = (),
        budget: Mapping[str, Any] | Budget | None = None,
        draws: Draws | None = None,
        charged: tuple[int, int] = (0, 0),
    ):
        if not isinstance(algorithm, Algorithm):
            raise ValueError(f"train: the algorithm must be an object, as fedda.make gives it, got {algorithm!r}")
        self.cohort = problem.clients if cohort is None else cohort
        checks.count("train", "cohort", self.cohort, at_most=problem.clients)
        checks.one_of("train", "weights", weights, ("uniform", "samples"))
        self.seeds = checked_seeds(seed)
        how: Any = made_engine(engine)
        self.problem = problem if device is None else problem.to(usable_device(device))
        if hasattr(how, "path"):
            self.problem = on_path(self.problem, how.path, how.precision, self.cohort)
        like = torch.empty((), dtype=self.problem.dtype, device=self.problem.device)
        refuse_shapes(algorithm, len(self.seeds), self.problem.d)
        self.algorithm = bind_to_problem(algorithm, like, self.problem.layout)
        seeds = torch.tensor(self.seeds, device=like.device)[:, None]
        self.lead = () if not isinstance(seed, Sequence) else (len(self.seeds),)
        self.aggregation = checked(aggregation)
        seeds = seeds if self.lead else seeds[0]
        self.key = rng.key(seeds, rng.NOISE)
        start = self._first_point(x0) if state is None else state["server.x"].to(like.device)
        refuse_unfit(self.aggregation, self.algorithm, start)
        memory = (*algorithm.memory, *residuals(self.aggregation, self.algorithm, start))
        self.simulation = Simulation(self.problem, how, seeds, weights, memory, draws)
        self.privacy = privacy(
            self.aggregation, self.algorithm, start, problem.clients, self.cohort,
            None if budget is None else Budget.of(budget), self.simulation.draws.secret, charged,
        )  # fmt: skip
        self.world = self.simulation.world
        self.counts, self.round = Counts(), 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.wants_graph = self.problem.device.type == "cuda" and getattr(how, "graph", False)
        if self.wants_graph and not self.world.captured(bool(memory)):
            self.wants_graph = False
            warnings.warn(
                "rounds run eagerly, which is slower: what travels between the ranks goes by the host", stacklevel=2
            )
        if self.wants_graph and not all(wrapper.reproducible for wrapper in self.aggregation):
            self.wants_graph = False
            warnings.warn("rounds run eagerly, which is slower: private noise is drawn on the host", stacklevel=2)
        # clients with a reply that was not finite, summed over rounds
        self.dropped = torch.zeros(self.lead, dtype=torch.int64, device=like.device)
        self.silent = torch.zeros_like(self.dropped)  # rounds in a row without a finite reply
        self.idle = torch.zeros_like(self.dropped)  # gradients in `counts` of clients that were not active
        self.first_rates: list[float] | None = None  # eta_0 / min h of every replica, where the algorithm has one
        if state is None:
            self._start(start, force)
        else:
            self._load(state)

    @torch.no_grad()
    def _start(self, x: Tensor, force: bool) -> None:
        everyone = self.simulation.everyone()
        counting = self._counting(everyone)
        self.server = self.algorithm.init(x, self._wrapped(counting, -1))
        self.idle = self.idle + counting.idle
        if not bool(everyone.fine.any(dim=-1).all()):
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
        """Which replicas begin with a step that has blown up every network seen."""
        if self.first_rates is None:
            return torch.zeros(len(self.seeds), dtype=torch.bool)
        return torch.tensor(self.first_rates) > self.problem.max_rate * (1 + 1e-6)  # lr = eps is a rate of 1, rounded

    def _first_point(self, x0: Tensor | None) -> Tensor:
        d = self.problem.d
        if x0 is None:
            x = torch.stack([self.problem.start(seed) for seed in self.seeds])
        else:
            point = torch.as_tensor(x0)
            if point.shape not in ((d,), (*self.lead, d)) or not bool(point.isfinite().all()):
                raise ValueError(
                    f"train: x0 must be a flat vector of {d} finite numbers, got shape {list(point.shape)}"
                )
            x = point.to(device=self.problem.device, dtype=self.problem.dtype).expand(len(self.seeds), d)
        return x.clone().view(*self.lead, 1, d)

    def step(self) -> Any:
        """One round; the new server state."""
        self.advance()
        # What a graph replays into changes with the next round.
        return self.server if self.graph is None else type(self.server)(*(v.clone() for v in self.server))

    @torch.no_grad()
    def advance(self) -> None:
        """One round. On a GPU it is captured once and replayed; the host then learns of a divergence when it looks."""
        if self.wants_graph:
            self._capture()
        if self.graph is not None:
            self.graph.replay()
            self.counts = self.counts + self.counts_of_a_round
            self.round += 1
            return
        server, alive, lost, idle = self._round(self.round)
        self.dropped, self.idle = self.dropped + lost, self.idle + idle
        if not bool(alive.all()):
            self.silent = torch.where(alive, 0, self.silent + 1)
            server = self._kept(alive, server)
        else:
            self.silent = torch.zeros_like(self.silent)
        self.server, self.round = server, self.round + 1
        self.refuse_silence()

    def _round(self, tau: int | Tensor) -> tuple[Any, Tensor, Tensor, Any]:
        """The next state, which replicas live, how many replies of each were lost, and how many of the gradients that
        were asked for nobody computed, because the client was not active."""
        cohort = self.simulation.cohort(tau, self.cohort)
        counting = self._counting(cohort)
        server = self.algorithm.round(self.server, self._wrapped(counting, tau))
        # A replica that has been silent too long is over: it stays where it is, and the others go on.
        alive = cohort.fine.any(dim=-1) & (self.silent < PATIENCE)
        return server, alive, (~cohort.fine).sum(dim=-1), counting.idle

    def _counting(self, cohort: Cohort) -> Counting:
        """The cohort, counted at the wire."""
        return Counting(cohort, self.counts, bytes_of=bytes_of(self.aggregation) if self.aggregation else None)

    def _wrapped(self, counting: Counting, tau: int | Tensor) -> Cohort:
        """What an algorithm sees of it: aggregated behind the wire; -1 is the start."""
        if not self.aggregation:
            return counting
        return Aggregated(counting, self.aggregation, rng.fold(self.key, tau + 1), self._new_key)

    def _new_key(self) -> bytes:
        """A new secret key, the same on all ranks."""
        return self.world.share(gaussian.new_key() if self.world.rank == 0 else b"")

    def last(self, rounds: int) -> int:
        """The last of so many rounds that the privacy budget allows; all of them without one."""
        return rounds if self.privacy is None else self.privacy.last(rounds)

    def stopped(self, done: int, rounds: int) -> str:
        """Why a run that was asked for so many rounds ends after those done; empty if it does all of them."""
        if self.privacy is None or self.privacy.last(rounds) == rounds:
            return ""
        return self.privacy.stopped(done, rounds)

    def set_gradients(self, gradients: int, full_gradients: int) -> None:
        """Set the gradient counts, which the remote clients of a federation report."""
        self.counts = replace(self.counts, gradients=gradients, full_gradients=full_gradients)

    def _kept(self, alive: Tensor, server: Any) -> Any:
        return type(server)(*(_keep(alive, new, old) for new, old in zip(server, self.server, strict=True)))

    def _capture(self) -> None:
        self.wants_graph = False
        self.tau = tau = torch.tensor(self.round, device=self.problem.device)  # held: a graph holds no tensor
        self.server = type(self.server)(*(v.clone() for v in self.server))  # places that the graph writes to
        counts = self.counts

        def step() -> list[Tensor]:
            self.counts = Counts()
            server, alive, lost, idle = self._round(tau)
            silent = torch.where(alive, 0, self.silent + 1)
            return [*self._kept(alive, server), self.dropped + lost, silent, self.idle + idle, tau + 1]

        state = [*self.server, self.dropped, self.silent, self.idle, tau]
        try:
            with self.problem.arithmetic() if hasattr(self.problem, "arithmetic") else nullcontext():
                self.graph = captured(step, state, list(self.simulation.memory.values()))
        except NoGraph as why:
            warnings.warn(f"rounds run eagerly, which is slower: {why}", stacklevel=3)
        self.counts, self.counts_of_a_round = counts, self.counts

    def refuse_silence(self) -> None:
        if bool((self.silent >= PATIENCE).all()):
            raise Diverged(
                f"{type(self.algorithm).__name__}: no client gave a finite reply in {PATIENCE} rounds in a row "
                f"(up to round {self.round}): the run has diverged; lower lr"
            )

    @torch.no_grad()
    def evaluate(self, detail: bool = False) -> list[dict[str, Any]]:
        """One row for each seed: counts so far and metrics of the model. With `detail` also the density of every layer
        and, where the algorithm has one, the gradient mapping, which takes a pass over all data."""
        self.refuse_silence()
        x = self.server.x.squeeze(-2)
        metrics = self._metrics(x)
        metrics |= {
            "density": (x.abs() > 0.01).double().mean(dim=-1),
            "nonzero": (x != 0).double().mean(dim=-1),
            "max_x": x.abs().amax(dim=-1),
        }
        prox = getattr(self.algorithm, "prox", None)
        if prox is not None:
            at = self.server.x  # [..., 1, d], as penalties with a weight for each replica expect
            metrics["objective"] = metrics["train_loss"] + prox.value(at).double().squeeze(-1)
            metrics["infeasible"] = (prox.project(at) - at).double().norm(dim=-1).squeeze(-1)
        if detail:
            metrics |= self._details(x)
        # What is watched is [..., 1, 1], a metric [...].
        metrics |= {k: v.expand(*self.lead, 1, 1)[..., 0, 0] for k, v in self.algorithm.monitor(self.server).items()}
        # A replica that is over has no model to speak of; the last one it had would pass for a result.
        over = self.silent >= PATIENCE
        columns = {k: torch.where(over, torch.nan, v.double()).reshape(-1).tolist() for k, v in metrics.items()}
        counted = {"steps": self.round * self.algorithm.steps, **asdict(self._counted())}
        idle = self._idle().reshape(-1).tolist()
        spent = {} if self.privacy is None else self.privacy.row(self.round)
        return [
            {"round": self.round, "seed": seed, **counted, "gradients": counted["gradients"] - idle[i]}
            | {"dropped": dropped}
            | {name: column[i] for name, column in columns.items()}
            | spent
            for i, (seed, dropped) in enumerate(zip(self.seeds, self.dropped.reshape(-1).tolist(), strict=True))
        ]

    def _metrics(self, x: Tensor) -> dict[str, Tensor]:
        """Every rank looks at its part of the data."""
        weights, world = self.simulation.weights, self.world
        if world.size == 1 or not hasattr(self.problem, "totals"):
            return self.problem.evaluate(x, weights)
        totals = self.problem.totals(x, weights, world.mine, world.sum)
        sums = world.sum([v for pair in totals.values() for v in pair])
        return {name: total / weight for name, total, weight in zip(totals, sums[::2], sums[1::2], strict=True)}

    def _counted(self) -> Counts:
        """The counts of all ranks: bytes are counted for the whole cohort, gradients where they are taken."""
        here = torch.tensor([self.counts.gradients, self.counts.full_gradients], dtype=torch.float64)
        gradients, full = map(int, self.world.sum([here])[0].tolist())
        return replace(self.counts, gradients=gradients, full_gradients=full)

    def _idle(self) -> Tensor:
        """The gradients in `counts`, of all ranks, that nobody computed: one number for each replica."""
        return self.world.sum([self.idle.double()])[0].to(torch.int64)

    def _details(self, x: Tensor) -> dict[str, Tensor]:
        sizes = [math.prod(shape) for _, shape in self.problem.layout]
        details = {}
        for (name, _), part in zip(self.problem.layout, x.split(sizes, dim=-1), strict=True):
            details[f"density:{name}"] = (part.abs() > 0.01).double().mean(dim=-1)
            details[f"nonzero:{name}"] = (part != 0).double().mean(dim=-1)
        (gradient,) = self.simulation.everyone().average(full_gradient, self.server.x)
        mapping = self.algorithm.mapping(self.server, gradient)
        return details if mapping is None else details | {"gradient_mapping": mapping[..., 0, 0]}

    def state(self) -> dict[str, Tensor]:
        """Everything that a run needs to go on, as tensors; of several ranks, the first has all of it."""
        tensors = {f"server.{name}": value for name, value in self.server._asdict().items()}
        memory = self.simulation.memory
        tensors |= {f"memory.{name}": self.world.gather(value, value.dim() - 2) for name, value in memory.items()}
        tensors |= {f"counts.{name}": torch.tensor(value) for name, value in asdict(self._counted()).items()}
        idle = self._idle()
        tensors |= {"idle": idle} if bool(idle.any()) else {}  # few algorithms have clients that are not active
        return tensors | {"round": torch.tensor(self.round), "dropped": self.dropped, "silent": self.silent}

    def _load(self, state: dict[str, Tensor]) -> None:
        device = self.problem.device
        Server = self.algorithm.Server
        self.server = Server(*(state[f"server.{name}"].to(device) for name in Server._fields))  # type: ignore[attr-defined]
        for name in self.simulation.memory:
            if f"memory.{name}" not in state:
                raise ValueError(
                    f"train: the state has no client memory {name!r}: it is of a run with other aggregation"
                )
            self.simulation.memory[name] = state[f"memory.{name}"][..., self.simulation.owned, :].to(device, copy=True)
        self.counts = Counts(**{name: int(state[f"counts.{name}"]) for name in asdict(self.counts)})
        if self.world.rank:  # they are summed over the ranks, and the first has them
            self.counts = replace(self.counts, gradients=0, full_gradients=0)
        self.round = int(state["round"])
        self.dropped, self.silent = state["dropped"].to(device), state["silent"].to(device)
        if "idle" in state and not self.world.rank:
            self.idle = state["idle"].to(device)


def on_path(problem: Any, path: str, precision: str, clients: int) -> Any:
    """The problem with its gradients computed as the engine wants it."""
    if hasattr(problem, "with_path"):
        return problem.with_path(path, precision, clients)
    if (path, precision) != ("auto", "auto"):
        raise ValueError(f"Vectorised: path and precision are for networks, a {type(problem).__name__} has neither")
    return problem


@on_client
def full_gradient(client: Client, x: Tensor) -> tuple[Tensor, ...]:
    return (client.full_gradient(x),)


def _keep(alive: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """The new value where the replica lives; where nobody replied, even time stands still."""
    return torch.where(alive[..., None, None], new, old)
