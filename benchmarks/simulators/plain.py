"""FedAvg as the plain PyTorch loop over clients of fedda.bench."""

import time

import shared
import torch
from with_fedda import problem

from fedda.bench.loop import LoopDraws, LoopFedAvg


def main():
    job = shared.job()
    own = problem(job)
    draws, loop = LoopDraws(own, job.settings.cohort, job.settings.steps, job.seed), LoopFedAvg(own, job.settings.lr)
    ends = []
    for _ in range(job.rounds):
        loop.round(draws.round())
        ends.append(time.time())
    model = job.model()
    model.load_state_dict(dict(zip(model.state_dict(), loop.server, strict=True)))
    shared.report("plain loop", torch.__version__, job, ends, model)


if __name__ == "__main__":
    main()
