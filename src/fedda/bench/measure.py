"""Algorithms on one workload: every path that fits, several seeds at once, and a plain loop, timed together."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..core import Algorithm
from ..engines import Vectorised
from ..problems.gradients.choose import allow_tf32
from ..problems.neural import Neural
from ..run import Run
from . import loop
from .timing import PATIENCE, Contender, Maker, race, started
from .workloads import Workload

SEEDS = 5
PLAIN = "plain loop"


def measure(
    workload: Workload, algorithms: Mapping[str, Algorithm], device: torch.device, precision: str, seconds: float,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """A workload, and the figures of each algorithm on it."""
    problem = workload.problem().to(device)
    figures = {}
    for label, algorithm in algorithms.items():
        tell = partial(lambda label, text: say(f"{workload.name}: {label}: {text}"), label)
        figures[label] = measure_algorithm(label, algorithm, workload, problem, precision, seconds, tell)
    about = {key: getattr(workload, key) for key in ("about", "clients", "cohort", "steps", "batch")}
    return about | {"parameters": problem.d, "random_images": workload.random, "algorithms": figures}


def measure_algorithm(
    name: str, algorithm: Algorithm, workload: Workload, problem: Neural, precision: str, seconds: float,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Every figure of this algorithm, with units in the keys."""
    device, steps = problem.device, algorithm.with_steps_of(problem).steps

    def run(path: str = "auto", seed: int | list[int] = 0) -> Run:
        return Run(algorithm, problem, workload.cohort, seed, engine=Vectorised(path=path, precision=precision))

    def begun(label: str, path: str = "auto", seed: int | list[int] = 0) -> Contender:
        """A run that has lasted for a while: on a CPU its rounds are then compiled, if that is faster."""
        runs: list[Run] = []

        def make() -> Callable[[], object]:
            runs.append(run(path, seed))
            return runs[0].advance

        contender = started(label, make, device)
        runs[0].compile(force=False)
        return contender

    say("paths that fit")
    paths = problem.with_path("auto", precision, workload.cohort).gradient_paths
    taken = paths.chosen
    known = name if workload.build is None else ""  # the loops are for the plain algorithms
    reference, by_hand = plain(known, algorithm, problem, workload.cohort, paths.precision)
    contenders = {}
    for path in paths.paths:
        say(f"{path}: start-up")
        contenders[path] = begun(path, path)
    contenders[reference] = started(reference, by_hand, device)
    say(f"{SEEDS} seeds: start-up")
    several = begun("seeds", seed=list(range(SEEDS)))
    say("rounds")
    # If rounds are slow, one round of several seeds is enough: it is five times the work.
    slow = several.once > PATIENCE * seconds
    race([*contenders.values(), *([] if slow else [several])], seconds, device)
    relative = (several.once if slow else several.seconds) / contenders[taken].seconds
    counted = run()
    before = counted.counts.gradients  # at the start
    counted.advance()
    gradients = counted.counts.gradients - before
    images = gradients * workload.batch
    rows = [row(c, steps, images, contenders[reference]) for c in contenders.values()]
    return {
        "precision": paths.precision,
        "gradients_per_round": gradients,
        "reference": reference,
        "chosen": taken,
        "paths": {c.name: r for c, r in zip(contenders.values(), rows, strict=True)},
        "seeds": SEEDS,
        "seeds_relative_time": relative,
    }


def row(one: Contender, steps: int, images: int, reference: Contender) -> dict[str, Any]:
    """`ms_per_step` is one local step of all clients that take part; the blocks give the spread."""
    step = 1000 / steps
    return {
        "ms_per_step": step * one.seconds,
        "ms_per_step_min": step * min(one.blocks),
        "ms_per_step_max": step * max(one.blocks),
        "rounds_per_second": 1 / one.seconds,
        "images_per_second": images / one.seconds,
        "peak_memory_mb": None if one.peak is None else one.peak / 1e6,
        "startup_seconds": one.startup,
        "ratio_to_reference": one.speed_to(reference),
        "seconds_per_round": one.blocks,
    }


def plain(name: str, algorithm: Algorithm, problem: Neural, cohort: int, precision: str) -> tuple[str, Maker]:
    """The reference of an algorithm: a loop written by hand, if there is one, else the sequential engine, which runs
    one client after the other with ordinary autograd."""
    if name not in HAND_WRITTEN:
        return "sequential", lambda: Run(algorithm, problem, cohort, engine="sequential").advance

    def maker() -> Callable[[], object]:
        draws = loop.LoopDraws(problem, cohort, algorithm.steps)
        with rounding(precision):
            by_hand = HAND_WRITTEN[name](problem, algorithm, draws)

        def advance() -> None:
            with rounding(precision):
                by_hand.round(draws.round())

        return advance

    return PLAIN, maker


HAND_WRITTEN: dict[str, Callable[[Neural, Any, loop.LoopDraws], loop.LoopFedAvg | loop.LoopFedDA]] = {
    "fedavg": lambda problem, algorithm, draws: loop.LoopFedAvg(problem, algorithm.lr),
    "fedda-mvr": lambda problem, algorithm, draws: loop.LoopFedDA(problem, algorithm, draws.everyone()),
}


@contextmanager
def rounding(precision: str) -> Iterator[None]:
    """The same precision for the loop as for the paths."""
    with allow_tf32(precision != "float32"), torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        yield
