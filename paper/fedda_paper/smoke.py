"""A figure again at a fraction of its length, on a CPU: do its curves agree with those that were kept?

What is smaller: a tenth of the rounds or fewer, three seeds, some thousand samples of the figure's own data with
their images averaged to about 8 x 8 pixels, and a network of one hidden layer. What is not: the methods, their
hyper-parameters, the numbers of local steps, the partition.
"""

from __future__ import annotations

import gzip
import json
import math
import statistics
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from fedda import checks
from fedda.data import open_dataset
from fedda.experiments.config import Experiment, find
from fedda.experiments.jobs import Progress
from fedda.experiments.overrides import choose
from fedda.experiments.runner import run

from .parts import plan
from .shrink import WRITERS, shrunk

SEEDS = (0, 1, 2)
ROUNDS, STEPS = 400, 16_000  # a tenth of 4000; fewer where the methods of a figure together take more local steps
POINTS = 8  # evaluations after the first
HIDDEN = 32  # units of the network
METRICS = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "density")
FLOOR = 2e-3  # of a value: where seeds agree better than that, rounding may differ by more

Curves = dict[str, dict[str, list[list[float | None]]]]  # label -> metric -> [mean, std] at each round


@dataclass(frozen=True)
class Deviation:
    """Where a method's curves are farthest from the kept ones, in tolerances."""

    label: str
    times: float
    metric: str
    round: int
    kept: float | None
    found: float | None
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.times <= 1.0


def names() -> list[str]:
    """The figures that have kept curves to compare with."""
    return list(dict.fromkeys(name for _, name in plan().figures()))


def smoke(name: str, watch: Progress, place: Path | None = None) -> dict[str, Any]:
    """Run the small form of a figure; its curves, with what they depend on."""
    if name not in names():
        raise ValueError(f"reproduce: --smoke takes a figure, got {name!r}; {checks.nearest(name, names())}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = place or Path(temporary)
        experiment, crc = small(name, folder)
        run(experiment, folder / "run", watch, force=True, threads=1, save_seconds=1e6)
        text = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    about = {"figure": name, "rounds": experiment.rounds, "every": experiment.every, "seeds": list(SEEDS), "data": crc}
    return about | {"curves": curves(rows)}


def small(name: str, folder: Path) -> tuple[Experiment, int]:
    """The small form of a figure, its data in a file of `folder`, and a checksum of that data."""
    full = find(name)
    data = open_dataset(full.problem.data)
    data = shrunk(data.resplit() if full.problem.resplit else data, by_owner=full.problem.partition == "by_client")
    arrays = {
        k: v for k in ("x", "y", "x_test", "y_test", "client", "client_test") if (v := getattr(data, k)) is not None
    }
    np.savez(folder / "data.npz", **arrays)
    crc = 0
    for word in sorted(arrays):
        crc = zlib.crc32(np.ascontiguousarray(arrays[word]).tobytes() if arrays[word].dtype.kind != "U" else b"", crc)
    table = full.model_dump()
    steps = [int(words.get("steps", 5)) for words in table["algorithms"].values()]
    rounds = max(POINTS, min(ROUNDS, STEPS // sum(steps)) // POINTS * POINTS)
    words = [f"problem.data='{folder / 'data.npz'}'", "problem.model=mlp", f"problem.hidden={HIDDEN}"]
    words += ["problem.resplit=false", f"every={rounds // POINTS}"]
    if full.problem.partition == "by_client":
        words += [f"problem.clients={WRITERS}", f"cohort={WRITERS // 5}"]
    return choose(full, rounds=rounds, seeds=",".join(map(str, SEEDS)), words=words), crc


def curves(rows: list[dict[str, Any]]) -> Curves:
    """Mean and standard deviation over seeds at each evaluated round; None where a seed has no finite number."""
    found: dict[str, dict[str, dict[int, list[float | None]]]] = {}
    for row in rows:
        for metric in METRICS:
            if metric in row:
                at = found.setdefault(row["algorithm"], {}).setdefault(metric, {})
                at.setdefault(row["round"], []).append(row[metric])
    return {
        label: {metric: [_spread(own[r]) for r in sorted(own)] for metric, own in by.items()}
        for label, by in found.items()
    }


def _spread(values: list[float | None]) -> list[float | None]:
    if any(v is None for v in values):
        return [None, None]
    numbers = [v for v in values if v is not None]
    return [float(f"{v:.7g}") for v in (statistics.fmean(numbers), statistics.stdev(numbers))]


def tolerance(curve: Sequence[Sequence[float | None]], mean: float) -> float:
    """How far the mean at one point may be from the kept one: two standard errors of the difference of two means over
    the seeds, as in a verdict, and at least 0.2 % of the value (0.001 for values below a half).

    Seeds and draws are the same as then, so a sound program differs by rounding alone, which 400 rounds make larger
    but not as large as a change of seeds; a changed rule goes beyond. The deviation over seeds is that of the whole
    curve (root mean square after its start): three seeds lie close together now and then.

    >>> round(tolerance([[2.3, 0.1], [0.5, 0.03], [0.4, 0.03]], 0.5), 4), tolerance([[2.0, 0.0], [2.0, 0.0]], 2.0)
    (0.049, 0.004)
    """
    spread = [std**2 for _, std in curve[1:] if std is not None]
    se = math.sqrt(statistics.fmean(spread) / len(SEEDS)) if spread else 0.0
    return max(2 * math.sqrt(2) * se, FLOOR * max(abs(mean), 0.5))


def deviations(kept: dict[str, Any], found: dict[str, Any]) -> list[Deviation]:
    """Each method at its farthest from the kept curves."""
    if kept["data"] != found["data"]:
        raise ValueError(f"reproduce: the data of {kept['figure']} are not those of the kept curves: another copy?")
    if list(kept["curves"]) != list(found["curves"]) or any(kept[k] != found[k] for k in ("rounds", "every", "seeds")):
        raise ValueError(f"reproduce: {kept['figure']} is not the experiment that was kept: keep its curves anew")
    return [max(_each(kept, found, label), key=lambda d: d.times) for label in kept["curves"]]


def _each(kept: dict[str, Any], found: dict[str, Any], label: str) -> Iterator[Deviation]:
    for metric, curve in kept["curves"][label].items():
        now = found["curves"][label][metric]
        for i, ((mean, _), (other, _)) in enumerate(zip_longest(curve, now, fillvalue=(None, None))):
            at = i * kept["every"]
            if mean is None or other is None:  # it diverged there, and must do so again
                yield Deviation(label, 0.0 if mean is other else math.inf, metric, at, mean, other, 0.0)
            else:
                bar = tolerance(curve, mean)
                yield Deviation(label, abs(other - mean) / bar, metric, at, mean, other, bar)


def kept_curves(name: str) -> dict[str, Any]:
    """The curves that come with fedda."""
    file = resources.files(__package__) / "smoke_curves" / f"{name}.json.gz"
    return dict(json.loads(gzip.decompress(file.read_bytes())))


def keep(found: dict[str, Any], folder: Path) -> Path:
    """Write curves to be compared with later, the same bytes for the same numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{found['figure']}.json.gz"
    path.write_bytes(gzip.compress((json.dumps(found, separators=(",", ":")) + "\n").encode(), mtime=0))
    return path
