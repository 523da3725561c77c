"""Everything that `fedda theory` measures, in one object that is written as JSON and drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..algorithms.fedda import FedDA
from ..experiments.config import Experiment, find
from ..problems import load
from ..registry import make
from ..rules.estimators import Plain
from ..rules.preconditioners import Diagonal
from ..rules.schedules import Constant
from .averaging import SETS, Averaging, ablation, averaging
from .complexity import Complexity, complexity
from .consensus import Consensus, consensus
from .decay import Decay, decay
from .moments import Moments, moments
from .smoothness import Smoothness, smoothness
from .synthetic import Synthetic, centred, spectrum

SEEDS = (0, 1, 2, 3, 4)
ABLATIONS = ("colon-small", "breast-cancer")  # the first whose data is there
Say = Callable[[str], None]


@dataclass(frozen=True)
class Ablation:
    """Dual against primal averaging under an L1 penalty, on real data: {way: {metric: one number a seed}}."""

    experiment: str
    about: str
    values: dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Findings:
    decay: Decay
    plain: Decay  # the same steps with mini-batch gradients
    own: Decay  # clients with Hessians of their own
    complexity: Complexity
    consensus: Consensus
    averaging: dict[str, Averaging]
    ablation: Ablation | None
    smoothness: dict[str, Smoothness]
    moments: Moments
    quick: bool = False  # small tasks, few steps


def findings(T: int = 60_000, quick: bool = False, on: str | None = None, say: Say = lambda words: None) -> Findings:
    """Measure all of it, on one idle core in three minutes; `quick` on small tasks and few rounds, in seconds.

    `on` names the experiment for dual against primal averaging under an L1 penalty (else colon histology where its
    data is there, else breast-cancer).
    """
    T = min(T, 4_000) if quick else T
    K = (1, 4, 16) if quick else (1, 2, 4, 8, 16)
    say(f"G against t: K = {', '.join(map(str, K))}, {T:,} steps, 3 seeds")
    curve = decay(K, T)
    say("the same with mini-batch gradients, and with Hessians of their own")
    least = min(T, 1_500 if quick else 20_000)
    plain = decay(K, least, estimator=lambda c: Plain())
    hessians = 0.1 + 0.9 * torch.rand(max(K), 20, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    own = decay(K, least, hessians=hessians)
    say("consensus within rounds")
    apart = consensus()
    say("dual and primal averaging on quadratics")
    ways = {name: averaging(prox, 60 if quick else 300) for name, prox in SETS.items()}
    trial = l1(on, quick, say)
    say("the smoothness of H")
    smooth = rough(quick)
    say("second moments against the number of clients")
    second = moments(replicas=200 if quick else 500)
    return Findings(curve, plain, own, complexity(curve), apart, ways, trial, smooth, second, quick)


def l1(on: str | None, quick: bool, say: Say) -> Ablation | None:
    """The ablation on the first experiment that can be had."""
    for name in (on,) if on else ABLATIONS[1:] if quick else ABLATIONS:
        experiment = find(name).completed()
        label = penalised(experiment)
        try:
            problem = experiment.problem.build()
        except ValueError:
            if on:
                raise
            continue
        rounds = 60 if quick else experiment.rounds
        say(f"dual and primal averaging under an L1 penalty: {name}, {rounds} rounds")
        algorithm: Any = experiment.build(label)
        own = experiment.problem
        stands = " in place of PathMNIST" if experiment.figure == "pathmnist" != own.data else ""
        size = f"{problem.d:,} parameters, {own.clients} clients, {rounds} rounds, {len(experiment.seeds)} seeds"
        about = f"{own.data}{stands}, {label}, {own.model} of {size}"
        return Ablation(name, about, ablation(algorithm, problem, rounds, experiment.seeds))
    return None


def penalised(experiment: Experiment) -> str:
    """The FedDA with a penalty in an experiment."""
    for label in experiment.algorithms:
        made = experiment.build(label)
        if type(made) is FedDA and experiment.algorithms[label].get("prox"):
            return label
    raise ValueError(f"theory: {experiment.name} holds no FedDA with a penalty or a constraint to average both ways")


def rough(quick: bool) -> dict[str, Smoothness]:
    """Whether z makes H smoother: far from the minimum, at it, and on digits; for mini-batch gradients and for MVR."""
    still, d = 1e-6, 20
    problem = Synthetic(spectrum(d), centred(10, d, seed=0), noise=1.0)
    fixed = FedDA(Constant(still), Plain(), Diagonal(beta=0.9))
    mvr: Any = make("fedda-mvr", lr=1e-5, w=1000.0, beta=0.9)  # alpha = 0.5
    one, rounds = torch.ones(d, dtype=torch.float64), 100 if quick else 400
    found = {}
    for place, x0 in (("far from the minimum", one), ("at the minimum", 0 * one)):
        for name, algorithm in (("mini-batch gradients", fixed), ("MVR", mvr)):
            found[f"quadratics {place}, {name}"] = smoothness(algorithm, problem, rounds, SEEDS, x0=x0)
    digits = find("digits").completed()
    real, tuned = load("digits", **words(digits)), digits.build("fedda-mvr")
    assert isinstance(tuned, FedDA)
    for name, algorithm in (("mini-batch gradients", replace(tuned, estimator=Plain())), ("MVR", tuned)):
        found[f"digits, {name}"] = smoothness(algorithm, real, 40 if quick else digits.rounds, SEEDS)
    return found


def words(experiment: Experiment) -> dict[str, Any]:
    own = experiment.problem.model_dump()
    own.pop("data")
    return own
