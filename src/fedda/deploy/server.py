"""The server's app: rounds over the federation, a checkpoint after each round, and a report of rejected replies."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from .. import checks, rng
from ..aggregation import Budget, Noise
from ..aggregation.accounting import REPRODUCIBLE
from ..core import Layout, Problem
from ..problems import problem as make_problem
from ..problems.batchnorm import tracking_layers
from ..problems.neural import Loss, flatten, trainable
from ..registry import rates_of_unknown_length
from ..run import Run
from .checkpoint import Checkpoint, Ledger
from .federation import Federation
from .secret import SecretDraws
from .traffic import DTYPES, algorithm, parsed, with_numbers_of_the_run, wrappers

Model = Callable[[], nn.Module]
GRADIENTS = ("gradients", "full_gradients")
SHOWN = 20  # sites whose sizes the log shows; report.json has all
ADVERSARIES = {"outside": "the outside", "site": "a site"}


def setting(default: Any, meaning: str) -> Any:
    """A key of the configuration; an app's pyproject.toml shows the meaning beside it."""
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Plan:
    """The settings of a run: the keys of [tool.flwr.app.config], with dashes or underscores."""

    algorithm: str = setting("fedavg", "fedda list algorithms")
    params: str = setting("{}", "its hyper-parameters, a JSON table")
    clients: int = setting(2, "number of sites; the start waits for them")
    rounds: int = 10
    cohort: int = setting(0, "sites per round; 0 means all")
    batch: int = setting(16, "samples per local step")
    seed: int = 0
    weights: str = setting("uniform", "uniform: all sites alike; samples: by the sizes that they claim")
    max_samples: int = setting(0, "a site that claims more counts as this many; samples needs it")
    dtype: str = setting("float32", "float32 or float64")
    every: int = setting(1, "rounds between two evaluations at the sites; 0 means never")
    timeout: float = setting(600.0, "seconds that a round waits for replies")
    min_replies: int = setting(0, "with fewer a round is repeated; 0: half of the sites per round, at least 2")
    repeats: int = setting(2, "at most this often; then the run stops with its state saved")
    limit: float = setting(1e6, "a reply with a larger value is rejected")
    aggregation: str = setting("[]", "clipping, medians, noise, compression: a JSON list of tables")
    budget: str = setting("{}", 'privacy budget, with noise: {"epsilon": 8, "delta": 1e-5}')
    out: str = setting("federation", "folder of the results, where the SuperLink runs")
    resume: bool = setting(False, "true: resume from the checkpoint in `out`")

    def __post_init__(self) -> None:
        checks.check("Plan", rounds=self.rounds, batch=self.batch, clients=self.clients)
        checks.one_of("Plan", "dtype", self.dtype, tuple(DTYPES))
        checks.one_of("Plan", "weights", self.weights, ("uniform", "samples"))
        if self.cohort:
            checks.count("Plan", "cohort", self.cohort, at_most=self.clients)
        for name in ("repeats", "every", "min_replies", "max_samples"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise ValueError(f"Plan: {name} must be a whole number >= 0, got {getattr(self, name)!r}")
        asked = self.cohort or self.clients
        if not self.min_replies and asked == 1:
            raise ValueError(
                "Plan: a round with one site is refused: a mean of one reply is that reply; min_replies=1 allows it"
            )
        if self.needed_replies > asked:
            raise ValueError(f"Plan: min_replies must be at most the cohort, {asked}, got {self.min_replies}")
        if not self.timeout > 0 or not self.limit > 0:
            raise ValueError("Plan: timeout and limit must be > 0")
        known = algorithm(self.table)
        if not self.max_samples and (self.weights == "samples" or known.epochs is not None or known.proportional):
            word = "weights='samples'" if self.weights == "samples" else "epochs or steps='proportional'"
            raise ValueError(
                f"Plan: {word} needs max_samples, the most that a site counts as: a site may claim any size"
            )
        around = wrappers(self.aggregation)
        if any(isinstance(wrapper, Noise) and wrapper.reproducible for wrapper in around):
            raise ValueError(f"Plan: aggregation: {REPRODUCIBLE}: the noise of a federation has no seed")
        if self.privacy_budget is not None and not self.noisy:
            raise ValueError("Plan: a privacy budget needs noise in aggregation")

    @property
    def needed_replies(self) -> int:
        """By default half of the sites per round, and at least 2: a mean of one reply is that reply."""
        return self.min_replies or max(2, math.ceil((self.cohort or self.clients) / 2))

    @property
    def noisy(self) -> bool:
        return any(isinstance(wrapper, Noise) and wrapper.multiplier > 0 for wrapper in wrappers(self.aggregation))

    @property
    def privacy_budget(self) -> Budget | None:
        """The privacy budget."""
        table = parsed(self.budget)
        if table is None:
            raise ValueError(f"Plan: budget must be a JSON table, got {self.budget[:40]!r}")
        return None if table == {} else Budget.of(table)

    @property
    def table(self) -> str:
        """The algorithm as it is sent to the clients."""
        params = parsed(self.params)
        if not isinstance(params, dict) or "name" in params:
            raise ValueError(f"Plan: params must be a JSON table without a name, got {self.params[:40]!r}")
        return json.dumps({"name": self.algorithm, **params}, sort_keys=True)

    @classmethod
    def of(cls, config: dict[str, Any]) -> Plan:
        """From a Flower app's configuration. Other keys may belong to the app, and are ignored."""
        given = {key.replace("-", "_"): value for key, value in config.items()}
        if "words" in given:
            raise ValueError("Plan: the key words is called params now: rename it in [tool.flwr.app.config]")
        refuse_simulated(given)
        known = {f.name: given[f.name] for f in fields(cls) if f.name in given}
        for f in fields(cls):
            kind: Any = type(f.default)
            if f.name in known and type(known[f.name]) is not kind:
                if kind is not float or type(known[f.name]) is not int:
                    raise ValueError(f"Plan: {f.name} must be {kind.__name__}, got {known[f.name]!r}")
                known[f.name] = float(known[f.name])
        return cls(**known)


SIMULATED = ("sampling", "drop", "availability", "personal", "personalise", "patience", "validation")


def refuse_simulated(names: Iterable[str]) -> None:
    """Refuse options that simulations have and federations do not."""
    for name in names:
        if name in SIMULATED:
            raise ValueError(
                f"Plan: federations do not offer {name}, it is for simulations by fedda run or fedda.train"
            )


def refuse_batch_norm(model: nn.Module) -> None:
    """Each site would evaluate with its own statistics, and the trained model would have none."""
    layers = tracking_layers(model)
    if layers:
        raise ValueError(f"deploy: {next(iter(layers))} is a BatchNorm, which federations cannot train: use GroupNorm")


class Remote(Problem):
    """The federation as a problem. Its clients are remote, so it has sizes and a start, but no gradients."""

    max_rate = 1.0
    layout: Layout = []  # noqa: RUF012
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, model: Model, loss: Loss, plan: Plan, test: tuple[Any, Any] | None):
        self.model, self.plan, self.dtype = model, plan, DTYPES[plan.dtype]
        network = self._new_model(plan.seed)
        refuse_batch_norm(network)
        self.layout = [(name, tuple(p.shape)) for name, p in trainable(network)]
        self.d, self.batch_size = flatten(network).numel(), plan.batch
        self.judge = None
        if test is not None:
            self.judge = make_problem(network, loss, x=test[0], y=test[1]).to(dtype=self.dtype)
        self.federation: Federation | None = None
        self.clients, self.sizes = 0, torch.empty(0, dtype=torch.int64)

    def joined(self, federation: Federation) -> Remote:
        self.federation = federation
        self.sizes = federation.greet(self.plan.clients, self.layout)
        if self.plan.max_samples:
            self.sizes = self.sizes.clamp(max=self.plan.max_samples)
        self.clients = len(self.sizes)
        return self

    def _new_model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.key(seed, rng.MODEL)))
            return self.model()

    def start(self, seed: int) -> Tensor:
        return flatten(self._new_model(seed)).to(self.dtype)

    def evaluate(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """On the clients' samples, as they report it, and on the server's test set, if it has one."""
        assert self.federation is not None
        metrics = {"train_loss": torch.tensor(torch.nan, dtype=torch.float64)}  # if no client answers
        for name, (values, clients) in self.federation.evaluate(x).items():
            metrics[name] = (values * weights[clients]).sum() / weights[clients].sum()
        if self.judge is not None:
            own = self.judge.evaluate(x, torch.ones(1, dtype=torch.float64))
            metrics |= {name.replace("train_", "test_"): value for name, value in own.items()}
        return metrics


def serve(
    grid: Grid, plan: Plan, model: Model, loss: Loss, test: tuple[Any, Any] | None = None,
    say: Callable[[str], None] = print, secret: bytes | None = None, after_round: Callable[[Run], None] | None = None,
) -> Run:  # fmt: skip
    """All rounds, from the start or from the checkpoint. The report is written after each round and at the end.

    `secret` (32 bytes) decides cohorts and batches of a new run; by default the operating system draws one.
    """
    remote = Remote(model, loss, plan, test)  # first: a refused model leaves no files
    checkpoint, draws, ledger = Checkpoint(Path(plan.out)), SecretDraws(secret), Ledger()
    federation = Federation(
        grid, plan.table, plan.batch, DTYPES[plan.dtype], plan.timeout, plan.needed_replies, plan.repeats, plan.limit,
        aggregation=plan.aggregation,
    )  # fmt: skip
    state = None
    if plan.resume:
        state, federation.base, facts = checkpoint.load()
        draws.key = checkpoint.secret
        begun = {"params" if key == "words" else key: value for key, value in facts["plan"].items()}  # its old name
        if differing := [key for key, value in _fixed(plan).items() if begun.get(key) != value]:
            checkpoint.release()
            was = ", ".join(f"{key} was {begun.get(key)!r}" for key in differing)
            raise ValueError(f"{plan.out}: was begun with another plan: {was}")
        federation.run, federation.stamp, federation.names = facts["run"], facts["stamp"], facts["names"]
        federation.saved = federation.base.clone()
        federation.rejections.counts.update(facts["rejected"])
        federation.gradients, federation.full_gradients = (int(state[f"counts.{k}"]) for k in GRADIENTS)
    else:
        checkpoint.begin(draws.key)
    before = {} if state is None else checkpoint.last_report()
    federation.rejections.messages.update(before.get("last", {}))
    report = before | {"status": "running", "round": 0 if state is None else int(state["round"]), "rounds": plan.rounds}
    report.pop("why", None)

    def write_report() -> None:
        rejections = federation.rejections
        checkpoint.write_report(report | {"rejected": dict(rejections.counts), "last": rejections.messages})

    try:
        write_report()
        remote.joined(federation)
        _say_sizes(federation, plan, {} if state is None else facts.get("samples", {}), report, say)
        known = algorithm(plan.table).with_steps_of(remote)
        federation.algorithm = with_numbers_of_the_run(plan.table, known, plan.rounds)
        charged = (0, 0)
        if plan.noisy:
            done = (0, 0) if state is None else (1, int(state["round"]))
            ledger = checkpoint.ledger(*done)
            charged = ledger.starts - done[0], ledger.rounds - done[1]
            draws.attempts = partial(checkpoint.charge, ledger)
        run = Run(
            algorithm(federation.algorithm), remote, plan.cohort or None, plan.seed, engine=federation,
            weights=plan.weights, state=state, aggregation=wrappers(plan.aggregation),
            budget=plan.privacy_budget, draws=draws, charged=charged,
        )  # fmt: skip
        if state is None:
            _save(checkpoint, run, federation, plan)
        if checkpoint.last_row() < run.round:  # a server may have died before it wrote the row
            _evaluate(checkpoint, run, plan, 0.0)
        last = run.last_round(plan.rounds)
        while run.round < last:
            began = time.monotonic()
            run.advance()
            _save(checkpoint, run, federation, plan)  # before the evaluation sends the new model to the sites
            report["round"] = run.round
            write_report()
            _evaluate(checkpoint, run, plan, time.monotonic() - began)
            say(f"round {run.round} of {plan.rounds}: {_line(run, federation)}")
            if after_round:
                after_round(run)
        report["status"] = "finished"
        if why := run.stop_reason(run.round, plan.rounds):
            report |= {"status": "stopped", "why": why}
            say(why)
        return run
    except BaseException as error:
        report |= {"status": "failed", "why": f"{type(error).__name__}: {checks.one_line(error)}"}
        raise
    finally:
        try:
            write_report()
        finally:
            checkpoint.release()


def _say_sizes(
    federation: Federation, plan: Plan, before: dict[str, int], report: dict[str, Any], say: Callable[[str], None]
) -> None:
    """Say the sizes that the sites claim, and a line for each that differs from its claim before the resume."""
    claims = federation.claims()
    known = ", ".join(f"{site}: {size}" for site, size in list(claims.items())[:SHOWN])
    more = f", and {len(claims) - SHOWN} more" if len(claims) > SHOWN else ""
    cap = f", at most {plan.max_samples} each" if plan.max_samples else ""
    say(f"samples that the sites claim: {known}{more}; weights: {plan.weights}{cap}")
    changed = {site: [before[site], size] for site, size in claims.items() if before.get(site, size) != size}
    for site, (old, new) in changed.items():
        say(f"WARNING: site {site} claims {new} samples; before the resume it claimed {old}")
    report["samples"] = claims
    if changed:
        report["changed samples"] = report.get("changed samples", {}) | changed


def _save(checkpoint: Checkpoint, run: Run, federation: Federation, plan: Plan) -> None:
    run.set_gradients(federation.gradients, federation.full_gradients)
    facts = {"plan": _fixed(plan), "run": federation.run, "stamp": federation.stamp, "names": federation.names}
    facts |= {"rejected": dict(federation.rejections.counts), "layout": run.problem.layout}
    facts["samples"] = federation.claims()
    if run.privacy is not None:
        facts["privacy"] = run.privacy.row(run.round)
    checkpoint.save(run.state(), federation.base, facts)
    federation.saved = federation.base.clone()


def _evaluate(checkpoint: Checkpoint, run: Run, plan: Plan, seconds: float) -> None:
    """A row for this round, if one is due."""
    if plan.every and (run.round % plan.every == 0 or run.round == plan.rounds):
        checkpoint.append([row | {"seconds": round(seconds, 3)} for row in run.evaluate()])


def _fixed(plan: Plan) -> dict[str, Any]:
    """The settings that a resumed run must share with the run that was begun."""
    free = {"rounds", "resume", "out", "timeout", "min_replies", "repeats", "budget"}
    if rates_of_unknown_length(json.loads(plan.table)):
        free.remove("rounds")
    return {key: value for key, value in asdict(plan).items() if key not in free}


def _line(run: Run, federation: Federation) -> str:
    lost = ", ".join(f"{n} {kind}" for kind, n in federation.rejections.counts.items())
    spent = {} if run.privacy is None else run.privacy.row(run.round)
    known = {name: spent[f"epsilon_{key}"] for key, name in ADVERSARIES.items() if f"epsilon_{key}" in spent}
    epsilon = [f"{value:.3g} against {name}" for name, value in known.items()]
    privacy = f"; epsilon {', '.join(epsilon)} ({spent['privacy']})" if epsilon else ""
    return f"{int(run.dropped)} replies lost so far" + (f" ({lost})" if lost else "") + privacy


def server_app(model: Model, loss: Loss, test: Callable[[], tuple[Any, Any]] | None = None) -> ServerApp:
    """The ServerApp for a model; `test` loads the server's own test set, if it has one."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, Plan.of(dict(context.run_config)), model, loss, test() if test else None)

    return app
