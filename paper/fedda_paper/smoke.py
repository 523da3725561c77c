"""A small form of a figure on a CPU: do its curves agree with the kept ones?

Smaller are: the rounds (a tenth at most), the seeds (three), the data (some samples, images averaged to about 8 x 8
pixels) and the network (one hidden layer). The same are: methods, hyper-parameters, local steps, partition.
"""

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

from fedda import checks, rng
from fedda.data import Dataset, open_dataset
from fedda.experiments.config import Experiment, find
from fedda.experiments.jobs import Watcher
from fedda.experiments.overrides import override
from fedda.experiments.runner import run
from fedda.runs.reading import read_rows

from .parts import read_plan

SEEDS = (0, 1, 2)
ROUNDS, STEPS = 400, 16_000  # a tenth of 4000; fewer if the methods of a figure together take more local steps
POINTS = 8  # evaluations after the first
HIDDEN = 32  # units of the network
SIDE = 8  # least number of pixels per side of an image
TRAIN, TEST, WRITERS = 2000, 1000, 50  # samples at most, or writers
METRICS = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "density")
FLOOR = 2e-3  # least tolerance, relative to the value: rounding alone may differ by more than close seeds do

Array = np.ndarray
Curves = dict[str, dict[str, list[list[float | None]]]]  # label -> metric -> [mean, std] at each round


@dataclass(frozen=True)
class Deviation:
    """The point where a method's curves are farthest from the kept ones, in tolerances."""

    label: str
    times: float
    metric: str
    round: int
    kept: float | None
    now: float | None
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.times <= 1.0


def names() -> list[str]:
    """The figures that have kept curves."""
    return list(dict.fromkeys(name for _, name in read_plan().figures()))


