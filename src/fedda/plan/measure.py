"""The profile of an experiment: its rounds are really run, with more and more clients while they are affordable."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..bench.machine import machine
from ..bench.timing import Contender, race, started
from ..core import Algorithm, ClientTask, Number
from ..engines import Vectorised
from ..engines.simulated import SimulatedCohort
from ..experiments.config import Experiment, owned
from ..experiments.execution import processors
from ..experiments.runner import built
from ..problems.gradients.tuning import seconds as seconds_of
from ..problems.gradients.tuning import threads
from ..run import Diverged, Run
from .link import Link
from .profile import Method, Profile, problem_of

ROUND = 1.0  # seconds that a measured round may take: beyond it more clients are more of the same
MEMORY = 1e9  # bytes that the clients' memory may take meanwhile
SIZES = 3  # how many cohorts are timed at least, the largest of those that were tried
PASSES = 6  # over all of them, in short blocks: the least is a round that nothing else has disturbed
LOOK = 0.1  # seconds that the timed evaluation takes, at least


def measured(
    experiment: Experiment, shares: list[int], everyone: bool, device: torch.device, link: Link,
    seconds: float, say: Callable[[str], None],
) -> Profile:  # fmt: skip
    """`shares` are the clients of a process that the plan will ask for, `everyone` whether all take part in a round;
    each size is timed for about so many seconds."""
    say("data")
    wanted = experiment.completed()
    problem = built(wanted, str(device))
    cpu = device.type == "cpu"
    with threads(1 if cpu else torch.get_num_threads()):  # as torchrun gives each of several processes
        methods = {}
        for label in wanted.algorithms:
            with owned(experiment.name):
                algorithm = wanted.build(label)
            tell = partial(_of, say, label)
            try:
                methods[label] = method(algorithm, problem, wanted, shares, everyone, seconds, tell)
            except Diverged as why:
                raise ValueError(f"{experiment.name}: {label}: {why}") from None
        say("an evaluation")
        look = evaluation(problem, wanted.seeds)
    held_out = list(problem.held_out.values())
    stored = (problem.data.x[0].nbytes + problem.data.y[0].nbytes) * float(problem.sizes.double().mean())
    return Profile(
        name=wanted.name, problem=problem_of(wanted), replicas=len(wanted.seeds), parameters=problem.d,
        number=problem.dtype.itemsize, device="cpu" if cpu else torch.cuda.get_device_name(device), shared=cpu,
        cores=processors(), device_bytes=device_bytes(device), chunk_bytes=chunk_bytes(device),
        client_bytes=problem.bytes_per_client(), data_bytes=stored, samples=float(problem.sizes.double().mean()),
        test_bytes=sum(v.nbytes for part in held_out for v in part), test_samples=sum(len(part.y) for part in held_out),
        sample_seconds=look, link=link, machine=machine(device), methods=methods, tables=wanted.algorithms,
    )  # fmt: skip


@dataclass(frozen=True)
class CallCounts(Vectorised):
    """Notes how long the replies of every exchange are."""

    seen: list[list[int]] = field(default_factory=list)

    def average(self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        means = super().average(cohort, task, down)
        self.seen.append([mean.shape[-1] for mean in means])
        return means


def method(
    algorithm: Algorithm, problem: Any, experiment: Experiment, shares: list[int], everyone: bool,
    seconds: float, say: Callable[[str], None],
) -> Method:  # fmt: skip
    """One algorithm: what it sends, and how long its rounds take."""
    device, memory = problem.device, sum(not isinstance(name, Number) for name in algorithm.memory)
    # What travels of clients' memory goes by the host, so that such a round is not one CUDA graph.
    engine = Vectorised(graph=not memory)

    def run(clients: int, how: Vectorised = engine) -> Run:
        population = wide(problem, clients if everyone else 2 * clients)
        return Run(
            algorithm, population, clients, experiment.seeds, engine=how, weights=experiment.weights, force=True
        )  # fmt: skip

    say("messages")
    noting = CallCounts(graph=False)
    first = run(2, noting)
    start = noting.seen.copy()
    first.advance()
    noting.seen.clear()
    first.advance()
    row = 2 * problem.d * problem.dtype.itemsize * len(experiment.seeds) * memory
    timed: list[tuple[int, Contender]] = []
    for clients, following in sizes(shares):
        say(f"cohorts of {clients:,}")
        timed.append((clients, started(str(clients), lambda n=clients: run(n).advance, device)))  # type: ignore[misc]
        if timed[-1][1].once * following / clients > ROUND or row * following > MEMORY:
            break
    if len(timed) == 1:
        timed.append((2 * clients, started("twice", lambda: run(2 * clients).advance, device)))
    timed = timed[-max(SIZES, sum(n >= min(shares) for n, _ in timed)) :]
    for _ in range(PASSES):
        race([one for _, one in timed], seconds / PASSES, device)
    began = time.perf_counter()
    asked = run(timed[-1][0]).problem.clients if start else 1
    begin = (time.perf_counter() - began) / asked if start else 0.0
    return Method(
        exchanges=noting.seen, start=start, memory=memory, server=sum(v.nbytes for v in first.server),
        rounds=[(n, min(one.blocks)) for n, one in timed], start_seconds=begin,
    )  # fmt: skip


def sizes(shares: list[int]) -> Iterator[tuple[int, int]]:
    """The cohorts to try, each with the next: up to the smallest share in fours, then the shares.

    >>> list(sizes([25, 50, 100]))
    [(1, 4), (4, 16), (16, 25), (25, 50), (50, 100), (100, 100)]
    """
    climb = [4**i for i in range(20) if 4**i < min(shares)] + sorted(set(shares))
    return zip(climb, [*climb[1:], climb[-1]], strict=True)


def wide(problem: Any, clients: int) -> Any:
    """The problem with so many clients: those there are, over and over."""
    other, index = copy.copy(problem), torch.arange(clients, device=problem.device) % problem.clients
    other.sizes, other.offsets, other.clients = problem.sizes[index], problem.offsets[index], clients
    return other


def evaluation(problem: Any, seeds: list[int]) -> float:
    """Seconds to look at one sample, by ever larger parts of the data."""
    x = torch.stack([problem.start(seed) for seed in seeds])
    weights = torch.ones(problem.clients, dtype=torch.float64, device=problem.device)
    tested = [len(part.y) for part in problem.held_out.values()]
    part = 1 / 256
    while True:
        mine = partial(_first, part)
        took = min(seconds_of(lambda: problem.totals(x, weights, mine), problem.device) for _ in range(2))  # noqa: B023
        looked = int(problem.sizes[mine(problem.clients)].sum()) + sum(mine(n).stop for n in tested)
        if took >= LOOK or part >= 1:
            return took / looked
        part *= 4


def _of(say: Callable[[str], None], label: str, words: str) -> None:
    say(f"{label}: {words}")


def _first(part: float, n: int) -> slice:
    return slice(0, max(1, int(part * n)))


def device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def chunk_bytes(device: torch.device) -> int:
    """What `Vectorised` allows."""
    return int(torch.cuda.mem_get_info(device)[0]) // 4 if device.type == "cuda" else int(2e9)
