"""Rounds a second of the two engines on the small workload: digits, MLP 64-32-10, 100 clients, 10 a round, 5 steps,
batch 16. Prints the ratio measured in one run, alternating the engines so that both meet the same machine. What the
paths of the vectorised engine cost, beside a plain loop: `fedda bench`.

    python benchmarks/engines.py
"""

import torch

import fedda
from fedda.bench.timing import race, started
from fedda.bench.workloads import SMALL


def main(seconds=1.0):
    problem = SMALL.problem()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, d = {problem.d}")
    print(f"{'algorithm':12} {'sequential':>12} {'vectorised':>12} {'ratio':>7}   rounds/s")
    for name in ("fedavg", "fedda-mvr"):
        algorithm = fedda.make(name, steps=SMALL.steps)
        engines = [
            started(
                engine,
                lambda a=algorithm, e=engine: fedda.Run(a, problem, SMALL.cohort, engine=e).advance,
                problem.device,
            )
            for engine in ("sequential", "vectorised")
        ]
        race(engines, seconds, problem.device)
        slow, fast = engines
        print(f"{name:12} {1 / slow.seconds:12.1f} {1 / fast.seconds:12.1f} {fast.speed_to(slow):7.1f}", flush=True)


if __name__ == "__main__":
    main()
