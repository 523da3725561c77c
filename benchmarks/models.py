"""The milliseconds of a local step of all clients, for several kinds of networks: a plain loop over clients and fedda,
in one run, on random samples, which change no time.

    python benchmarks/models.py [--device cuda] [--models lstm resnet8] [--precisions tf32 bf16] [--out models.json]

`--operations` also says which operations fedda's time is spent in. `--start` measures instead how long a run takes to
its first round, in a process in which nothing was compiled or measured before, and in one in which everything was.
`--small` makes the networks tiny: the table then only shows that everything runs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import fedda
from fedda.bench import loop
from fedda.bench.measure import HAND_WRITTEN, rounding
from fedda.bench.timing import race, started
from fedda.engines import Vectorised
from fedda.problems import models

CLIENTS, BATCH, STEPS, SAMPLES = 10, 16, 5, 64  # samples of each client


class Residual(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), norm(outer)
        self.second, self.norm2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), norm(outer)
        same = stride == 1 and inner == outer
        self.skip = nn.Identity() if same else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.skip(x) + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


def norm(channels):
    return nn.GroupNorm(min(8, channels // 2), channels)


def resnet(width, stages, blocks):
    """`stages` of `blocks` residual blocks with GroupNorm, each twice as wide as the one before."""
    layers = [nn.Conv2d(3, width, 3, 1, 1, bias=False), norm(width), nn.ReLU()]
    inner = width
    for stage in range(stages):
        for block in range(blocks):
            outer = width * 2**stage
            layers.append(Residual(inner, outer, 2 if stage and not block else 1))
            inner = outer
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 10))


class Recurrent(nn.Module):
    def __init__(self, cell, classes, embedding, width, layers):
        super().__init__()
        self.embedding, self.out = nn.Embedding(classes, embedding), nn.Linear(width, classes)
        self.cell = cell(embedding, width, layers, batch_first=True)

    def forward(self, tokens):
        return self.out(self.cell(self.embedding(tokens))[0])


def transformer(length, width):
    network, loss = fedda.problems.sequences.transformer((length,), 80, width=width)
    network.norm = nn.Identity()
    return network, loss


def networks(small):
    """Name -> (network, loss, shape of a sample, number of tokens or None)."""
    image, length, layers = ((3, 8, 8), 6, 2) if small else ((3, 32, 32), 64, 4)
    width = (lambda n: max(4, n // 16)) if small else (lambda n: n)
    return {
        "cnn": (*models.cnn(image, 10, width(64), layers), image, None),
        "cnn-batchnorm": (*models.cnn(image, 10, width(64), layers, norm="batch"), image, None),
        "mlp": (*models.mlp((784,), 10, hidden=width(200)), (784,), None),
        "resnet8": (resnet(width(16), 3, 1), F.cross_entropy, image, None),
        "transformer": (*transformer(length, width(64)), (length,), 80),
        "lstm": (Recurrent(nn.LSTM, 80, 8, width(256), 1), models.cross_entropy, (length,), 80),
        "gru": (Recurrent(nn.GRU, 80, width(128), width(128), 2), models.cross_entropy, (length,), 80),
        "resnet18": (resnet(width(64), 4, 2), F.cross_entropy, image, None),
    }


def problem_of(network, loss, shape, tokens, device):
    g = torch.Generator().manual_seed(0)
    n = CLIENTS * SAMPLES
    if tokens:
        x = torch.randint(0, tokens, (n, *shape), generator=g)
        y = x.roll(-1, 1)
    else:
        x, y = torch.randn(n, *shape, generator=g), torch.randint(0, 10, (n,), generator=g)
    return fedda.problem(network, loss, x=x, y=y, client=torch.arange(n) % CLIENTS, batch=BATCH).to(device)


def by_hand(problem, name, precision):
    algorithm, draws = fedda.make(name, lr=0.01, steps=STEPS), loop.LoopDraws(problem, CLIENTS, STEPS)
    hand = HAND_WRITTEN[name](problem, algorithm, draws)

    def advance():
        with rounding(precision):
            hand.round(draws.round())

    return advance


def ours(problem, name, precision, runs):
    run = fedda.Run(fedda.make(name, lr=0.01, steps=STEPS), problem, engine=Vectorised(precision=precision), force=True)
    runs.append(run)
    return run.advance


def operations(advance, device, rounds=3, most=12):
    """A line for each operation that takes a large part of a local step of all clients: kernels on a GPU."""
    kind = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiler:
        for _ in range(rounds):
            advance()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    taken = [(e.self_device_time_total if device.type == "cuda" else e.self_cpu_time_total, e)
             for e in profiler.key_averages()]  # fmt: skip
    taken.sort(key=lambda pair: -pair[0])
    steps, total = rounds * STEPS, sum(time for time, _ in taken)
    yield f"{sum(e.count for _, e in taken) / steps:.1f} calls, {total / steps / 1e3:.3f} ms"
    for time, e in taken[:most]:
        yield f"{time / total:6.1%} {time / steps:9.1f} us {e.count / steps:7.1f} calls  {e.key[:110]}"


def start(options):
    """The first round of each network, in processes of their own."""
    print("| model | algorithm | precision | nothing kept, s | kernels and choice of path kept, s |")
    print("|---|---|---|---|---|", flush=True)
    for model in options.models:
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            kept = os.environ | {"FEDDA_DATA": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
            out = f"{folder}/out.json"
            words = ["--device", options.device, "--models", model, "--seconds", "0.001", "--out", out]
            words += ["--algorithms", *options.algorithms[-1:], *(["--small"] if options.small else [])]
            words += ["--precisions", *options.precisions[:1]]
            for _ in range(2):
                subprocess.run([sys.executable, __file__, *words], env=kept, check=True, stdout=subprocess.DEVNULL)
                with open(out, encoding="utf-8") as file:
                    rows += json.load(file)
        row, again = rows
        about = f"{model} | {row['algorithm']} | {row['precision']}"
        print(f"| {about} | {row['first_round_s']:.1f} | {again['first_round_s']:.1f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="*", default=list(networks(True)))
    parser.add_argument("--algorithms", nargs="*", default=["fedavg", "fedda-mvr"], choices=HAND_WRITTEN)
    parser.add_argument("--precisions", nargs="*")
    parser.add_argument("--seconds", type=float, default=1.0, help="measured time of each contender")
    parser.add_argument("--out", help="a JSON file for the figures")
    parser.add_argument("--small", action="store_true", help="tiny networks")
    parser.add_argument("--operations", action="store_true", help="which operations take how long")
    parser.add_argument("--start", action="store_true", help="how long the first round takes, and nothing else")
    options = parser.parse_args()
    device = torch.device(options.device)
    precisions = options.precisions = options.precisions or (["tf32", "bf16"] if device.type == "cuda" else ["float32"])
    if options.start:
        start(options)
        return
    if device.type == "cpu":
        torch.set_num_threads(1)
    rows = []
    print(
        "| model | parameters | algorithm | precision | path | loop, ms | fedda, ms | times as fast | first round, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for model in options.models:
        torch.manual_seed(0)
        problem = problem_of(*networks(options.small)[model], device)
        for name in options.algorithms:
            for precision in precisions:
                runs = []
                plain = started("loop", partial(by_hand, problem, name, precision), device)
                stacked = started("fedda", partial(ours, problem, name, precision, runs), device)
                race([plain, stacked], options.seconds, device)
                (run,) = runs
                row = {
                    "model": model, "parameters": problem.d, "algorithm": name, "precision": precision,
                    "path": run.problem.gradient_paths.chosen + (", captured" if run.graph else ""),
                    "loop_ms": plain.seconds / STEPS * 1e3, "fedda_ms": stacked.seconds / STEPS * 1e3,
                    "ratio": stacked.speed_to(plain), "first_round_s": stacked.startup,
                }  # fmt: skip
                rows.append(row)
                print(
                    f"| {model} | {problem.d:,} | {name} | {precision} | {row['path']} | {row['loop_ms']:.3g} "
                    f"| {row['fedda_ms']:.3g} | {row['ratio']:.3g} | {row['first_round_s']:.1f} |",
                    flush=True,
                )
                if options.operations:
                    print("\n".join(f"    {line}" for line in operations(run.advance, device)), flush=True)
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
