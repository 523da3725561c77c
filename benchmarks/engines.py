"""Rounds a second of the two engines on the small workload: digits, MLP 64-32-10, 100 clients, 10 a round, 5 steps,
batch 16. Prints the ratio measured in one run, alternating the engines so that both meet the same machine.

    python benchmarks/engines.py
"""

import statistics
import time

import torch

import fedda

ROUNDS = {"sequential": 10, "vectorised": 100}


def rate(run, rounds):
    began = time.perf_counter()
    for _ in range(rounds):
        run.step()
    return rounds / (time.perf_counter() - began)


def main(repeats=5):
    problem = fedda.load("digits", clients=100, partition="iid", model="mlp", hidden=32, batch=16)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, d = {problem.d}")
    print(f"{'algorithm':12} {'sequential':>12} {'vectorised':>12} {'ratio':>7}   rounds/s, median of {repeats}")
    for name in ("fedavg", "fedda-mvr"):
        runs = {e: fedda.Run(fedda.make(name), problem, cohort=10, engine=e) for e in ROUNDS}
        for run in runs.values():
            run.step()  # traces and caches are part of no round
        rates = {e: [] for e in ROUNDS}
        for _ in range(repeats):
            for engine, run in runs.items():
                rates[engine].append(rate(run, ROUNDS[engine]))
        slow, fast = (statistics.median(rates[e]) for e in ROUNDS)
        print(f"{name:12} {slow:12.1f} {fast:12.1f} {fast / slow:7.1f}", flush=True)


if __name__ == "__main__":
    main()
