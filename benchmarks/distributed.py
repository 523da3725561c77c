"""Real processes joined by gloo on this machine, in one run:

(a) what a round takes beyond its compute, beside a bare all-reduce of the same bytes on the same processes: a round,
    the same without the exchange, and the same with a bare all-reduce in the place of the exchange. Target: at most
    1.3 times. Again without the compute, for sums that are there already; and a bare all-reduce with nothing round it;
(b) the seconds of a round that `fedda plan` predicts, beside those of 1, 2 and 4 processes.

All take turns, so that they meet the same machine; lower deciles are those of turns that no other program disturbed.

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
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import fedda
from fedda.bench.machine import machine
from fedda.bench.workloads import noise
from fedda.engines import Distributed, Vectorised, join
from fedda.experiments import find
from fedda.experiments.config import parse
from fedda.experiments.overrides import choose
from fedda.plan import Size, measured, measured_link, predict
from fedda.plan.rows import rounds_of
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


def rounds(experiment, seconds):
    """Seconds of single rounds of each algorithm, from a barrier to the slowest rank's end."""
    wanted = parse(Path(experiment).read_text(), experiment)
    engine = Vectorised() if dist.get_world_size() == 1 else Distributed()  # one process has no exchange
    problem, found = wanted.problem.build(), {}
    for label in wanted.algorithms:
        run = Run(wanted.build(label), problem, wanted.cohort, wanted.seeds, engine=engine, force=True)
        times = []
        while sum(times[2:]) < seconds or len(times) < 5:
            dist.barrier()
            began = time.perf_counter()
            run.advance()
            took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)  # so that all end with the same round
            times.append(float(took))
        found[label] = times[2:]
    return found


def rank(store, place, size, out, what, *arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, int(size)), rank=int(place), world_size=int(size))
    found = {"overhead": overhead, "rounds": rounds}[what](*map(json.loads, arguments))
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
                [sys.executable, __file__, "rank", store, str(place), str(size), out, arguments[0]]
                + [json.dumps(word) for word in arguments[1:]],
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
    print("(a) a round beyond its compute, beside a bare all-reduce of the same bytes; ms")
    heads = ("processes", "parameters", "bytes", *2 * ("compute", "overhead", "bare", "ratio"))
    print(f"{'':33}{'medians':>44}{'lower deciles':>44}")
    print("".join(f"{head:>11}" for head in heads))
    found = []
    for hidden, many in zip(hiddens, turns, strict=True):
        for size in worlds:
            own = summary({"processes": size} | spawned(size, "overhead", hidden, many))
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


def predictions(worlds, passes, seconds, algorithms, words):
    """Both are the least of what was found in any pass: the round that nothing else has disturbed."""
    print(f"\n(b) ms a round, predicted from rounds of one process, and measured: the least in {passes} passes")
    wanted = choose(find("digits"), algorithms=algorithms, seeds="0", settings=words).completed()
    size = Size(wanted.problem.clients, wanted.cohort, wanted.rounds, 1)
    shares = [-(-size.cohort // world) for world in worlds]
    drawn = rounds_of(size.clients, size.cohort, wanted.seeds)
    profiles, real = [], {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "wanted.toml"
        place.write_text(wanted.toml())
        for _ in range(passes):
            cpu = torch.device("cpu")
            profiles.append(measured(wanted, shares, size.everyone, cpu, measured_link(), seconds, lambda words: None))
            for world in worlds:
                for label, times in spawned(world, "rounds", str(place), seconds).items():
                    real.setdefault((label, world), []).extend(times)
    profile = least(profiles)
    print(f"{'algorithm':>12}{'processes':>12}{'predicted':>12}{'measured':>12}{'ratio':>12}{'median':>12}")
    found = []
    for label in wanted.algorithms:
        for world in worlds:
            line, times = predict(profile, label, size, world, drawn)["seconds_per_round"], real[label, world]
            own = {
                "algorithm": label, "processes": world, "predicted_ms": 1e3 * line["total"],
                "predicted_exchange_ms": 1e3 * line["exchange"], "measured_ms": 1e3 * min(times),
                "measured_median_ms": 1e3 * statistics.median(times), "rounds": len(times),
                "ratio": line["total"] / min(times),
            }  # fmt: skip
            found.append(own)
            figures = [own[k] for k in ("predicted_ms", "measured_ms", "ratio", "measured_median_ms")]
            print(f"{label:>12}{world:>12}" + "".join(f"{value:>12.3g}" for value in figures), flush=True)
    about = {"clients": size.clients, "cohort": size.cohort, "parameters": profile.parameters}
    return about | {"link": profile.json()["link"], "rows": found}


def least(profiles):
    """The profile of the least times in any of them."""
    methods = {
        label: replace(own, rounds=[min(pair, key=lambda p: p[1]) for pair in zip(*rounds, strict=True)])
        for label, own in profiles[0].methods.items()
        if (rounds := [profile.methods[label].rounds for profile in profiles])
    }
    links = [profile.link for profile in profiles]
    best = replace(
        links[0], latency=min(link.latency for link in links), bandwidth=max(link.bandwidth for link in links)
    )
    return replace(profiles[0], methods=methods, link=best)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--worlds", default="1,2,4")
    parser.add_argument("--hidden", default="32,1024,4096", help="widths: 75 parameters each, and 10")
    parser.add_argument("--turns", default="400,200,60", help="of (a), for each width")
    parser.add_argument("--passes", type=int, default=4, help="of (b)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of every figure in a pass of (b)")
    parser.add_argument("--algorithms", default="fedavg,fedda-mvr,scaffold")
    parser.add_argument("--set", nargs="*", default=["problem.clients=100", "cohort=40", "problem.hidden=128"])
    given = parser.parse_args()
    worlds, hiddens, turns = (list(map(int, word.split(","))) for word in (given.worlds, given.hidden, given.turns))
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    found = {"machine": machine(torch.device("cpu")) | {"command": f"python {' '.join(sys.argv)}"}}
    found |= {"load": os.getloadavg()[0], "target": BAR}
    found["overhead"] = overheads([world for world in worlds if world > 1], hiddens, turns)
    found["prediction"] = predictions(worlds, given.passes, given.seconds, given.algorithms, given.set)
    found["load_after"] = os.getloadavg()[0]
    print(f"load afterwards {found['load_after']:.1f}")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(found, indent=1) + "\n")
        print(f"figures: {given.json}")


if __name__ == "__main__":
    rank(*sys.argv[2:]) if sys.argv[1:2] == ["rank"] else main()
