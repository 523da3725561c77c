"""The rows that a run reports: counts so far and metrics of the model, one row for each seed."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .core import Client, on_client

if TYPE_CHECKING:
    from .run import Run

NEAR_ZERO = 0.01  # a weight counts for the density if it is larger


def report(run: Run, detail: bool, samples: int | None = None) -> list[dict[str, Any]]:
    """The rows of a run; `detail` adds the density of every layer and the gradient mapping. With `samples`, the metrics
    of the training samples are estimated from about so many."""
    x = run.server.x.squeeze(-2)
    said: dict[str, Any] = {}
    if samples is not None:
        counted = run.problem.evaluated()
        samples = None if counted is None or samples >= counted.train else samples
        said = {"train_samples": run.problem.evaluated_samples(samples)}
    metrics = evaluation(run, x, samples) | sparsity(x) | {"max_x": x.abs().amax(dim=-1)}
    prox = getattr(run.algorithm, "prox", None)
    if prox is not None:
        at = run.server.x  # [..., 1, d], as penalties with a weight for each replica expect
        metrics["objective"] = metrics["train_loss"] + prox.value(at).double().squeeze(-1)
        metrics["infeasible"] = (prox.project(at) - at).double().norm(dim=-1).squeeze(-1)
    if detail:
        metrics |= layers(run, x) | gradient_mapping(run)
    # The numbers of `monitor` are [..., 1, 1], metrics are [...].
    metrics |= {k: v.expand(*run.lead, 1, 1)[..., 0, 0] for k, v in run.algorithm.monitor(run.server).items()}
    # A replica that has ended gets NaN: its last model would look like a result.
    columns = {k: torch.where(run.ended, torch.nan, v.double()).reshape(-1).tolist() for k, v in metrics.items()}
    counts = {"steps": run.round * run.algorithm.steps, **asdict(run.total_counts())}
    idle, dropped = (v.reshape(-1).tolist() for v in (run.total_idle(), run.dropped))
    spent = {} if run.privacy is None else run.privacy.row(run.round)
    return [
        {"round": run.round, "seed": seed, **counts, "gradients": counts["gradients"] - idle[i], "dropped": dropped[i]}
        | {name: column[i] for name, column in columns.items()}
        | said
        | spent
        for i, seed in enumerate(run.seeds)
    ]


def evaluation(run: Run, x: Tensor, samples: int | None) -> dict[str, Tensor]:
    """The problem's metrics. Every rank evaluates its part of the data."""
    problem, weights, world = run.simulation.personalised(), run.simulation.objective, run.world
    subset = {} if samples is None else {"samples": samples}  # not every problem can take it
    if world.size == 1:
        return problem.evaluate(x, weights, **subset)
    totals = problem.totals(x, weights, world.mine, world.sum, **subset)
    sums = world.sum([v for pair in totals.values() for v in pair])
    values = {name: total / weight for name, total, weight in zip(totals, sums[::2], sums[1::2], strict=True)}
    return run.problem.finished(values)


def sparsity(x: Tensor, suffix: str = "") -> dict[str, Tensor]:
    return {
        f"density{suffix}": (x.abs() > NEAR_ZERO).double().mean(dim=-1),
        f"nonzero{suffix}": (x != 0).double().mean(dim=-1),
    }


def layers(run: Run, x: Tensor) -> dict[str, Tensor]:
    """The sparsity of every layer."""
    layout = run.problem.layout
    parts = x.split([math.prod(shape) for _, shape in layout], dim=-1)
    named = [sparsity(part, f":{name}") for (name, _), part in zip(layout, parts, strict=True)]
    return {name: value for layer in named for name, value in layer.items()}


def gradient_mapping(run: Run) -> dict[str, Tensor]:
    (gradient,) = run.simulation.everyone().average(full_gradient, run.server.x)
    mapping = run.algorithm.mapping(run.server, gradient)
    return {} if mapping is None else {"gradient_mapping": mapping[..., 0, 0]}


@on_client
def full_gradient(client: Client, x: Tensor) -> tuple[Tensor, ...]:
    return (client.full_gradient(x),)