def run_small(name: str, display: Watcher) -> dict[str, Any]:
    """Run the small form of a figure; return its curves with rounds, seeds and a checksum of the data."""
    if name not in names():
        raise ValueError(f"reproduce: --smoke takes a figure, got {name!r}; {checks.nearest(name, names())}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        experiment, checksum = small(name, folder)
        run(experiment, folder / "run", display, force=True, threads=1, save_seconds=1e6)
        rows = read_rows(folder / "run" / "metrics.jsonl")
    sizes = {"rounds": experiment.rounds, "every": experiment.every, "seeds": list(SEEDS)}
    return {"figure": name, **sizes, "data": checksum, "curves": curves(rows)}


def small(name: str, folder: Path) -> tuple[Experiment, int]:
    """The small form of a figure, with its data in a file in `folder`, and a checksum of that data."""
    full = find(name)
    data, by_writer = open_dataset(full.problem.data), full.problem.partition == "by_client"
    data = shrink(data.resplit() if full.problem.resplit else data, by_writer)
    fields = ("x", "y", "x_test", "y_test", "client", "client_test")
    arrays = {field: array for field in fields if (array := getattr(data, field)) is not None}
    np.savez(folder / "data.npz", **arrays)
    checksum = 0
    for field in sorted(arrays):
        is_text = arrays[field].dtype.kind == "U"
        checksum = zlib.crc32(b"" if is_text else np.ascontiguousarray(arrays[field]).tobytes(), checksum)
    steps = sum(int(params.get("steps", 5)) for params in full.algorithms.values())
    rounds = max(POINTS, min(ROUNDS, STEPS // steps) // POINTS * POINTS)
    changes = [f"problem.data='{folder / 'data.npz'}'", "problem.model=mlp", f"problem.hidden={HIDDEN}"]
    changes += ["problem.resplit=false", f"every={rounds // POINTS}"]
    if by_writer:
        changes += [f"problem.clients={WRITERS}", f"cohort={WRITERS // 5}"]
    return override(full, rounds=rounds, seeds=",".join(map(str, SEEDS)), settings=changes), checksum


def shrink(data: Dataset, by_writer: bool) -> Dataset:
    """Some samples, or all samples of some writers, with smaller images.

    >>> shrink(open_dataset("digits"), False).x.shape
    (1438, 1, 8, 8)
    """
    if by_writer and data.client is not None and data.client_test is not None:
        writers = np.unique(data.client)
        some = writers[np.linspace(0, len(writers) - 1, WRITERS).round().astype(int)]
        train, test = np.flatnonzero(np.isin(data.client, some)), np.flatnonzero(np.isin(data.client_test, some))
    else:
        train, test = _sample(len(data.y), TRAIN), _sample(len(data.y_test), TEST)

    def owners(client: Any, samples: Array) -> Array | None:
        return None if client is None or not by_writer else np.asarray(client)[samples]

    return data._replace(
        x=average_squares(data.x[train]), y=data.y[train], client=owners(data.client, train),
        x_test=average_squares(data.x_test[test]), y_test=data.y_test[test],
        client_test=owners(data.client_test, test),
    )  # fmt: skip


def _sample(n: int, most: int) -> Array:
    return np.sort(rng.permutation(rng.key(0, rng.SPLIT), n).numpy()[:most])


def average_squares(x: Array) -> Array:
    """Images averaged over squares of pixels, to at least 8 x 8."""
    k = max(1, x.shape[-1] // SIDE)
    if k == 1 or x.ndim != 4:
        return x
    h, w = (n // k for n in x.shape[2:])
    means = x[:, :, : h * k, : w * k].reshape(*x.shape[:2], h, k, w, k).mean(axis=(3, 5))
    return np.asarray(means.round()).astype(x.dtype) if x.dtype == np.uint8 else means.astype(x.dtype)


def curves(rows: list[dict[str, Any]]) -> Curves:
    """Mean and standard deviation over seeds at each evaluated round; None if a seed has no finite number there."""
    values: dict[str, dict[str, dict[int, list[float | None]]]] = {}
    for row in rows:
        for metric in (m for m in METRICS if m in row):
            by_round = values.setdefault(row["algorithm"], {}).setdefault(metric, {})
            by_round.setdefault(row["round"], []).append(row[metric])
    return {
        label: {metric: [mean_and_std(by_round[r]) for r in sorted(by_round)] for metric, by_round in metrics.items()}
        for label, metrics in values.items()
    }


def mean_and_std(values: list[float | None]) -> list[float | None]:
    numbers = [v for v in values if v is not None]
    if len(numbers) < len(values):
        return [None, None]
    return [float(f"{v:.7g}") for v in (statistics.fmean(numbers), statistics.stdev(numbers))]


def tolerance(curve: Sequence[Sequence[float | None]], mean: float) -> float:
    """How far a mean may be from the kept one: two standard errors of the difference of two means over the seeds, and
    at least 0.2 % of the value (0.001 for values below a half).

    Seeds and draws are those of the kept curves, so a correct program differs by rounding alone; a changed rule differs
    by more. The standard deviation is that of the whole curve (root mean square after the start), because three seeds
    can be close by accident.

    >>> round(tolerance([[2.3, 0.1], [0.5, 0.03], [0.4, 0.03]], 0.5), 4), tolerance([[2.0, 0.0], [2.0, 0.0]], 2.0)
    (0.049, 0.004)
    """
    variances = [std**2 for _, std in curve[1:] if std is not None]
    se = math.sqrt(statistics.fmean(variances) / len(SEEDS)) if variances else 0.0
    return max(2 * math.sqrt(2) * se, FLOOR * max(abs(mean), 0.5))


def deviations(kept: dict[str, Any], now: dict[str, Any]) -> list[Deviation]:
    """For each method, the point farthest from the kept curves."""
    name = kept["figure"]
    if kept["data"] != now["data"]:
        raise ValueError(f"reproduce: the data of {name} are not those of the kept curves: another copy?")
    if list(kept["curves"]) != list(now["curves"]) or any(kept[k] != now[k] for k in ("rounds", "every", "seeds")):
        raise ValueError(f"reproduce: {name} is not the experiment that was kept: write its curves with --keep")
    return [max(_points(kept, now, label), key=lambda d: d.times) for label in kept["curves"]]


def _points(kept: dict[str, Any], now: dict[str, Any], label: str) -> Iterator[Deviation]:
    for metric, curve in kept["curves"][label].items():
        pairs = zip_longest(curve, now["curves"][label][metric], fillvalue=(None, None))
        for i, ((mean, _), (other, _)) in enumerate(pairs):
            at = i * kept["every"]
            if mean is None or other is None:  # if one diverged there, both must have
                yield Deviation(label, 0.0 if mean is other else math.inf, metric, at, mean, other, 0.0)
            else:
                allowed = tolerance(curve, mean)
                yield Deviation(label, abs(other - mean) / allowed, metric, at, mean, other, allowed)


def kept_curves(name: str) -> dict[str, Any]:
    """The curves that are kept with this package."""
    file = resources.files(__package__) / "smoke_curves" / f"{name}.json.gz"
    return dict(json.loads(gzip.decompress(file.read_bytes())))


def keep(record: dict[str, Any], folder: Path) -> Path:
    """Write curves for later comparisons. The same numbers give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['figure']}.json.gz"
    path.write_bytes(gzip.compress((json.dumps(record, separators=(",", ":")) + "\n").encode(), mtime=0))
    return path
