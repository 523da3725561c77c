"""A rank of tests/test_plan.py: runs algorithms of an experiment and counts what is really handed to the transport."""

import json
import sys

import torch
import torch.distributed as dist

from fedda.engines import join
from fedda.experiments import find
from fedda.run import Run

SENT = {"all_reduce": 0, "handed": 0, "away": 0}


def counted():
    """Count bytes where torch.distributed takes them."""
    all_reduce, all_to_all, rank = dist.all_reduce, dist.all_to_all_single, dist.get_rank()

    def reduced(tensor, *rest, **how):
        SENT["all_reduce"] += tensor.nbytes
        return all_reduce(tensor, *rest, **how)

    def swapped(output, given, take, give, **how):
        assert len(given) == sum(give) and len(output) == sum(take)
        row = given[:1].nbytes if len(given) else 0
        SENT["handed"] += given.nbytes
        SENT["away"] += row * (sum(give) - give[rank])
        return all_to_all(output, given, take, give, **how)

    dist.all_reduce, dist.all_to_all_single = reduced, swapped


if __name__ == "__main__":
    torch.set_num_threads(1)
    experiment, rounds, out = find(sys.argv[1]).completed(), int(sys.argv[2]), sys.argv[3]
    world, found = join(), {}
    counted()
    problem = experiment.problem.build()
    for label in experiment.algorithms:
        run = Run(
            experiment.build(label), problem, experiment.cohort, experiment.seeds, engine="distributed", force=True
        )
        SENT.update(dict.fromkeys(SENT, 0))
        for _ in range(rounds):
            run.advance()
        simulation = run.simulation
        found[label] = SENT | {
            "memory": sum(v.nbytes for v in simulation.memory.values()),
            "server": sum(v.nbytes for v in run.server),
            "books": sum(v.nbytes for v in (problem.sizes, problem.offsets, simulation.weights)),
        }
    with open(f"{out}.{world.rank}", "w") as file:
        json.dump(found, file)
