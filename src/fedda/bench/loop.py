"""Federated rounds as plain PyTorch loops over clients, written by hand: the reference for the engines' speed.

One module, one client after the other, one `backward` per gradient. Steps are taken in place, which on small models is
as fast as `torch.optim.SGD`. A round takes its batches as an argument, so a test can pass those of an engine.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ..problems.neural import Batch, Neural, trainable

Batches = Sequence[Iterable[Batch]]  # for each client of the round, one batch per step


class LoopDraws:
    """The clients of a round and their samples, drawn in ordinary PyTorch, with replacement."""

    def __init__(self, problem: Neural, cohort: int, steps: int, seed: int = 0):
        self.problem, self.cohort, self.steps = problem, cohort, steps
        self.spans = list(zip(problem.offsets.tolist(), problem.sizes.tolist(), strict=True))
        self.clients = torch.Generator().manual_seed(seed)
        self.samples = torch.Generator(problem.device).manual_seed(seed)

    def round(self) -> Batches:
        chosen = torch.randperm(self.problem.clients, generator=self.clients)[: self.cohort].tolist()
        return [self.of(client, self.steps) for client in chosen]

    def everyone(self) -> Batches:
        return [self.of(client, 1) for client in range(self.problem.clients)]

    def of(self, client: int, number: int) -> Iterator[Batch]:
        (first, size), problem = self.spans[client], self.problem
        for _ in range(number):
            index = torch.randint(size, (problem.batch_size,), generator=self.samples, device=problem.device)
            yield problem.standardised(problem.pick(problem.data, first + index))


class LoopFedAvg:
    """Local SGD; `server` holds the model's parameters, one tensor each."""

    def __init__(self, problem: Neural, lr: float):
        self.model, self.loss, self.lr = copy.deepcopy(problem.model), problem.loss, lr
        self.parameters = [p for _, p in trainable(self.model)]
        self.server = [p.detach().clone() for p in self.parameters]

    def round(self, batches: Batches) -> None:
        means = [torch.zeros_like(value) for value in self.server]
        for samples in batches:
            self.local(samples)
            for mean, p in zip(means, self.parameters, strict=True):
                mean += p.detach() / len(batches)
        self.server = means

    def local(self, batches: Iterable[Batch]) -> None:
        with torch.no_grad():
            for p, value in zip(self.parameters, self.server, strict=True):
                p.copy_(value)
        for x, y in batches:
            self.model.zero_grad()
            self.loss(self.model(x), y).backward()
            with torch.no_grad():
                for p in self.parameters:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=self.lr)


class LoopFedDA:
    """FedDA-MVR without a penalty: two gradients per step on one batch; its vectors are flat, as in the paper.

    `algorithm` gives the hyper-parameters: step sizes, the weight of the estimator, the decay and the floor of H.
    """

    def __init__(self, problem: Neural, algorithm: Any, first: Batches):
        self.model, self.loss, self.algorithm = copy.deepcopy(problem.model), problem.loss, algorithm
        self.parameters = [p for _, p in trainable(self.model)]
        self.c = float(algorithm.estimator.c)
        self.x = parameters_to_vector(self.parameters).detach().clone()
        self.nu = torch.stack([self.gradient(self.x, batch) for batches in first for batch in batches]).mean(dim=0)
        self.mu, self.t = torch.zeros_like(self.x), 0

    def round(self, batches: Batches) -> None:
        matrix, steps = self.algorithm.preconditioner, self.algorithm.steps
        H = self.mu.sqrt() + matrix.eps
        z, nu = torch.zeros_like(self.x), torch.zeros_like(self.x)
        for samples in batches:
            for mean, reply in zip((z, nu), self.local(samples, H), strict=True):
                mean += reply / len(batches)
        self.x, self.nu, self.t = self.x + z / H, nu, self.t + steps
        s = z / self.algorithm.lr(self.t - 1)
        self.mu = matrix.beta * self.mu + (1 - matrix.beta) * s**2

    def local(self, batches: Iterable[Batch], H: Tensor) -> tuple[Tensor, Tensor]:
        x, z, nu = self.x, torch.zeros_like(self.x), self.nu
        for t, batch in enumerate(batches, self.t):
            eta = self.algorithm.lr(t)
            z = z - eta * nu
            x, x_prev = self.x + z / H, x
            keep = 1 - min(1.0, self.c * eta**2)
            nu = self.gradient(x, batch) + keep * (nu - self.gradient(x_prev, batch))
        return z, nu

    def gradient(self, x: Tensor, batch: Batch) -> Tensor:
        vector_to_parameters(x, self.parameters)
        self.model.zero_grad()
        self.loss(self.model(batch.x), batch.y).backward()
        return torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None])
