"""Everything that `fedda theory` measures, in one object for the verdicts and the pictures."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..algorithms.fedda import FedDA
from ..experiments.config import Experiment, find
from ..registry import make
from ..rules.estimators import Plain
from ..rules.preconditioners import Diagonal
from ..rules.schedules import Constant
from .lemmas import Consensus, consensus
from .rates import Complexity, Decay, complexity, decay
from .remarks import SETS, Averaging, Moments, Smoothness, ablation, averaging, moments, smoothness
from .synthetic import Synthetic, centred, spectrum

SEEDS = (0, 1, 2, 3, 4)
ABLATIONS = ("colon-small", "breast-cancer")  # the first whose data is available
Say = Callable[[str], None]


@dataclass(frozen=True)
class Ablation:
    """Dual against primal averaging under an L1 penalty, on real data: {way: {metric: one value per seed}}."""

    experiment: str
    about: str
    values: dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Findings:
    decay: Decay
    plain: Decay  # the same steps with mini-batch gradients
    different: Decay  # clients with different Hessians
    adaptive: Decay  # with an adaptive H; all others have H = 1
    complexity: Complexity
    consensus: Consensus
    averaging: dict[str, Averaging]
    ablation: Ablation | None
    smoothness: dict[str, Smoothness]
    moments: Moments
    quick: bool = False  # small tasks, few steps


def findings(T: int = 60_000, quick: bool = False, on: str | None = None, say: Say = lambda line: None) -> Findings:
    """Measure everything, in three minutes on one idle core; with `quick`, small tasks and few rounds, in seconds.

    `on` names the experiment for dual against primal averaging under an L1 penalty. The default is colon histology, or
    breast-cancer if its data is not available.
    """
    T = min(T, 4_000) if quick else T
    K = (1, 4, 16) if quick else (1, 2, 4, 8, 16)
    say(f"G against t: K = {', '.join(map(str, K))}, {T:,} steps, 3 seeds")
    curve = decay(K, T)
    say("the same with mini-batch gradients, with Hessians of their own, and with an adaptive H")
    least = min(T, 1_500 if quick else 20_000)
    plain = decay(K, least, estimator=lambda c: Plain())
    hessians = 0.1 + 0.9 * torch.rand(max(K), 20, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    different = decay(K, least, hessians=hessians)
    adaptive = decay(K, least, adaptive=True)
    say("consensus within rounds")
    apart = consensus()
    say("dual and primal averaging on quadratics")
    ways = {name: averaging(prox, 60 if quick else 300) for name, prox in SETS.items()}
    trial = l1(on, quick, say)
    say("the smoothness of H")
    smooth = rough(quick)
    say("second moments against the number of clients")
    second = moments(replicas=200 if quick else 500)
    return Findings(curve, plain, different, adaptive, complexity(curve), apart, ways, trial, smooth, second, quick)


def l1(on: str | None, quick: bool, say: Say) -> Ablation | None:
    """The ablation on the first experiment whose data is available."""
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
        task = experiment.problem
        stands = " in place of PathMNIST" if experiment.figure == "pathmnist" != task.data else ""
        size = f"{problem.d:,} parameters, {task.clients} clients, {rounds} rounds, {len(experiment.seeds)} seeds"
        about = f"{task.data}{stands}, {label}, {task.model} of {size}"
        return Ablation(name, about, ablation(algorithm, problem, rounds, experiment.seeds))
    return None


def penalised(experiment: Experiment) -> str:
    """The label of a FedDA with a penalty in an experiment."""
    for label in experiment.algorithms:
        if type(experiment.build(label)) is FedDA and experiment.algorithms[label].get("prox"):
            return label
    raise ValueError(f"theory: {experiment.name} holds no FedDA with a penalty or a constraint to average both ways")


def rough(quick: bool) -> dict[str, Smoothness]:
    """H from z and from the last estimate: far from the minimum, at it, and on digits; mini-batch gradients and MVR."""
    still, d = 1e-6, 20
    problem = Synthetic(spectrum(d), centred(10, d, seed=0), noise=1.0)
    fixed = FedDA(Constant(still), Plain(), Diagonal(beta=0.9))
    mvr: Any = make("fedda-mvr", lr=1e-5, w=1000.0, beta=0.9)  # alpha = 0.5
    one, rounds = torch.ones(d, dtype=torch.float64), 100 if quick else 400
    results = {}
    for place, x0 in (("far from the minimum", one), ("at the minimum", 0 * one)):
        for name, algorithm in (("mini-batch gradients", fixed), ("MVR", mvr)):
            results[f"quadratics {place}, {name}"] = smoothness(algorithm, problem, rounds, SEEDS, x0=x0)
    digits = find("digits").completed()
    real, tuned = digits.problem.build(), digits.build("fedda-mvr")
    assert isinstance(tuned, FedDA)
    for name, algorithm in (("mini-batch gradients", replace(tuned, estimator=Plain())), ("MVR", tuned)):
        results[f"digits, {name}"] = smoothness(algorithm, real, 40 if quick else digits.rounds, SEEDS)
    return results
