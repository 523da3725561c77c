"""The cost of the exchange between real processes that gloo joins on this machine.

Measured is the time of a round beyond its compute, beside a bare all-reduce of the same bytes on the same processes: a
round, the same without the exchange, and the same with a bare all-reduce in place of the exchange. Target: at most 1.3
times. The same is measured without the compute, for sums that are known already, and for a bare all-reduce alone.

The contenders take turns, so all meet the same machine; lower deciles are turns that no other program disturbed.

    python benchmarks/distributed.py [--json docs/performance/distributed.json]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import fedda
from fedda.bench.machine import machine
from fedda.bench.workloads import noise
from fedda.engines import Distributed, join
from fedda.run import Run

BAR = 1.3
CONTENDERS = ("round", "compute", "bare_round", "sums", "sums_compute", "bare_sums", "bare_alone")
PARTS = {  # what is one contender beyond another
    "overhead": ("round", "compute"), "bare": ("bare_round", "compute"),
    "overhead_of_sums": ("sums", "sums_compute"), "bare_of_sums": ("bare_sums", "sums_compute"),
}  # fmt: skip


# -- one of the processes ----------------------------------------------------------------------------------------------
class Apart(Distributed):
    """The same without the exchange: every rank goes its own way."""

    def average(self, cohort, task, down):
        totals, weights, dtypes = self.sums(cohort, self.world.mine(cohort.size), task, down)
        return tuple((total / weights).to(dtype) for total, dtype in zip(totals, dtypes, strict=True))


class Bare(Apart):
    """The same with an all-reduce of the bytes that would travel, and of nothing else."""

    message = torch.zeros(0, dtype=torch.float64)

    def average(self, cohort, task, down):
        totals, weights, dtypes = self.sums(cohort, self.world.mine(cohort.size), task, down)
        dist.all_reduce(self.message)
        return tuple((total / weights).to(dtype) for total, dtype in zip(totals, dtypes, strict=True))


def still(kind, known):
    """An engine whose sums are there already."""

    class Still(kind):
        def sums(self, cohort, part, task, down):
            return known

    return Still


def overhead(hidden, turns):
    """Seconds of each contender, [contenders, turns], the slowest rank's: rows as in `CONTENDERS`."""
    world = join()
    cohort = 2 * world.size
    problem = noise((64,), clients=100, batch=1, samples=2, hidden=hidden)
    Bare.message = message = torch.zeros(problem.d + 1 + cohort, dtype=torch.float64)
    kinds = (Distributed, Apart, Bare)
    runs = [Run(fedda.make("fedavg", steps=1), problem, cohort, engine=kind()) for kind in kinds]
    same = runs[1].simulation.cohort(0, cohort)
    with torch.no_grad():
        known = Apart().sums(same, world.mine(cohort), runs[1].algorithm.local, tuple(runs[1].server))
    ready = [still(kind, known)() for kind in kinds]
    ways = [run.advance for run in runs]
    ways += [lambda e=e: e.average(same, None, ()) for e in ready]
    ways += [lambda: dist.all_reduce(message)]
    times = torch.zeros(len(ways), turns + turns // 10 + 1, dtype=torch.float64)
    for turn in range(times.shape[1]):
        for i in range(len(ways)):
            way = (turn + i) % len(ways)  # nobody always comes after the same
            dist.barrier()
            began = time.perf_counter()
            ways[way]()
            times[way, turn] = time.perf_counter() - began
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return {"parameters": problem.d, "bytes": message.nbytes, "seconds": times[:, -turns:].tolist()}


def rank(store, place, size, out, *arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, int(size)), rank=int(place), world_size=int(size))
    found = overhead(*map(json.loads, arguments))
    if place == "0":
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    world = join()
    world.host = None  # held to the end, its threads would outlive the interpreter, which aborts then
    world.leave()


# -- the one that starts them ------------------------------------------------------------------------------------------
def spawned(size, *arguments):
    """What the first of so many processes has found."""
    with tempfile.TemporaryDirectory() as folder:
        out, store = Path(folder) / "out.json", Path(folder) / "store"
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "rank", store, str(place), str(size), out, *map(json.dumps, arguments)],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for place in range(size)
        ]
        for process in processes:
            if process.wait():
                sys.exit(f"a process of {size} has failed")
        return json.loads(out.read_text())


def summary(own):
    """In ms: medians, of differences within a turn; of turns that nothing disturbed, differences of lower deciles."""
    seconds = dict(zip(CONTENDERS, map(torch.tensor, own.pop("seconds")), strict=True))
    for name, typical in (("", torch.Tensor.median), ("quiet_", lambda v: v.quantile(0.1))):
        for part, (more, less) in PARTS.items():
            a, b = seconds[more], seconds[less]
            took = (a - b).median() if not name else typical(a) - typical(b)
            own[f"{name}{part}_ms"] = 1e3 * float(took)
        own[f"{name}compute_ms"] = 1e3 * float(typical(seconds["compute"]))
        own[f"{name}bare_alone_ms"] = 1e3 * float(typical(seconds["bare_alone"]))
        own[f"{name}ratio"] = own[f"{name}overhead_ms"] / own[f"{name}bare_ms"]
        own[f"{name}ratio_of_sums"] = own[f"{name}overhead_of_sums_ms"] / own[f"{name}bare_of_sums_ms"]
    return own


def overheads(worlds, hiddens, turns):
    print("a round beyond its compute, beside a bare all-reduce of the same bytes; ms")
    heads = ("processes", "parameters", "bytes", *2 * ("compute", "overhead", "bare", "ratio"))
    print(f"{'':33}{'medians':>44}{'lower deciles':>44}")
    print("".join(f"{head:>11}" for head in heads))
    found = []
    for hidden, many in zip(hiddens, turns, strict=True):
        for size in worlds:
            own = summary({"processes": size} | spawned(size, hidden, many))
            found.append(own)
            words = [f"{own[k]:,}" for k in ("processes", "parameters", "bytes")]
            for name in ("", "quiet_"):
                words += [f"{own[name + key]:.3g}" for key in ("compute_ms", "overhead_ms", "bare_ms", "ratio")]
            print("".join(f"{word:>11}" for word in words), flush=True)
    for words, name in (("medians", ""), ("lower deciles", "quiet_")):
        for what, key in (("a round", "ratio"), ("sums that are there already", "ratio_of_sums")):
            ratios = [own[name + key] for own in found]
            print(f"{words}, {what}: {statistics.median(ratios):.2f}, at most {max(ratios):.2f} (target {BAR})")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--hidden", default="32,1024,4096", help="widths: 75 parameters each, and 10")
    parser.add_argument("--turns", default="400,200,60", help="for each width")
    given = parser.parse_args()
    worlds, hiddens, turns = (list(map(int, word.split(","))) for word in (given.worlds, given.hidden, given.turns))
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    found = {"machine": machine(torch.device("cpu")) | {"command": f"python {' '.join(sys.argv)}"}}
    found |= {"load": os.getloadavg()[0], "target": BAR}
    found["overhead"] = overheads(worlds, hiddens, turns)
    found["load_after"] = os.getloadavg()[0]
    print(f"load afterwards {found['load_after']:.1f}")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(found, indent=1) + "\n")
        print(f"figures: {given.json}")


if __name__ == "__main__":
    rank(*sys.argv[2:]) if sys.argv[1:2] == ["rank"] else main()
