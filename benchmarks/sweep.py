"""A grid of 24 points as replicas of one program, against 24 programs: digits, MLP, the same numbers.

python benchmarks/sweep.py [rounds]
"""

import json
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch

from fedda.experiments import find
from fedda.experiments.overrides import override
from fedda.experiments.sweep import Sweep, search
from fedda.progress import Silence

POINTS = {"lr": (0.08, 0.16, 0.32, 0.64), "momentum": (0.0, 0.25, 0.5, 0.75, 0.9, 0.95)}


def values(grids, rounds):
    """Seconds, and what every point came to."""
    experiment = override(find("digits"), rounds, "fedcm", "0")
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        found = search(Sweep(experiment, grids), Path(folder) / "sweep", Silence())
        seconds = time.perf_counter() - began
    points = found["algorithms"]["fedcm"]["points"]
    return seconds, {json.dumps(point["values"]): point["value"] for point in points}


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    torch.set_num_threads(1)
    values(["fedcm.lr=0.1"], 2)  # imports, the first trace
    together, all_at_once = values([f"fedcm.{word}={','.join(map(str, v))}" for word, v in POINTS.items()], rounds)
    apart, one_by_one = 0.0, {}
    for point in product(*POINTS.values()):
        seconds, found = values([f"fedcm.{w}={v}" for w, v in zip(POINTS, point, strict=True)], rounds)
        apart, one_by_one = apart + seconds, one_by_one | found
    worst = max(abs(all_at_once[key] - one_by_one[key]) for key in one_by_one)
    print(f"24 points, {rounds} rounds: one program {together:.2f} s, 24 programs {apart:.2f} s")
    print(f"ratio {together / apart:.3f}, largest difference of validation accuracy {worst:.1e}")


if __name__ == "__main__":
    main()
