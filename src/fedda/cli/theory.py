"""`fedda theory`: the paper's theory, measured; and what it says of an experiment."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import Plugins, Settings, app, load_plugins
from .bench import progress

if TYPE_CHECKING:
    from ..experiments.config import Experiment
    from ..theory.advice import Advice

OUT = Path("runs/theory")
LEAST = 1000  # steps from which on the slope is fitted to what comes after the start


@app.command(epilog="Example: fedda theory digits --try")
def theory(
    experiment: Annotated[
        str | None, typer.Argument(help="An experiment to advise on; without one, the theory itself is measured.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Which FedDA of the experiment; the first with MVR if left out.")
    ] = None,
    try_: Annotated[
        bool, typer.Option("--try", help="Train at the proposed values, beside the experiment's own.")
    ] = False,
    words: Settings = None,
    samples: Annotated[
        int | None, typer.Option(help="At most so many samples of a client are looked at; 512 if left out.")
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="Write the advice into this JSON file, too.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Without EXPERIMENT: where pictures and theory.json go, else runs/theory.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small tasks and few steps: seconds instead of minutes.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(help="T of the curve of G against T, at least 1000; 60,000 if left out.")
    ] = None,
    on: Annotated[str | None, typer.Option(help="Experiment for averaging under an L1 penalty.")] = None,
    plugin: Plugins = None,
) -> None:
    """Estimate the constants of an experiment and propose lr, w, c; or, without one, measure the paper's theory.

    Without EXPERIMENT: six pictures (PNG and SVG) and theory.json, from which `fedda claims` judges C26 to C30.
    """
    from ..checks import count
    from ..experiments import find
    from ..experiments.overrides import choose
    from ..theory.constants import SAMPLES
    from ..theory.findings import penalised

    load_plugins(plugin)
    if experiment is None:
        if label is not None or try_ or words or samples is not None or figures is not None:
            raise ValueError("theory: --label, --try, --set, --samples and --figures are for an EXPERIMENT: name one")
        steps = 60_000 if steps is None else steps
        count("theory", "--steps", steps, at_most=10**7)
        if steps < LEAST:
            raise ValueError(f"theory: --steps must be at least {LEAST:,}, got {steps}: a slope wants 1.3 decades")
        if on is not None:
            penalised(find(on).completed())  # a mistake is said before the work
        measured(out or OUT, quick, steps, on)
    else:
        if quick or (on, out, steps) != (None, None, None):
            raise ValueError("theory: --quick, --steps, --on and --out are for the theory itself: leave EXPERIMENT out")
        samples = SAMPLES if samples is None else samples
        count("theory", "--samples", samples)
        advised(choose(find(experiment), settings=words or ()).completed(), label, try_, samples, figures)


def measured(out: Path, quick: bool, steps: int, on: str | None) -> None:
    from ..files import write_whole
    from ..progress import table
    from ..theory.findings import findings
    from ..theory.methods import CORRECTED, HEADS
    from ..theory.pictures import draw
    from ..theory.verdicts import verdicts

    out.mkdir(parents=True, exist_ok=True)
    with progress() as say:
        found = findings(steps, quick, on, say)
    says = verdicts(found)
    write_whole(out / "theory.json", json.dumps(says, indent=1, allow_nan=False) + "\n")
    for path in draw(found, out):
        if path.suffix == ".png":
            print(f"picture: {path} (and .svg)")
    for claim, own in says.items():
        print(f"{claim} {own['verdict']}: {own['reason']}")
    table(
        HEADS,
        [row.cells() for row in CORRECTED],
        "Table 1, as we read it: to reach |grad f|^2 <= eps, up to logarithms",
    )
    print(f"verdicts: {shlex.join(['fedda', 'claims', str(out)])}")


def advised(experiment: Experiment, label: str | None, train: bool, samples: int, figures: Path | None) -> None:
    from ..files import write_whole
    from ..progress import table
    from ..runs.formats import plain
    from ..theory.advice import advise
    from ..theory.trial import analysed, trial

    label = analysed(experiment, label)
    algorithm: Any = experiment.build(label)
    problem = experiment.problem.build()
    with progress() as say:
        say(f"{label}: estimating L, sigma and zeta")
        advice = advise(algorithm, problem, experiment.rounds, experiment.seeds[0], experiment.cohort, samples)
    own, found = advice.theorem, advice.found
    partial = experiment.cohort is not None and experiment.cohort < problem.clients
    size = f"{problem.d:,} parameters, {problem.clients} clients, {own.I} local steps, T = {advice.T:,}"
    print(f"{label} on {experiment.name}: {size}")
    table(("constant", "value", "what it is"), rows(advice), "at the first point")
    table(("", "lr", "w", "c", "eta_0", "alpha_0", "eta_0 lambda L_H", "to Theorem 1"), choices(advice), "choices")
    print(set_words(label, advice))
    print(
        f"the experiment's first step size is {plain(advice.own.eta / advice.proposed.eta, 2)} times the proposed one"
    )
    for who in (advice.own, advice.proposed):
        if who.broken:
            print(f"{who.who}: outside Theorem 1: not {'; not '.join(who.broken)}")
    if advice.penalised:
        print("outside Theorem 1: it is about constraint sets only, and this algorithm has a penalty")
    if partial:
        print(f"outside Theorem 1: {experiment.cohort} of {problem.clients} clients take part; it has all of them")
    print(
        f"Theorem 1's own step size is constant for the first {own.constant_until:,} steps; this run has {advice.T:,}."
    )
    empty = ", so it says nothing here." if advice.bound > advice.now else "."
    now = f"|grad f|^2 at the first point is {plain(advice.now, 3)}"
    print(f"Theorem 1's bound on the mean of G: {plain(advice.bound, 3)}; {now}{empty}")
    print(f"Corollary 1's number of local steps for this T and K: {advice.steps:.2g}; the experiment has {own.I}.")
    results = trial(experiment, algorithm, advice, problem) if train else {}
    if results:
        heads = list(results["proposed"])
        lines = [[who, *(plain(own[name]) for name in heads)] for who, own in results.items()]
        about = f"after {experiment.rounds} rounds, {len(experiment.seeds)} seeds"
        table(("", *(name.replace("_", " ") for name in heads)), lines, about)
    if figures is not None:
        choices_ = {who: asdict(getattr(advice, who)) for who in ("own", "proposed", "literal")}
        numbers = {"experiment": experiment.name, "label": label, "T": advice.T, "L_H": advice.L_H, "rho": advice.rho}
        content = numbers | {"bound": advice.bound, "constants": asdict(found), "choices": choices_, "trained": results}
        figures.parent.mkdir(parents=True, exist_ok=True)
        write_whole(figures, json.dumps(content, indent=1) + "\n")
        print(f"figures: {figures}")


def rows(advice: Advice) -> list[tuple[str, str, str]]:
    from ..runs.formats import plain

    found = advice.found
    numbers = (
        ("L", found.L, "largest curvature of f"),
        (
            "L of batches",
            found.L_batch,
            "assumption 5: root of the largest eigenvalue of E[Hessian(batch)^2], worst client",
        ),
        ("rho", advice.rho, "smallest entry of H_0"),
        ("L_H", advice.L_H, "largest curvature of f in the metric H_0"),
        ("sigma", found.sigma, "noise of a batch's gradient, worst client"),
        ("zeta", found.zeta, "largest difference of two clients' gradients"),
        ("f", found.loss, "training loss"),
        ("|grad f|", found.gradient, "full gradient"),
    )
    return [(name, plain(value), what) for name, value, what in numbers]


def choices(advice: Advice) -> list[list[str]]:
    from ..runs.formats import plain

    found = []
    for own in (advice.own, advice.proposed, advice.literal):
        numbers = (own.lr, own.w, own.c, own.eta, own.alpha, own.stable)
        found.append([own.who, *(plain(v, 3) for v in numbers), f"{plain(own.ratio, 3)} x"])
    return found


def set_words(label: str, advice: Advice) -> str:
    from ..runs.formats import plain

    own = advice.proposed
    words = [f"{label}.{word}={plain(getattr(own, word), 4)}" for word in ("lr", "w", "c")]
    return "proposed: " + " ".join(f"--set {word}" for word in words)
