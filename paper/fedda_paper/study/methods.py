"""The methods of the study and their grids: 18 points for each, round the paper's values where it has some."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fedda import presets

Point = dict[str, Any]  # word -> value
FACTOR = math.sqrt(10)
TUNING, FINALS = (100, 101, 102), (0, 1, 2, 3, 4)  # seeds, each with a partition of its own


@dataclass(frozen=True)
class StudyAxis:
    """The values of one word. A grid that ends at `least` or `most` ends there for good: it is not extended."""

    word: str
    values: tuple[Any, ...]
    factor: float = FACTOR
    least: float = 0.0
    most: float = math.inf
    centre: float | None = None  # the value that the others are steps from, if not the first

    @property
    def is_number(self) -> bool:
        return isinstance(self.values[0], float)

    def beyond(self, edge: float, up: bool) -> list[float]:
        """The next two values, within the limits: steps of the factor from the axis's centre.

        >>> StudyAxis("lr", (0.1, 0.316)).beyond(0.316, up=True)
        [1.0, 3.16]
        >>> StudyAxis("eps", (0.1, 1.0), 10.0, most=10.0).beyond(1.0, up=True)
        [10.0]
        """
        start = self.values[0] if self.centre is None else self.centre
        step = round(math.log(edge / start, self.factor))
        found = [rounded(start * self.factor ** (step + (i if up else -i))) for i in (1, 2)]
        return [value for value in found if self.least <= value <= self.most]


@dataclass(frozen=True)
class StudyMethod:
    """What is run, what is tuned, and what the paper has."""

    name: str
    words: dict[str, Any]  # that are not tuned
    axes: tuple[StudyAxis, ...]  # the first is the rate
    paper: Point | None = None  # the point with the paper's values
    last: str = ""  # a word of `words` that is tried three times larger and smaller for the winner
    algorithm: str = ""  # its name in the registry, if it is not `name`
    limit: float = 1.0  # of the weights: a checkpoint with more that are not 0 does not count
    once: tuple[str, tuple[int, ...]] | None = None  # a stage and seeds: all of the grid is run, and nothing is chosen

    @property
    def rate(self) -> str:
        return self.axes[0].word

    @property
    def grid(self) -> list[Point]:
        words = [axis.word for axis in self.axes]
        return [dict(zip(words, values, strict=True)) for values in itertools.product(*(a.values for a in self.axes))]


def rounded(value: float) -> float:
    """Three digits, so that a rate is the same however it was reached."""
    return float(f"{value:.3g}")


def key(point: Point) -> str:
    """The name of a point in files."""
    return json.dumps(point, sort_keys=True)


def rates(word: str, centre: float, below: int, above: int) -> StudyAxis:
    """Numbers in steps of sqrt(10).

    >>> rates("lr", 0.01, 1, 2).values
    (0.00316, 0.01, 0.0316, 0.1)
    """
    values = tuple(rounded(centre * FACTOR**i) for i in range(-below, above + 1))
    return StudyAxis(word, values, centre=centre)


def methods(preset: str) -> dict[str, StudyMethod]:
    """All methods of the study, by name. `preset` names the paper's values for the task, where it has some."""
    builtin = presets.builtin()
    known = preset in builtin
    near = LIKE.get(preset, preset)
    paper = CENTRES.get(near) or builtin.get(near, builtin["cifar10"])
    relative = near in CENTRES  # an absolute epsilon would have another scale there
    made = [
        *(of_mvr(name, paper[name], known) for name in MVR),  # first: they take longest
        *(of_sgd(name, paper.get(name, {"lr": 0.01}), known and name in paper) for name in SGD),
        *(of_fedda(name, paper["fedda-2-1"], known and name in paper, relative) for name in ("fedda-2-1", "fedda-cv")),
        *(of_adaptive(name, rate, paper[name], known) for name, rate in ADAPTIVE.items()),
        of_adamw(paper["local-amsgrad"]["lr"]),
    ]
    return {method.name: method for method in made}


