"""FedAvg on the same samples in fedda, in a plain PyTorch loop and in other simulators, one after the other in turns.

    python benchmarks/simulators/run.py --python pfl=PATH --python fedlab=PATH --python flower=PATH

PATH is the Python of an environment that has the simulator (README.md beside this file); one that has not is left out.
"""

import argparse
import importlib.metadata
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import arrays
from shared import WORKLOADS

HERE = Path(__file__).parent
CORES = 2
LIMIT = 300  # seconds, for one program


class Program(NamedTuple):
    file: str
    package: str
    threads: dict  # what was the faster of one and two, for each workload; `--threads both` measures it
    processes: int = 1

    def command(self, python):
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.processes}"]
        return [python, *(launch if self.processes > 1 else []), str(HERE / self.file)]


PROGRAMS = {
    "plain": Program("plain.py", "fedda", {"small": 1, "cnn": 2}),
    "fedda": Program("with_fedda.py", "fedda", {"small": 1, "cnn": 2}),
    "pfl": Program("with_pfl.py", "pfl", {"small": 1, "cnn": 2}),
    "pfl-2": Program("with_pfl.py", "pfl", {"small": 1, "cnn": 1}, processes=2),
    "fedlab": Program("with_fedlab.py", "fedlab", {"small": 1, "cnn": 2}),
    "flower": Program("with_flower.py", "flwr", {"small": 1, "cnn": 1}),
}


class Failed(Exception):
    pass


def run(name, python, workload, file, rounds, seed, threads):
    """One program, from its start to its line of JSON."""
    asked = {"workload": workload, "data": file, "rounds": rounds, "seed": seed, "threads": threads}
    words = [f"--{key}={value}" for key, value in {**asked, "began": time.time()}.items()]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [*PROGRAMS[name].command(python), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    except subprocess.TimeoutExpired:
        raise Failed(f"not done in {LIMIT} seconds") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"simulator"')]
    if done.returncode or not lines:
        raise Failed((done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1])
    return json.loads(lines[-1])


def has(python, package):
    test = f"import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, ('torch', {package!r}))))"
    try:
        return subprocess.run([python, "-c", test], capture_output=True).returncode == 0
    except OSError:
        return False


def measure(workload, programs, pythons, folder, options):
    """All results: in every pass each program once, so that all meet the same machine; a pass has a seed of its own."""
    file = str(Path(folder) / f"{workload}.npz")
    arrays.write(workload, file)
    rounds = options.rounds or WORKLOADS[workload].rounds
    results, broken = [], set()
    for seed in range(options.repeats):
        for name in programs:
            best, several = PROGRAMS[name].threads[workload], PROGRAMS[name].processes > 1
            for threads in (1, 2) if options.threads == "both" and not several else (best,):
                if name in broken:
                    continue
                try:
                    result = run(name, pythons[name], workload, file, rounds, seed, threads)
                    results.append(result | {"program": name, "seed": seed})
                    print(f"  {workload}, pass {seed + 1}: {name}", file=sys.stderr, flush=True)
                except Failed as why:
                    broken.add(name)
                    print(f"{name}: left out, it failed: {why}")

    def more(seed):
        return run("plain", pythons["plain"], workload, file, rounds, seed, 1)["final_accuracy"]

    others = range(options.repeats, options.repeats + options.seeds)
    with ThreadPoolExecutor(CORES) as pool:  # nothing is timed here
        noise = list(pool.map(more, others)) if "plain" in programs else []
    return results, noise


def table(workload, results, noise):
    """The rows that are printed; accuracies are held against those of the plain loop over several seeds."""
    groups = {}
    for result in results:
        groups.setdefault((result["program"], result["threads"]), []).append(result)
    seconds = {key: [s for r in rows for s in r["seconds_per_round"]] for key, rows in groups.items()}
    reference = min((statistics.median(v) for (name, _), v in seconds.items() if name == "plain"), default=math.nan)
    plain = noise + [r["final_accuracy"] for r in results if r["program"] == "plain"]
    columns = ("version", "threads", "s/round: min, median, max", "start-up, s", "speed to plain loop", "accuracy")
    yield f"| {workload} | {' | '.join(columns)} |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for (name, threads), rows in groups.items():
        mine, accuracies = seconds[name, threads], [r["final_accuracy"] for r in rows]
        middle = statistics.median(mine)
        word = f"{statistics.mean(accuracies):.1%}"
        if len(plain) > 2 and name != "plain":
            spread = statistics.stdev(plain) * math.sqrt(1 / len(plain) + 1 / len(accuracies))
            off = (statistics.mean(accuracies) - statistics.mean(plain)) / max(spread, 1e-9)
            word += f" ({off:+.1f} sd)"
        used = f"{PROGRAMS[name].processes} x {threads}" if PROGRAMS[name].processes > 1 else f"{threads}"
        start = statistics.median(r["startup_seconds"] for r in rows)
        yield (
            f"| {name} | {rows[0]['version']} | {used} | {min(mine):.4f}, {middle:.4f}, {max(mine):.4f} "
            f"| {start:.1f} | {reference / middle:.2f} | {word} |"
        )
    if len(plain) > 2:
        yield ""
        yield (
            f"Accuracy of the plain loop over {len(plain)} seeds: {statistics.mean(plain):.1%}, standard deviation "
            f"{statistics.stdev(plain):.1%}. In brackets: how far a program's mean is from it, in standard deviations "
            "of that difference; within 3 is noise."
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="which ones, by name, with commas between")
    parser.add_argument("--repeats", type=int, default=2, help="passes over all programs")
    parser.add_argument("--rounds", type=int, help="of one program in one pass (60 of small, 10 of cnn)")
    parser.add_argument("--seeds", type=int, default=5, help="further seeds of the plain loop, to know the noise")
    parser.add_argument("--threads", choices=["best", "both"], default="best", help="both: with one, and with two")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="of pfl, fedlab, flower")
    parser.add_argument("--json", type=Path, help="where to put all results")
    options = parser.parse_args()
    others = dict(word.split("=", 1) for word in options.python)
    for name in {*others, *options.programs.split(",")} - {*PROGRAMS}:
        parser.error(f"unknown program {name!r}: there are {', '.join(PROGRAMS)}")
    pythons = {name: others.get(name, others.get(name.removesuffix("-2"), sys.executable)) for name in PROGRAMS}
    programs = []
    for name in options.programs.split(","):
        if has(pythons[name], PROGRAMS[name].package):
            programs.append(name)
        else:
            print(f"{name}: left out, {pythons[name]} has no package {PROGRAMS[name].package!r}")
    found, torch = {}, importlib.metadata.version("torch")
    print(f"torch {torch}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
    with tempfile.TemporaryDirectory() as folder:
        for workload in WORKLOADS if options.workload == "all" else [options.workload]:
            results, noise = measure(workload, programs, pythons, folder, options)
            found[workload] = {"results": results, "plain_accuracies": noise}
            print("", *table(workload, results, noise), sep="\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
