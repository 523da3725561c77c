"""`fedda theory`: the paper's theory, measured; and its advice on an experiment."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..files import write_whole
from . import options
from .app import app, load_plugins
from .commands import PAPER

if TYPE_CHECKING:
    from ..experiments.config import Experiment
    from ..theory.advice import Advice

ADVICE, THEORY = "Advice on an experiment", "Without an experiment"
LEAST = 1000  # steps that the fit of the slope needs


@app.command(rich_help_panel=PAPER, epilog="Example: fedda theory digits --try")
def theory(
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="An experiment to advise on: built in, or a .toml file. Without it, the theory is measured.",
            autocompletion=options.complete_experiment,
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            help="A FedDA of the experiment; by default the first with MVR.", metavar="LABEL", rich_help_panel=ADVICE
        ),
    ] = None,
    try_: Annotated[
        bool,
        typer.Option("--try", help="Train with the proposed and the experiment's values.", rich_help_panel=ADVICE),
    ] = False,
    settings: options.Settings = None,
    samples: Annotated[
        int | None,
        typer.Option(help="Samples used per client at most; 512 by default.", rich_help_panel=ADVICE),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Also write the advice into this JSON file.", rich_help_panel=ADVICE)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; runs/theory by default.", rich_help_panel=THEORY)
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small tasks, few steps: seconds, not minutes.", rich_help_panel=THEORY)
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(help="T of the curve of G, from 1000; 60,000 by default.", rich_help_panel=THEORY),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="Experiment for averaging under an L1 penalty.",
            metavar="EXPERIMENT",
            rich_help_panel=THEORY,
            autocompletion=options.complete_experiment,
        ),
    ] = None,
    plugin: options.Plugins = None,
) -> None:
    """Estimate the constants of an experiment and propose lr, w, c; or, without one, measure the paper's theory.

    Without EXPERIMENT: six pictures (PNG and SVG) and theory.json, from which `fedda claims` judges C26 to C30.
    """
    from ..checks import count
    from ..experiments import find
    from ..experiments.overrides import override
    from ..theory.estimates import SAMPLES
    from ..theory.findings import penalised

    load_plugins(plugin)
    if experiment is None:
        if label is not None or try_ or settings or samples is not None or figures is not None:
            raise ValueError("theory: --label, --try, --set, --samples and --figures are for an EXPERIMENT: name one")
        steps = 60_000 if steps is None else steps
        count("theory", "--steps", steps, at_most=10**7)
        if steps < LEAST:
            raise ValueError(f"theory: --steps must be at least {LEAST:,}, got {steps}: a slope wants 1.3 decades")
        if on is not None:
            penalised(find(on).completed())  # refuse it before the work
        measure_theory(out or Path("runs/theory"), quick, steps, on)
    else:
        if quick or (on, out, steps) != (None, None, None):
            raise ValueError("theory: --quick, --steps, --on and --out are for the theory itself: leave EXPERIMENT out")
        samples = SAMPLES if samples is None else samples
        count("theory", "--samples", samples)
        give_advice(override(find(experiment), settings=settings or ()).completed(), label, try_, samples, figures)


def measure_theory(out: Path, quick: bool, steps: int, on: str | None) -> None:
    from ..progress import print_table, status_line
    from ..theory.findings import findings
    from ..theory.methods import CORRECTED, HEADS
    from ..theory.pictures import draw
    from ..theory.verdicts import verdicts

    out.mkdir(parents=True, exist_ok=True)
    with status_line() as say:
        results = findings(steps, quick, on, say)
    judged = verdicts(results)
    write_whole(out / "theory.json", json.dumps(judged, indent=1, allow_nan=False) + "\n")
    for path in draw(results, out):
        if path.suffix == ".png":
            print(f"picture: {path} (and .svg)")
    for claim, verdict in judged.items():
        print(f"{claim} {verdict['verdict']}: {verdict['reason']}")
    title = "Table 1, as we read it: to reach |grad f|^2 <= eps, up to logarithms"
    print_table(HEADS, [row.cells() for row in CORRECTED], title)
    print(f"verdicts: {shlex.join(['fedda', 'claims', str(out)])}")


def give_advice(experiment: Experiment, label: str | None, train: bool, samples: int, figures: Path | None) -> None:
    from ..engines.participation import cohort_size
    from ..progress import print_table, status_line
    from ..runs.formats import plain
    from ..theory.advice import advise, analysed, trial

    label = analysed(experiment, label)
    algorithm: Any = experiment.build(label)
    problem = experiment.problem.build()
    cohort = cohort_size(experiment.cohort, problem.clients)
    with status_line() as say:
        say(f"{label}: estimating L, sigma and zeta")
        advice = advise(algorithm, problem, experiment.rounds, experiment.seeds[0], cohort, samples)
    theorem = advice.theorem
    partial = cohort < problem.clients
    size = f"{problem.d:,} parameters, {problem.clients} clients, {theorem.I} local steps, T = {advice.T:,}"
    print(f"{label} on {experiment.name}: {size}")
    print_table(("constant", "value", "what it is"), rows(advice), "at the first point")
    print_table(
        ("", "lr", "w", "c", "eta_0", "alpha_0", "eta_0 lambda L_H", "to Theorem 1"), choices(advice), "choices"
    )
    values = [f"--set {label}.{name}={plain(getattr(advice.proposed, name), 4)}" for name in ("lr", "w", "c")]
    print(f"proposed: {' '.join(values)}")
    factor = plain(advice.current.eta / advice.proposed.eta, 2)
    print(f"the experiment's first step size is {factor} times the proposed one")
    for rates in (advice.current, advice.proposed):
        if rates.broken:
            print(f"{rates.who}: outside Theorem 1: not {'; not '.join(rates.broken)}")
    if advice.penalised:
        print("outside Theorem 1: it is about constraint sets only, and this algorithm has a penalty")
    if partial:
        print(f"outside Theorem 1: {cohort} of {problem.clients} clients take part; it has all of them")
    constant = f"{theorem.constant_until:,} steps; this run has {advice.T:,}"
    print(f"Theorem 1's own step size is constant for the first {constant}.")
    empty = ", so it says nothing here." if advice.bound > advice.now else "."
    now = f"|grad f|^2 at the first point is {plain(advice.now, 3)}"
    print(f"Theorem 1's bound on the mean of G: {plain(advice.bound, 3)}; {now}{empty}")
    print(f"Corollary 1's number of local steps for this T and K: {advice.steps:.2g}; the experiment has {theorem.I}.")
    results = trial(experiment, algorithm, advice, problem) if train else {}
    if results:
        heads = list(results["proposed"])
        lines = [[who, *(plain(values[name]) for name in heads)] for who, values in results.items()]
        about = f"after {experiment.rounds} rounds, {len(experiment.seeds)} seeds"
        print_table(("", *(name.replace("_", " ") for name in heads)), lines, about)
    if figures is not None:
        named = {"own": advice.current, "proposed": advice.proposed, "literal": advice.literal}
        content = {"experiment": experiment.name, "label": label, "T": advice.T, "L_H": advice.L_H, "rho": advice.rho}
        content |= {"bound": advice.bound, "constants": asdict(advice.constants)}
        content |= {"choices": {name: asdict(rates) for name, rates in named.items()}, "trained": results}
        figures.parent.mkdir(parents=True, exist_ok=True)
        write_whole(figures, json.dumps(content, indent=1) + "\n")
        print(f"figures: {figures}")


def rows(advice: Advice) -> list[tuple[str, str, str]]:
    from ..runs.formats import plain

    at = advice.constants
    batches = "assumption 5: root of the largest eigenvalue of E[Hessian(batch)^2], worst client"
    numbers = (
        ("L", at.L, "largest curvature of f"),
        ("L of batches", at.L_batch, batches),
        ("rho", advice.rho, "smallest entry of H_0"),
        ("L_H", advice.L_H, "largest curvature of f in the metric H_0"),
        ("sigma", at.sigma, "noise of a batch's gradient, worst client"),
        ("zeta", at.zeta, "largest difference of two clients' gradients"),
        ("f", at.loss, "training loss"),
        ("|grad f|", at.gradient, "full gradient"),
    )
    return [(name, plain(value), meaning) for name, value, meaning in numbers]


def choices(advice: Advice) -> list[list[str]]:
    from ..runs.formats import plain

    lines = []
    for rates in (advice.current, advice.proposed, advice.literal):
        numbers = (rates.lr, rates.w, rates.c, rates.eta, rates.alpha, rates.stable)
        lines.append([rates.who, *(plain(v, 3) for v in numbers), f"{plain(rates.ratio, 3)} x"])
    return lines