# The task whose values are the middle of the grids, for tasks of which the paper says nothing.
LIKE = {
    "cifar10-resnet": "cifar10-heterogeneous", "cifar10-rho50": "cifar10-heterogeneous",
    "cifar10-rho95": "cifar10-heterogeneous", "femnist-tenth": "femnist", "femnist-all": "femnist",
    "femnist-perceptron": "femnist", "shakespeare-lstm": "shakespeare",
    "shakespeare-gru": "shakespeare", "shakespeare-small": "shakespeare",
}  # fmt: skip
# The middle of the grids on a task of which the paper says nothing.
CENTRES: dict[str, dict[str, dict[str, Any]]] = {
    "shakespeare": {
        "fedda-mvr": {"lr": 0.02, "w": 1e4, "c": 1e6, "beta": 0.999, "eps_mode": "relative", "mu_scale": "mean"},
        "stem": {"lr": 3.16, "w": 100.0, "c": 2000.0},
        "mime-mvr": {"lr": 3.16, "w": 100.0, "c": 2000.0},
        "fedavg": {"lr": 0.316},
        "fedavgm": {"lr": 0.1},
        "fedcm": {"lr": 1.0, "momentum": 0.9},
        "scaffold": {"lr": 0.316},
        "fedda-2-1": {"lr": 0.00316, "momentum": 0.9, "beta": 0.999, "eps_mode": "relative", "mu_scale": "mean"},
        "fedadam": {"lr": 0.1, "server_lr": 0.01, "eps": 1e-8, "v0": 0.0, "bias_correction": True},
        "local-amsgrad": {"lr": 0.00316, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "state": "averaged"},
    }
}  # fmt: skip
SGD = ("fedavg", "fedavgm", "fedcm", "scaffold")
MVR = ("fedda-mvr", "stem", "mime-mvr")
ADAMW = "fedadamw-like"
ADAPTIVE = {"fedadam": "server_lr", "local-amsgrad": "lr"}  # and the word of their rate
CONSTANT = ("fedda-2-1", "fedda-cv", *ADAPTIVE, ADAMW)  # methods that are tuned with a constant rate alone


def of_sgd(name: str, words: dict[str, Any], in_paper: bool) -> StudyMethod:
    """9 rates, constant or falling as a cosine."""
    axes = (rates("lr", words["lr"], 4, 4), StudyAxis("schedule", ("constant", "cosine")))
    paper = {"lr": words["lr"], "schedule": "constant"} if in_paper else None
    return StudyMethod(name, without(words, "lr"), axes, paper)


def of_mvr(name: str, words: dict[str, Any], in_paper: bool) -> StudyMethod:
    """6 rates, 3 weights alpha_0 = c eta_0^2 of the first step. Above 1 the first steps take plain gradients."""
    axes = (rates("lr", words["lr"], 3, 2), StudyAxis("alpha0", (0.1, 0.3, 0.9)))
    weight = float(f"{words['c'] * first_rate(words['lr'], words['w']) ** 2:.4g}")
    fixed = without(words, "lr", "c") | ({"old_point": "own"} if name == "stem" else {})  # STEM as published
    return StudyMethod(name, fixed, axes, {"lr": words["lr"], "alpha0": weight} if in_paper else None)


def of_fedda(name: str, words: dict[str, Any], in_paper: bool, relative: bool) -> StudyMethod:
    """6 rates, 3 epsilons; or 3 kappas, where epsilon is relative."""
    if relative:
        return StudyMethod(name, without(words, "lr"), (rates("lr", words["lr"], 3, 2), rates("kappa", 1.0, 1, 1)))
    eps = words["eps"]
    axes = (rates("lr", words["lr"], 3, 2), rates("eps", eps, 1, 1))
    return StudyMethod(name, without(words, "lr", "eps"), axes, {"lr": words["lr"], "eps": eps} if in_paper else None)


def of_adaptive(name: str, rate: str, words: dict[str, Any], in_paper: bool) -> StudyMethod:
    """6 rates, 3 epsilons. Below 1e-8 an epsilon changes nothing, and near it a factor of sqrt(10) neither: the
    epsilons are 100 apart. The clients' rate of FedAdam is tried last. Local-AMSGrad starts as its authors have it."""
    words = {"eps": 1e-8} | without(words, *(("v0",) if name == "local-amsgrad" else ()))
    axes = (rates(rate, words[rate], 3, 2), StudyAxis("eps", (1e-8, 1e-6, 1e-4), 100.0, least=1e-8))
    paper = {word: words[word] for word in (rate, "eps")} if in_paper else None
    return StudyMethod(name, without(words, rate, "eps"), axes, paper, last="" if rate == "lr" else "lr")


def of_adamw(lr: float) -> StudyMethod:
    """Local AdamW, in the manner of FedAdamW: clients run Adam with decoupled weight decay from new each round, and the
    server averages their models. 6 rates, 3 decays. A decay below 1e-4 changes nothing."""
    words = {"client": "adam", "server": "sgd", "server_lr": 1.0, "eps": 1e-8}
    decays = StudyAxis("weight_decay", (1e-4, 1e-3, 1e-2), 10.0, least=1e-4)
    return StudyMethod(ADAMW, words, (rates("lr", lr, 3, 2), decays), algorithm="local-adapt")


def sparse_methods(limit: float) -> dict[str, StudyMethod]:
    """The methods that take a penalty, for a model with at most this share of its weights: 90 points for each, which
    are 6 rates, 3 values of a second word and 5 penalties."""
    return with_prox({}, (rates("gamma", 1e-3, 2, 2),), limit)


def constrained_methods(prox: dict[str, Any]) -> dict[str, StudyMethod]:
    """The same methods under a constraint, which is not tuned: 18 points for each."""
    return with_prox({"prox": prox})


