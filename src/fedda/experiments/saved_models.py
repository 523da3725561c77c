"""The trained models of a run folder: the problem is built again from config.toml, the parameters are in the
checkpoint."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor

from .. import checks
from ..best import MISSING, NO_PERSONAL_BEST
from ..engines.simulated import PERSONAL
from ..problems import Neural
from ..runs.folder import Folder
from ..runs.names import CONFIG
from ..runs.sweeps import is_sweep
from .config import Experiment, errors_named, read
from .execution import read_environment


@dataclass(frozen=True)
class SavedModel:
    """A model of a run: its problem, its flat parameters and the weights of the clients."""

    label: str
    seed: int
    seeds: list[int]  # all of the run
    round: int
    problem: Neural
    x: Tensor
    weights: Tensor

    def __str__(self) -> str:
        others = f" (of {', '.join(map(str, self.seeds))})" if len(self.seeds) > 1 else ""
        return f"{self.label}, seed {self.seed}{others}, round {self.round}"


def read_model(folder: Path, algorithm: str | None = None, seed: int | None = None, best: bool = False) -> SavedModel:
    """The last model of a run, or its best one. If the run has several algorithms, one must be named; the seed is the
    first of the run by default."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder}: holds no run; give the folder that `fedda run` wrote")
    if is_sweep(folder):
        raise ValueError(f"{folder}: holds a sweep, which keeps no models; run its best point with fedda run --preset")
    experiment = read(folder / CONFIG)
    label = choose_label(experiment, algorithm)
    seed = experiment.seeds[0] if seed is None else seed
    if seed not in experiment.seeds:
        raise ValueError(f"--seed must be one of {', '.join(map(str, experiment.seeds))}, got {seed}")
    content, facts = Folder(folder).read(label)
    state, replica = load(content), experiment.seeds.index(seed)
    if "server.x" not in state:
        raise ValueError(f"{folder}: {label} has no model: {facts.get('failure', 'it did not start')}")
    if best and "best.x" not in state:
        raise ValueError(f"{folder}: {MISSING}; a run with validation = 0.1 under [problem] has one")
    if "failure" in facts and not best:
        raise ValueError(f"{folder}: {label} failed: {facts['failure']}")
    name, round = ("best.x", state["best.round"][replica]) if best else ("server.x", state["round"])
    with errors_named(experiment.name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run has said them
        problem = experiment.problem.build()
    refuse_other_data(problem, folder)
    if problem.d_personal:
        if best:
            raise ValueError(f"{folder}: {NO_PERSONAL_BEST}")
        problem = problem.personalised(state[f"memory.{PERSONAL}"][replica])
    sizes = problem.sizes.double()
    by_samples = "samples" in (experiment.weights, experiment.sampling)
    weights = sizes if by_samples else torch.ones_like(sizes)
    x = state[name][replica].reshape(-1).to(problem.dtype)
    return SavedModel(label, seed, experiment.seeds, int(round), problem, x, weights)


def choose_label(experiment: Experiment, algorithm: str | None) -> str:
    labels = list(experiment.algorithms)
    if algorithm is None and len(labels) > 1:
        raise ValueError(f"the run has several algorithms; --algorithm names one of {', '.join(labels)}")
    if algorithm is not None and algorithm not in labels:
        raise ValueError(f"--algorithm: the run has no {algorithm!r}; {checks.nearest(algorithm, labels)}")
    return algorithm or labels[0]


def refuse_other_data(problem: Neural, folder: Path) -> None:
    """Refuse a problem whose data is not that of the run in the folder."""
    known = read_environment(folder).get("data_sha256")
    if known is not None and known != problem.fingerprint:
        raise ValueError(f"{folder}: its run had other data (samples, targets or clients differ): give the same data")
