"""The maps that iterate, at d = 1e6 for 64 clients in a diagonal metric: iterations used, and the time of one as a
ratio to `torch.clone` of the same [64, d] tensor, measured in turn in one run. Target: at most 16, and at most 12.

    python benchmarks/prox.py
"""

import statistics
import time

import torch

import fedda
from fedda.rules.prox import balls

CLIENTS, D, REPEATS = 64, 1_000_000, 3


def seconds(work):
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def iterations(work):
    """The most Newton steps over the whole model that a block of rows took in `work`, that from a guess included."""
    most, sizes, climb, level = 0, [], balls.climb, balls.level

    def sized(v, *rest):
        sizes.append(v.shape[-1])
        th = level(v, *rest)
        sizes.pop()
        return th

    def counted(step, m, at_most, tol=0.0):
        nonlocal most
        steps = [1] if sizes else []
        m = climb(lambda m: steps.append(1) or step(m), m, at_most, tol)
        if not sizes or sizes[-1] == D:
            most = max(most, len(steps))
        return m

    balls.climb, balls.level = counted, sized
    work()
    balls.climb, balls.level = climb, level
    return most


def line(p, u, q):
    def work():
        return p(u, q, 1.0)

    used = iterations(work)
    clone, own = (
        statistics.median(times)
        for times in zip(*((seconds(u.clone), seconds(work)) for _ in range(REPEATS)), strict=True)
    )
    name, dtype = f"{type(p).__name__}({p.radius})", str(u.dtype).removeprefix("torch.")
    return f"{name:12} {dtype:8} {used:10} {1e3 * clone:9.0f} {1e3 * own:9.0f} {own / used / clone:16.2f}"


def main():
    g = torch.Generator().manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, [{CLIENTS}, {D}], median of {REPEATS}")
    print(f"{'map':12} {'dtype':8} {'iterations':>10} {'clone ms':>9} {'map ms':>9} {'ratio/iteration':>16}")
    u = torch.randn(CLIENTS, D, generator=g)
    q = 0.01 + torch.rand(1, D, generator=g) ** 4  # two orders of magnitude
    for kind in (fedda.prox.L1Ball, fedda.prox.L2Ball, fedda.prox.Simplex):
        for radius in (1, 50):
            print(line(kind(radius), u, q), flush=True)


if __name__ == "__main__":
    main()
