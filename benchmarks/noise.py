"""What a private Gaussian number costs: ChaCha20 with Box and Muller (ours), and opendp's sampler if it is there.

    python benchmarks/noise.py                    # d = 1e6 and [r, d] = [50, 1e6]
    python benchmarks/noise.py --shapes 1e4 10x1e4

opendp is not needed by fedda: `pip install opendp` to compare. It draws exactly, number by number, so it is timed on at
most `--most` numbers and its time for the whole shape is the product.
"""

import argparse
import math
import time
from importlib.util import find_spec

from fedda.aggregation import gaussian


def chacha20(n: int) -> None:
    gaussian.normal(gaussian.new_key(), (n,))


def opendp(n: int) -> None:
    import opendp.prelude as dp

    dp.enable_features("contrib", "honest-but-curious")
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.l2_distance(T=float)
    dp.m.make_gaussian(*space, scale=1.0)([0.0] * n)


def nanoseconds(draw, n: int) -> float:  # type: ignore[no-untyped-def]
    draw(min(n, 1000))
    began = time.perf_counter()
    draw(n)
    return (time.perf_counter() - began) / n * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1e6", "50x1e6"])
    parser.add_argument("--most", type=float, default=1e5, help="numbers that opendp is timed on")
    given = parser.parse_args()
    print("| shape | generator | ns per number | seconds for the shape |\n|---|---|---|---|")
    for shape in given.shapes:
        n = math.prod(int(float(part)) for part in shape.split("x"))
        each = nanoseconds(chacha20, n)
        print(f"| {shape} | ChaCha20 | {each:.1f} | {each * n / 1e9:.3g} |", flush=True)
        if find_spec("opendp") is None:
            print(f"| {shape} | opendp | not installed | |")
            continue
        each = nanoseconds(opendp, min(n, int(given.most)))
        print(f"| {shape} | opendp | {each:.0f} | {each * n / 1e9:.3g} |", flush=True)


if __name__ == "__main__":
    main()
