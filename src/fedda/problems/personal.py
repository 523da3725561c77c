"""Evaluation with parameters that stay on their clients: each client's samples, with that client's own parameters.

A client's point is the shared parameters, its personal ones, and the statistics of any BatchNorm. If the name of a
BatchNorm fits `personal`, its statistics are those of the client's own samples (FedBN, Li et al. 2021); otherwise they
are those of all clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .evaluation import unchanged, zero_unless

if TYPE_CHECKING:
    from .evaluation import Evaluation, Shard, Sum, Totals
    from .neural import Batch, Neural


def client_points(
    problem: Neural, evaluation: Evaluation, x: Tensor, weights: Tensor, mine: Shard, add: Sum = unchanged
) -> tuple[Tensor, Tensor]:
    """The points of this process's clients, [replicas, clients, n], at shared parameters x [replicas, d]; and the mean
    point of all clients, [replicas, n], for samples without an owner. The mean has the weights of the clients."""
    shard = mine(problem.clients)
    count = shard.stop - shard.start
    personal = problem.personal_values
    if personal is None:  # before any training
        personal = problem.full_point()[problem.d :]
    personal = personal.expand(len(x), count, problem.d_personal)
    share = (weights[shard] / weights.sum())[:, None]
    points = torch.cat([x[:, None].expand(-1, count, -1), personal], dim=-1)
    (mean,) = add([(share * personal.double()).sum(dim=1)])
    mean = torch.cat([x, mean.to(x.dtype)], dim=-1)
    norms = problem.batch_norms
    if not norms.layers:
        return points, mean
    moments = torch.zeros(len(x), count, norms.size, dtype=torch.float64, device=x.device)
    for i in range(count):
        moments[:, i] = norms.client_moments(evaluation, points[:, i], shard.start + i)
    (pooled,) = add([(share * moments).sum(dim=1)])
    statistics = torch.where(problem.local_statistics, moments, pooled[:, None])
    statistics, pooled = (norms.from_moments(v).to(x.dtype) for v in (statistics, pooled))
    return torch.cat([points, statistics], dim=-1), torch.cat([mean, pooled], dim=-1)


def totals(
    problem: Neural, evaluation: Evaluation, x: Tensor, weights: Tensor, mine: Shard, add: Sum, samples: int | None
) -> Totals:
    """The metrics of `Evaluation`, each client's samples at its own point, and a metric of a whole set for each client.
    Held-out samples without an owner are evaluated at the mean point."""
    points, mean = client_points(problem, evaluation, x, weights, mine, add)
    shard, out = mine(problem.clients), dict[str, tuple[Tensor, Tensor]]()
    clients = range(shard.start, shard.stop)

    def count(part: str, point: Tensor, data: Batch, index: slice | Tensor, weight: float) -> None:
        size = index.stop - index.start if isinstance(index, slice) else len(index)
        sizes = torch.tensor([size], device=x.device)
        means, outputs = evaluation.by_client(point, data, index, sizes)
        for name, values in (means | evaluation.set_values(outputs, sizes)).items():
            zero = torch.zeros_like(values[:, 0])
            before, total = out.get(f"{part}_{name}", (zero, zero.new_tensor(0.0)))
            out[f"{part}_{name}"] = before + zero_unless(weight, weight * values[:, 0]), total + weight

    count("train", mean, problem.data, slice(0, 1), 0)  # a process without clients knows the metrics as well
    for i, k in enumerate(clients):
        data, index, sizes = evaluation.training_samples(slice(k, k + 1), samples)
        if bool(sizes.any()):
            count("train", points[:, i], data, index, float(weights[k]))
    for part, data in problem.held_out.items():
        count(part, mean, data, slice(0, 1), 0)
        owner = problem.owners.get(part)
        if owner is not None:
            ends = torch.searchsorted(owner, torch.arange(problem.clients + 1, device=owner.device)).tolist()
            for i, k in enumerate(clients):
                if ends[k + 1] > ends[k]:
                    count(part, points[:, i], data, slice(ends[k], ends[k + 1]), ends[k + 1] - ends[k])
            continue
        span = mine(data.samples)
        if not evaluation.loss_is_mean or problem.set_metrics:  # one process evaluates all samples
            span = slice(0, data.samples if span.start == 0 else 0)
        if span.stop > span.start:
            count(part, mean, data, span, span.stop - span.start)
    return out


def client_metrics(
    problem: Neural, evaluation: Evaluation, x: Tensor, weights: Tensor, mine: Shard, add: Sum
) -> dict[str, Tensor]:
    """The metrics of this process's clients, [replicas, clients], each at its own point."""
    points, _ = client_points(problem, evaluation, x, weights, mine, add)
    shard = mine(problem.clients)
    columns: dict[str, list[Tensor]] = {}
    for i, k in enumerate(range(shard.start, shard.stop)):
        for part in ("train", *problem.owners):
            for name, values in evaluation.held_out_values(points[:, i], part, slice(k, k + 1)).items():
                columns.setdefault(f"{part}_{name}", []).append(values)
    return {name: torch.cat(values, dim=-1) for name, values in columns.items()}
