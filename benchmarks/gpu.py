"""The figures of one GPU in docs/performance.md, in the paper's CIFAR-10 task on random images, which changes no time.

python benchmarks/gpu.py [start] [speed] [loop] [run] [pfl] [memory] [population]
"""

import os
import subprocess
import sys
import tempfile
import time

import torch
from pfl_cifar10 import simple_cnn

import fedda
from fedda.bench import loop
from fedda.bench.measure import HAND_WRITTEN, rounding
from fedda.bench.timing import timed
from fedda.engines import Vectorised
from fedda.problems import models

ALGORITHMS = ("fedavg", "fedda-mvr")


def images(samples=50_000, clients=10, test=10_000, model=None, batch=16):
    torch.manual_seed(0)
    network, loss = model or models.cnn((3, 32, 32), 10)
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (samples + test, 3, 32, 32), dtype=torch.uint8, generator=g)
    y = torch.randint(0, 10, (samples + test,), generator=g)
    owner, scale = torch.arange(samples) % clients, (torch.full((3, 1, 1), 120.0), torch.full((3, 1, 1), 60.0))
    held = x[samples:], y[samples:]
    made = fedda.problem(network, loss, x=x[:samples], y=y[:samples], client=owner, test=held, batch=batch, scale=scale)
    return made.to("cuda")


def clock(advance, rounds, steps=5):
    """Milliseconds a step: the median of five blocks, the least and the most."""
    for _ in range(3):
        advance()
    times = [timed(advance, rounds, torch.device("cuda")) / rounds / steps * 1e3 for _ in range(5)]
    return sorted(times)[2], min(times), max(times)


def speed():
    problem = images()
    for precision in ("tf32", "bf16", "float32"):
        for name in ALGORITHMS:
            one = None
            for seeds in (0, [0, 1, 2, 3, 4]):
                run = engine = None  # of the one before, whose memory would count
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                began, engine = time.perf_counter(), Vectorised(precision=precision)
                run = fedda.Run(fedda.make(name), problem, seed=seeds, force=True, engine=engine)
                run.advance()
                torch.cuda.synchronize()
                start = time.perf_counter() - began
                ms, least, most = clock(run.advance, 60 if precision != "float32" else 20)
                one = one or ms
                how = f"{run.problem.gradient_paths.chosen}, {'graph' if run.graph else 'eager'}"
                peak = torch.cuda.max_memory_allocated() / 1e9
                print(
                    f"{precision} {name} seeds {seeds}: {ms:.4f} ms/step ({least:.4f}-{most:.4f}), {ms / one:.2f} x one"
                )
                print(f"    first round {start:.1f} s, {how}, {peak:.2f} GB", flush=True)


def plain():
    problem = images()
    for name in ALGORITHMS:
        algorithm, draws = fedda.make(name), loop.LoopDraws(problem, 10, 5)
        by_hand = HAND_WRITTEN[name](problem, algorithm, draws)
        with rounding("tf32"):
            ms = clock(lambda by_hand=by_hand, draws=draws: by_hand.round(draws.round()), 2)[0]
        print(f"plain loop, {name}: {ms:.2f} ms/step", flush=True)


def whole(names=ALGORITHMS):
    problem = images()
    for name in reversed(names):
        began = time.perf_counter()
        result = fedda.train(fedda.make(name), problem, rounds=4000, every=100, force=True)
        took, rounds = time.perf_counter() - began, result.history[-1]["seconds"]
        print(
            f"20,000 steps of {name}, 41 evaluations of 60,000 images: {took:.2f} s, rounds {rounds:.2f} s", flush=True
        )


def pfl():
    """Of pfl-research, without its dropout; see benchmarks/pfl_cifar10.py for real images."""
    torch.manual_seed(0)
    problem = images(clients=1000, model=(simple_cnn(), models.cross_entropy), batch=10)
    began = time.perf_counter()
    fedda.train(fedda.make("fedavg", lr=0.1, steps=5), problem, rounds=1500, every=10, cohort=50)
    print(f"pfl-research's CIFAR-10 workload: {time.perf_counter() - began:.1f} s", flush=True)


def memory():
    torch.cuda.set_per_process_memory_fraction(8e9 / torch.cuda.get_device_properties(0).total_memory)
    torch.cuda.empty_cache()  # of the parts before
    problem = images(clients=1000, test=1000)
    for name in ALGORITHMS:
        torch.cuda.reset_peak_memory_stats()
        run = fedda.Run(fedda.make(name), problem, cohort=1000, force=True, engine=Vectorised(memory_gb=2.0))
        ms, peak = clock(run.advance, 2)[0], torch.cuda.max_memory_reserved() / 1e9
        print(f"1,000 clients, {name}: {ms:.2f} ms/step, {peak:.2f} GB reserved", flush=True)
    torch.cuda.set_per_process_memory_fraction(1.0)


def population():
    for clients in (1_000, 10_000, 100_000):
        run = fedda.Run(fedda.make("fedavg"), images(100_000, clients, test=100), cohort=100)
        print(f"100 of {clients:,} clients: {5 * clock(run.advance, 20)[0]:.3f} ms/round", flush=True)


def start():
    """In processes of their own: nothing compiled before, and all of it."""
    with tempfile.TemporaryDirectory() as folder:
        kept = os.environ | {"FEDDA_DATA": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        for word in ("cold", "warm"):
            for part in ("first", "long"):
                began = time.perf_counter()
                said = subprocess.run(
                    [sys.executable, __file__, part], env=kept, capture_output=True, text=True, check=True
                )
                took = time.perf_counter() - began
                print(f"{word}, a process of {part}: {took:.2f} s\n{said.stdout}{said.stderr}", flush=True)


def first():
    problem = images()
    torch.cuda.synchronize()
    began = time.perf_counter()
    fedda.Run(fedda.make("fedda-mvr"), problem, force=True).advance()
    torch.cuda.synchronize()
    print(f"a run made, and its first round: {time.perf_counter() - began:.2f} s", flush=True)


def long():
    whole(("fedda-mvr",))


if __name__ == "__main__":
    parts = {"start": start, "speed": speed, "loop": plain, "run": whole, "pfl": pfl, "memory": memory}
    parts |= {"population": population}
    print(torch.cuda.get_device_name(), torch.__version__)
    for word in sys.argv[1:] or parts:
        (parts | {"first": first, "long": long})[word]()
