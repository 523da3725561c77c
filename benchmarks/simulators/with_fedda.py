"""FedAvg in fedda, on the vectorised engine."""

import time

import shared
import torch

import fedda
from fedda.problems.models import cross_entropy


def problem(job):
    """The shared samples and model as a problem of fedda's."""
    samples = job.samples()
    return fedda.problem(
        job.model(),
        cross_entropy,
        x=samples.x.flatten(0, 1),
        y=samples.y.flatten(),
        client=torch.arange(job.settings.clients).repeat_interleave(samples.y.shape[1]),
        batch=job.settings.batch,
    )


def main():
    job = shared.job()
    algorithm = fedda.make("fedavg", lr=job.settings.lr, steps=job.settings.steps)
    run = fedda.Run(algorithm, problem(job), cohort=job.settings.cohort, seed=job.seed, engine="vectorised")
    ends = []
    for _ in range(job.rounds):
        run.advance()
        ends.append(time.time())
    model = job.model()
    torch.nn.utils.vector_to_parameters(run.server.x[0], model.parameters())
    shared.report("fedda", fedda.__version__, job, ends, model)


if __name__ == "__main__":
    main()
