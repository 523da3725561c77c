"""How the cost of a round grows: one quantity at a time, from the same base."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from ..engines import Vectorised
from ..registry import make
from ..run import Run
from .measure import PLAIN, plain
from .timing import PATIENCE, Contender, Maker, race, started
from .workloads import CIFAR, DIGITS, noise

SHARE = 4  # each point gets this part of the given seconds


@dataclass(frozen=True)
class Setting:
    """One point; `width` is the size of the hidden layer, or the number of filters."""

    shape: tuple[int, ...]
    width: int
    clients: int
    cohort: int = 10
    steps: int = 5
    batch: int = 16
    seeds: int = 1

    def problem(self) -> Any:
        width = "filters" if len(self.shape) == 3 else "hidden"
        return noise(self.shape, self.clients, self.batch, samples=2, **{width: self.width})


@dataclass(frozen=True)
class Ladder:
    """A quantity, its values (as long as they are affordable), and the setting at one of them."""

    quantity: str
    values: tuple[int, ...]
    at: Callable[[Setting, int], Setting]
    by_hand: bool = True  # whether the plain loop is measured beside it


BASES = {"small": Setting(DIGITS, width=32, clients=1000), "cnn": Setting(CIFAR, width=64, clients=10)}
SWEEPS = (
    Ladder("clients", (2, 5, 10, 20, 50, 100, 200, 500), lambda s, n: replace(s, cohort=n, clients=max(s.clients, n))),
    Ladder("steps", (1, 2, 5, 10, 20), lambda s, n: replace(s, steps=n)),
    # in quarters of the base's width; reported as the number of parameters
    Ladder("parameters", (1, 2, 4, 8, 16, 32), lambda s, n: replace(s, width=s.width * n // 4)),
    Ladder("seeds", (1, 2, 4, 8, 16), lambda s, n: replace(s, seeds=n), by_hand=False),
    # All clients of FedDA compute a first gradient, which would take a plain loop half a minute.
    Ladder("population", (1000, 10_000, 100_000), lambda s, n: replace(s, clients=n, cohort=100), by_hand=False),
)


def scaling(
    workload: str, algorithms: list[str], device: torch.device, precision: str, seconds: float,
    say: Callable[[str], None],
) -> dict[str, dict[str, list[dict[str, Any]]]]:  # fmt: skip
    """{algorithm: {quantity: one row per value}}; values whose round would take a few times `seconds` are left out."""
    # A hundred thousand clients with images would fill the memory and show nothing new.
    sweeps = [sweep for sweep in SWEEPS if sweep.quantity != "population" or workload == "small"]
    return {
        name: {sweep.quantity: list(climb(sweep, workload, name, device, precision, seconds, say)) for sweep in sweeps}
        for name in algorithms
    }


def climb(
    sweep: Ladder, workload: str, name: str, device: torch.device, precision: str, seconds: float,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    left_out: set[str] = set()  # contenders that are too slow now
    for value, following in pairwise((*sweep.values, 0)):
        setting = sweep.at(BASES[workload], value)
        makers, d = contenders(setting, name, device, precision, sweep.by_hand)
        shown = d if sweep.quantity == "parameters" else value
        say(f"{workload}: {name}: {sweep.quantity} {shown:,}")
        racing = [started(label, maker, device) for label, maker in makers.items() if label not in left_out]
        if not racing:
            return
        race(racing, seconds / SHARE, device)
        yield {"value": shown, "parameters": d} | {one.name: row(one, setting) for one in racing}
        left_out |= {one.name for one in racing if one.seconds * following / value > PATIENCE * seconds}


def contenders(
    setting: Setting, name: str, device: torch.device, precision: str, by_hand: bool
) -> tuple[dict[str, Maker], int]:
    """A factory for each contender, and the number of parameters."""
    problem = setting.problem().to(device)
    algorithm = make(name, steps=setting.steps)
    seed = 0 if setting.seeds == 1 else list(range(setting.seeds))

    def run() -> Callable[[], object]:
        made = Run(algorithm, problem, setting.cohort, seed, engine=Vectorised(precision=precision))
        made.compile(force=False)  # as after some rounds
        return made.advance

    makers: dict[str, Maker] = {"fedda": run}
    if by_hand:
        label, start = plain(name, algorithm, problem, setting.cohort, precision)
        if label == PLAIN:  # some algorithms have no hand-written loop
            makers[PLAIN] = start
    return makers, problem.d


def row(one: Contender, setting: Setting) -> dict[str, float]:
    ms, client_steps = 1000 * one.seconds, setting.cohort * setting.steps * setting.seeds
    return {
        "ms_per_round": ms,
        "ms_per_round_min": 1000 * min(one.blocks),
        "ms_per_round_max": 1000 * max(one.blocks),
        "ms_per_step": ms / setting.steps,
        "us_per_client_step": 1000 * ms / client_steps,  # of one client, in one replica
    }
