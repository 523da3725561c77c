"""What a federation costs on this machine: the server's memory, a site's imports, the seconds of a round by part.

python benchmarks/federation.py memory --sites 1000 --d 1000000
python benchmarks/federation.py imports
python benchmarks/federation.py round --rounds 4
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OWN_DATA = """
import torch

def load_data(partition, node):
    g = torch.Generator().manual_seed(partition)
    return torch.randn(200, 64, generator=g), torch.randint(0, 10, (200,), generator=g)


def site("""
SITE = """
import sys
import torch
from bench_app.client_app import app, site
from fedda.deploy import InProcessGrid
from fedda.deploy.server import Plan
from fedda.deploy.traffic import traffic
from fedda.deploy.wire import packed

plan, grid = Plan(algorithm="fedda-mvr", params='{"lr": 0.08, "w": 1000.0}'), InProcessGrid(app, 2)
layout = tuple(site(grid.contexts[1]).problem(16, torch.float32).layout)
down = tuple(torch.full(shape, 0.1) for shape in traffic(plan.table, layout, torch.float32)["local"].down)
fields = dict(task="local", algorithm=plan.table, aggregation="[]", run="0" * 32, dtype="float32", secure="", stamp=0)
fields |= dict(base=-1, saved=-1, key=3, drawn=0, batch=16)
(reply,) = grid.send_and_receive([grid.create_message(packed(down, fields), "query", 1, "", 60.0)])
assert "tensors" in reply.content, reply
"""


def memory(options):
    """The peak memory of a server and its sites in this process: one exchange at the start, and one round."""
    import torch
    from torch import nn

    from fedda.deploy import InProcessGrid, Site, client_app
    from fedda.deploy.server import Plan, serve

    def model():
        return nn.Linear(options.d // 1000, 1000, bias=False)

    x, y = torch.randn(2, options.d // 1000), torch.randn(2, 1000)
    site = Site(model(), nn.functional.mse_loss, x, y)
    app = client_app(lambda context: site)
    before = peak()
    with tempfile.TemporaryDirectory() as out:
        plan = Plan(
            algorithm="fedda-mvr", params='{"lr": 0.01, "w": 1000.0, "steps": 1}', clients=options.sites, rounds=1,
            batch=2, every=0, out=out,
        )  # fmt: skip
        began = time.monotonic()
        serve(InProcessGrid(app, options.sites), plan, model, nn.functional.mse_loss, say=lambda line: None)
    print(f"{options.sites} sites, d = {options.d}: peak {peak():.0f} MB, {before:.0f} MB of it before the run; "
          f"{time.monotonic() - began:.0f} s")  # fmt: skip


def app(place, before):
    """The app of `fedda deploy init` with own data at the sites; `before`: as it was, with scikit-learn at every site
    and Flower's own time between two looks for work."""
    from fedda.deploy.init import init

    init(place, 2)
    client = place / "bench_app" / "client_app.py"
    text = client.read_text()
    start, end = text.index("def load_data("), text.index("def site(")
    imported = "import sklearn.datasets\n" if before else ""
    client.write_text(imported + text[:start] + OWN_DATA.removesuffix("def site(").lstrip() + text[end:])
    environment = place / "env.sh"
    lines = environment.read_text().splitlines(keepends=True)
    environment.write_text("".join(line for line in lines if not (before and "POLL_INTERVAL" in line)))
    return place


def imports(options):
    """CPU seconds of a process that imports the app of a site and answers one task of FedDA."""
    for name, before in (("with scikit-learn", True), ("own data", False)):
        with tempfile.TemporaryDirectory() as folder:
            place = app(Path(folder) / "bench", before)
            seconds = []
            for _ in range(options.times):
                start = resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run([sys.executable, "-c", SITE], cwd=place, check=True)
                end = resource.getrusage(resource.RUSAGE_CHILDREN)
                seconds.append(end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime)
        print(f"{name}: {min(seconds):.2f} CPU s (the fastest of {options.times})", flush=True)


def round_by_part(options):
    """Seconds of a round by part: a SuperLink and two nodes as processes of this machine, with TLS and keys."""
    for name, before in (("before", True), ("now", False)):
        with tempfile.TemporaryDirectory() as folder:
            place = app(Path(folder) / "bench", before)
            config = f"rounds={options.rounds} every={options.every}"
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            words = {"env": os.environ | {"PATH": path}, "cwd": place, "stdout": subprocess.DEVNULL}
            subprocess.run(["./try.sh", config], check=True, **words)
            seconds = json.loads((place / "federation" / "report.json").read_text())["seconds"]
        parts = ", ".join(f"{part} {value / options.rounds:.1f}" for part, value in seconds.items() if part != "nodes")
        total = sum(value for part, value in seconds.items() if part != "nodes") / options.rounds
        print(f"{name}: {total:.1f} s a round ({parts}); waiting for the nodes {seconds['nodes']:.1f} s", flush=True)


def peak():
    """The largest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("memory", help=memory.__doc__)
    part.add_argument("--sites", type=int, default=1000)
    part.add_argument("--d", type=int, default=1_000_000)
    part.set_defaults(run=memory)
    part = parts.add_parser("imports", help=imports.__doc__)
    part.add_argument("--times", type=int, default=3)
    part.set_defaults(run=imports)
    part = parts.add_parser("round", help=round_by_part.__doc__)
    part.add_argument("--rounds", type=int, default=4)
    part.add_argument("--every", type=int, default=1, help="rounds between two evaluations")
    part.set_defaults(run=round_by_part)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
