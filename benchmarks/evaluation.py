"""The share of a run's time that evaluation takes by default: a small CNN on 60,000 random images of 28x28.

python benchmarks/evaluation.py --rounds 400
"""

import argparse
import time

import torch

import fedda


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--evaluate", default=None, help="all, or a number of training samples")
    options = parser.parse_args()
    torch.manual_seed(0)
    n = options.samples
    x, y = torch.randint(0, 256, (n + n // 6, 1, 28, 28), dtype=torch.uint8), torch.randint(0, 10, (n + n // 6,))
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(32 * 49, 10),
    )  # fmt: skip
    problem = fedda.problem(
        network, torch.nn.functional.cross_entropy, x=x[:n], y=y[:n], client=torch.arange(n) % 100, batch=16,
        test=(x[n:], y[n:]), scale=(128.0, 64.0),
    )  # fmt: skip
    algorithm = fedda.make("fedavg", lr=0.05, steps=5)
    fedda.train(algorithm, problem, rounds=2, cohort=10, evaluate=100)  # measures the fastest path and threads
    evaluate = int(options.evaluate) if options.evaluate and options.evaluate != "all" else options.evaluate
    spent, plain = [], fedda.Run.evaluate

    def timed(run, *arguments):  # type: ignore[no-untyped-def]
        first = time.process_time()
        rows = plain(run, *arguments)
        spent.append(time.process_time() - first)
        return rows

    fedda.Run.evaluate = timed  # type: ignore[method-assign]
    began, first = time.perf_counter(), time.process_time()
    history = fedda.train(algorithm, problem, rounds=options.rounds, cohort=10, evaluate=evaluate).history
    work = time.process_time() - first
    total, rounds = time.perf_counter() - began, history[-1]["seconds"]
    samples = [row.get("train_samples", n) for row in history]
    print(f"{options.rounds} rounds, {len(history)} evaluations on {samples[0]:,} to {samples[-1]:,} training samples")
    print(f"evaluation {sum(spent):.2f} of {work:.2f} s of the processor: {sum(spent) / work:.1%}")
    print(f"rounds {rounds:.2f} s, everything else {total - rounds:.2f} s: {1 - rounds / total:.1%} of the time")


if __name__ == "__main__":
    main()
