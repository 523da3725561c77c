"""What every program of the comparison shares: the workloads, the samples, the model, the local steps and the report.

It needs numpy and torch alone, so that it runs in the environment of any simulator.
"""

import argparse
import json
import statistics
import time
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

BEGAN = time.time()
BLOCKS = 4  # parts of the timed rounds, each of which gives one figure


class Workload(NamedTuple):
    clients: int
    cohort: int
    lr: float
    rounds: int
    steps: int = 5
    batch: int = 16


WORKLOADS = {
    "small": Workload(clients=100, cohort=10, lr=0.5, rounds=60),
    "cnn": Workload(clients=10, cohort=10, lr=0.1, rounds=10),
}


class Samples(NamedTuple):
    """Those of client c are x[c], y[c]: the very same arrays for every program, from a file that the driver writes."""

    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor


class Job(NamedTuple):
    """What a program is asked to do."""

    workload: str
    data: str
    rounds: int
    seed: int
    threads: int
    began: float

    @property
    def settings(self) -> Workload:
        return WORKLOADS[self.workload]

    def samples(self) -> Samples:
        return read(self.data)

    def model(self) -> nn.Module:
        """The first model, which the seed alone decides."""
        torch.manual_seed(self.seed)
        return mlp() if self.workload == "small" else cnn()

    def batches(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The samples of all local steps of one client in one round, drawn with replacement."""
        x, y = self.samples()[:2]
        index = torch.randint(len(y[client]), (self.settings.steps * self.settings.batch,))
        return x[client][index], y[client][index]


@lru_cache(maxsize=1)
def read(file: str) -> Samples:
    with np.load(file) as arrays:
        return Samples(*(torch.from_numpy(arrays[name]) for name in Samples._fields))


def job() -> Job:
    """What the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--data", required=True, help="the .npz file that run.py writes")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--began", type=float, default=BEGAN, help="when the process was started, in seconds")
    asked = Job(**vars(parser.parse_args()))
    torch.set_num_threads(asked.threads)
    return asked


# The models are those of fedda.problems.models, which another simulator's environment does not have.
def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def cnn() -> nn.Module:
    body: list[nn.Module] = []
    for channels in (3, 64, 64, 64):
        body += [nn.Conv2d(channels, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


@torch.no_grad()
def accuracy(model: nn.Module, samples: Samples) -> float:
    parts = zip(samples.x_test.split(500), samples.y_test.split(500), strict=True)
    right = sum(int((model(x).argmax(dim=1) == y).sum()) for x, y in parts)
    return right / len(samples.y_test)


def report(simulator: str, version: str, job: Job, ends: list[float], model: nn.Module) -> None:
    """One line of JSON; `ends` are the times at which the rounds ended."""
    warm = max(1, job.rounds // 5)  # traces, caches and first allocations are part of no round
    size = max(1, (job.rounds - warm) // BLOCKS)
    edges = ends[warm - 1 :: size]
    seconds = [(end - begin) / size for begin, end in pairwise(edges)]
    result = {
        "simulator": simulator,
        "version": version,
        "workload": job.workload,
        "seconds_per_round": seconds,
        # from the start of the process to the end of the first round, less a usual round
        "startup_seconds": ends[0] - job.began - statistics.median(seconds),
        "rounds": job.rounds,
        "final_accuracy": accuracy(model, job.samples()),
        "threads": job.threads,
    }
    print(json.dumps(result), flush=True)