def with_prox(more: dict[str, Any], axes: tuple[StudyAxis, ...] = (), limit: float = 1.0) -> dict[str, StudyMethod]:
    """The methods that take a proximal map. The middle of the grids is what was good on digits without one."""
    server_lr = rates("server_lr", 1.0, 1, 1)
    eps, alpha0 = rates("eps", 0.001, 0, 2), StudyAxis("alpha0", (0.1, 0.3, 0.9))
    fedda = {"momentum": 0.9, "beta": 0.999}
    made = [
        ("fedda-mvr", {"w": 1e4, "beta": 0.999, "eps": 0.01}, 0.02, alpha0),
        ("fedda-2-1", fedda, 0.001, eps),
        ("fedda-cv", fedda, 0.001, eps),
        ("feddualavg", {}, 0.1, server_lr),
        ("fedmid", {}, 0.1, server_lr),
    ]
    return {
        name: StudyMethod(name, words | more, (rates("lr", lr, 2, 3), second, *axes), limit=limit)
        for name, words, lr, second in made
    }


def untuned_methods(seeds: tuple[int, ...] = TUNING) -> dict[str, StudyMethod]:
    """Methods that have the same 8 rates on every task, as far apart as usual, and one value for everything else: which
    rate works on all tasks? All rates fall as a cosine."""
    relative = {"beta": 0.999, "eps_mode": "relative", "mu_scale": "mean"}  # an epsilon that has no scale
    adam = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    made: list[tuple[str, dict[str, Any], StudyAxis]] = [
        *((name, {}, rates("lr", 1.0, 4, 3)) for name in SGD),
        ("fedadam", {"lr": 0.03, "v0": 0.0, "bias_correction": True, "eps": 1e-8}, rates("server_lr", 0.01, 4, 3)),
        ("local-amsgrad", adam | {"state": "averaged"}, rates("lr", 0.01, 4, 3)),
        (ADAMW, of_adamw(0.01).words | {"weight_decay": 1e-4}, rates("lr", 0.01, 4, 3)),
        ("fedda-2-1", relative | {"momentum": 0.9}, rates("lr", 0.01, 4, 3)),
        ("fedda-cv", relative | {"momentum": 0.9}, rates("lr", 0.01, 4, 3)),
        ("fedda", {"momentum": 0.9, "beta": 0.99, "kappa": 0.3, "warmup": 0.05}, rates("lr", 0.3, 4, 3)),
    ]
    algorithm, cosine = {ADAMW: "local-adapt"}, StudyAxis("schedule", ("cosine",))
    return {
        name: StudyMethod(name, words, (rate, cosine), algorithm=algorithm.get(name, ""), once=("stage2", seeds))
        for name, words, rate in made
    }


def with_setting(method: StudyMethod, rate: float) -> StudyMethod:
    """A method of `untuned_methods` at one rate, for tasks on which nothing is tuned."""
    _, schedule = method.axes
    return replace(method, axes=(StudyAxis(method.rate, (rate,)), schedule), once=("finals", FINALS))


def with_steps(method: StudyMethod, chosen: Point, steps: int) -> StudyMethod:
    """The method with other local steps: 6 rates round the chosen one."""
    return around(method, chosen, chosen[method.rate], {"steps": steps})


def tuned_further(method: StudyMethod, chosen: Point) -> StudyMethod:
    """Six more points: rates round the chosen one, with a cosine if all rates were constant before; else between the
    rates that were tried.

    >>> sgd = StudyMethod("fedavg", {}, (rates("lr", 0.1, 1, 1), StudyAxis("schedule", ("constant", "cosine"))))
    >>> [point["lr"] for point in tuned_further(sgd, {"lr": 0.1, "schedule": "cosine"}).grid]
    [0.00562, 0.0178, 0.0562, 0.178, 0.562, 1.78]
    """
    if method.name in CONSTANT:
        return around(method, chosen | {"schedule": "cosine"}, chosen[method.rate])
    return around(method, chosen, chosen[method.rate] * math.sqrt(FACTOR))


def around(method: StudyMethod, point: Point, centre: float, words: Point | None = None) -> StudyMethod:
    """The method with 6 rates and the other values of a point."""
    fixed = [StudyAxis(w, (v,), least=v, most=v) if isinstance(v, float) else StudyAxis(w, (v,))
             for w, v in point.items() if w != method.rate]  # fmt: skip
    axes = (rates(method.rate, centre, 3, 2), *fixed)
    return replace(method, words=method.words | (words or {}), axes=axes, paper=None, last="")


def first_rate(lr: Any, w: float) -> Any:
    return lr / w ** (1 / 3)


def without(words: dict[str, Any], *some: str) -> dict[str, Any]:
    return {word: value for word, value in words.items() if word not in some}


Values = Callable[[Point], list[float] | None]  # what a point came to: a number for each seed, None if it diverged
