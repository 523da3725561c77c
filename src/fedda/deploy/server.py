"""The server's app: rounds over the federation, a checkpoint after each round, and a report for the operator."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
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
from ..core import Layout, Problem, bind_to_problem
from ..problems import problem as make_problem
from ..problems.batchnorm import BatchNorms
from ..problems.evaluation import means
from ..problems.neural import Loss, flatten
from ..problems.neural import trainable as trained_parameters
from ..registry import rates_of_unknown_length
from ..run import Run
from .checkpoint import STATISTICS, Checkpoint, Ledger
from .constants import frozen_hash, with_frozen
from .federation import Federation
from .grid import give_up_after, link_errors
from .participants import Participants
from .relay import Relay
from .report import Rejections, difference, now, rounded
from .reported import ReportedMetrics, Wanted
from .secret import SecretDraws
from .secure import SecureSums, refuse_algorithm, refuse_settings, terms_for
from .status import ADVERSARIES
from .traffic import DTYPES, algorithm, parsed, with_numbers_of_the_run, wrappers

Model = Callable[[], nn.Module]
GRADIENTS = ("gradients", "full_gradients")
LINK_TIMEOUT = 120.0  # seconds; a server whose SuperLink has not answered for so long ends
KINDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
SHOWN = 20  # sites whose sizes the log shows; report.json has all


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
    participants: str = setting("", "folder with the sites' public keys nodeNUMBER.pub; empty: numbers are not checked")
    without: str = setting("", 'numbers of sites that are left out, such as "3" or "3,5"')
    budget: str = setting("{}", 'privacy budget, with noise: {"epsilon": 8, "delta": 1e-5}')
    secure_aggregation: bool = setting(False, "true: the server sees sums over the sites, and no single reply")
    secure_bits: int = setting(64, "bits of a number in such a sum: 64, or 32 with a small `limit`")
    relay: str = setting("", "a path: this server is a relay, and an upper federation reaches it by this socket")
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
        asked = self.asked
        if asked < 1:
            raise ValueError(f"Plan: without leaves out {self.without}, and {self.clients} sites are all there are")
        if not self.min_replies and asked == 1:
            raise ValueError(
                "Plan: a round with one site is refused: a mean of one reply is that reply; min_replies=1 allows it"
            )
        if self.needed_replies > asked:
            raise ValueError(f"Plan: min_replies must be at most the cohort, {asked}, got {self.min_replies}")
        if not self.timeout > 0:
            raise ValueError(f"Plan: timeout must be > 0, got {self.timeout:g}")
        if not 0 < self.limit <= 1e100:
            raise ValueError(f"Plan: limit must be > 0 and <= 1e100, got {self.limit:g}")
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
        if self.secure_aggregation:
            refuse_settings(self.secure_bits, self.asked, self.largest_weight, self.limit, known, around)

    @property
    def left_out(self) -> frozenset[int]:
        """The numbers of the sites that are left out."""
        if not re.fullmatch(r"\s*|\s*\d+\s*(,\s*\d+\s*)*", self.without):
            raise ValueError(f"Plan: without must be numbers of sites, such as '3' or '3,5', got {self.without[:40]!r}")
        return frozenset(int(number) for number in self.without.split(",") if number.strip())

    @property
    def sites(self) -> int:
        """Number of sites that take part."""
        return self.clients - len(self.left_out)

    @property
    def asked(self) -> int:
        """Sites per round."""
        return min(self.cohort or self.sites, self.sites)

    @property
    def needed_replies(self) -> int:
        """By default half of the sites per round, and at least 2: a mean of one reply is that reply."""
        return self.min_replies or max(2, math.ceil(self.asked / 2))

    @property
    def largest_weight(self) -> int:
        return self.max_samples if self.weights == "samples" else 1

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
        refuse_simulated(given)
        known = {f.name: given[f.name] for f in fields(cls) if f.name in given}
        for f in fields(cls):
            kind: Any = type(f.default)
            if f.name in known and type(known[f.name]) is not kind:
                if kind is not float or type(known[f.name]) is not int:
                    key = f.name.replace("_", "-")
                    raise ValueError(f"Plan: {key} must be {KINDS[kind]}, got {known[f.name]!r}")
                known[f.name] = float(known[f.name])
        try:
            return cls(**known)
        except ValueError as why:  # it names settings as Python does, and here they have dashes
            names = "|".join(f.name for f in fields(cls) if "_" in f.name)
            raise ValueError(re.sub(rf"\b({names})\b", lambda m: m[0].replace("_", "-"), str(why))) from None


SIMULATED = ("sampling", "drop", "availability", "personal", "personalise", "patience", "validation")


def refuse_simulated(names: Iterable[str]) -> None:
    """Refuse options that simulations have and federations do not."""
    for name in names:
        if name in SIMULATED:
            raise ValueError(
                f"Plan: federations do not offer {name}, it is for simulations by fedda run or fedda.train"
            )


def refuse_noise(norms: BatchNorms, plan: Plan) -> None:
    """The trained model holds the statistics of BatchNorm, which are means of the sites' samples without noise."""
    if norms.layers and plan.noisy:
        layer = next(iter(norms.layers))
        raise ValueError(f"deploy: {layer} is a BatchNorm, whose statistics noise does not protect: use GroupNorm")


class Remote(Problem):
    """The federation as a problem. Its clients are remote, so it has sizes and a start, but no gradients."""

    max_rate = 1.0
    layout: Layout = []  # noqa: RUF012
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(
        self, model: Model, loss: Loss, plan: Plan, test: tuple[Any, Any] | None, metrics: Wanted = None,
        trainable: str | Sequence[str] | None = None,
    ):  # fmt: skip
        self.model, self.plan, self.dtype, self.trainable = model, plan, DTYPES[plan.dtype], trainable
        network = self._new_model(plan.seed)
        self.norms, self.reported = BatchNorms(network), ReportedMetrics.of(metrics)
        refuse_noise(self.norms, plan)
        self.layout = [(name, tuple(p.shape)) for name, p in trained_parameters(network)]
        self.d, self.batch_size = flatten(network).numel(), plan.batch
        self.judge = None
        if test is not None:
            self.judge = make_problem(network, loss, x=test[0], y=test[1], metrics=metrics).to(dtype=self.dtype)
        self.frozen_hash = frozen_hash(network, self.dtype)
        self.estimated: tuple[Tensor, Tensor] | None = None  # the statistics of BatchNorm: at which x, and their values
        self.federation: Federation | None = None
        self.clients, self.sizes = 0, torch.empty(0, dtype=torch.int64)

    def joined(self, federation: Federation) -> Remote:
        self.federation = federation
        self.sizes = federation.greet(self.plan.sites, self.layout)
        if self.plan.max_samples:
            self.sizes = self.sizes.clamp(max=self.plan.max_samples)
        self.clients = len(self.sizes)
        return self

    def _new_model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.key(seed, rng.MODEL)))
            return with_frozen(self.model(), self.trainable)

    @property
    def form(self) -> tuple[Tensor, Layout]:
        """A vector like the model's, and the layout of its parameters."""
        return torch.zeros(self.d, dtype=self.dtype), self.layout

    def start(self, seed: int) -> Tensor:
        return flatten(self._new_model(seed)).to(self.dtype)

    def evaluate(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """On the clients' samples, as they report it, and on the server's test set, if it has one."""
        assert self.federation is not None
        statistics = self.statistics(x, weights)
        metrics = {"train_loss": torch.tensor(torch.nan, dtype=torch.float64)}  # if no client answers
        metrics |= self.reported.row(self.federation.evaluate(x, weights, statistics=statistics))
        if self.judge is not None:
            totals = self.judge.totals(x, torch.ones(1, dtype=torch.float64), statistics=statistics)
            own = self.judge.finished(means(totals))
            metrics |= {f"test_{name.removeprefix('train_')}": value for name, value in own.items()}
        return metrics

    def statistics(self, x: Tensor, weights: Tensor) -> Tensor | None:
        """The means and variances of BatchNorm at x [d] from all sites' samples, [size]: a message to each site, unless
        they are known. None if the model has no BatchNorm."""
        assert self.federation is not None
        if self.norms.layers and self.known_statistics(x) is None:
            moments, _ = self.federation.moments(x.view(1, -1), weights)
            self.estimated = x.clone(), self.norms.from_moments(moments)[0].to(self.dtype)
        return self.known_statistics(x)

    def known_statistics(self, x: Tensor) -> Tensor | None:
        return self.estimated[1] if self.estimated is not None and torch.equal(self.estimated[0], x) else None


def serve(
    grid: Grid, plan: Plan, model: Model, loss: Loss, test: tuple[Any, Any] | None = None,
    say: Callable[[str], None] = print, secret: bytes | None = None, after_round: Callable[[Run], None] | None = None,
    metrics: Wanted = None, trainable: str | Sequence[str] | None = None,
) -> Run:  # fmt: skip
    """All rounds, from the start or from the checkpoint. The report is written after each round and at the end.

    `secret` (32 bytes) decides cohorts and batches of a new run; by default the operating system draws one.
    """
    participants = Participants(Path(plan.participants) if plan.participants else None)
    remote = Remote(model, loss, plan, test, metrics, trainable)  # first: a refused model leaves no files
    if plan.secure_aggregation:
        refuse_algorithm(bind_to_problem(algorithm(plan.table), *remote.form), remote.form[0][None], plan.weights)
    checkpoint, draws, ledger = Checkpoint(Path(plan.out)), SecretDraws(secret), Ledger()
    state: dict[str, Tensor] | None = None
    facts: dict[str, Any] = {}
    before: dict[str, Any] = {}
    if plan.resume:
        state, base, facts = checkpoint.load(say)
        before = checkpoint.last_report()
        try:
            plan = remote.plan = _resumed(plan, facts, say)
            if facts.get("frozen", remote.frozen_hash) != remote.frozen_hash:
                raise ValueError(f"{plan.out}: the frozen parameters of the model are not those of the run")
        except ValueError:
            checkpoint.release()
            raise
    else:
        checkpoint.begin(draws.key)
    federation = Federation(
        grid, plan.table, plan.batch, DTYPES[plan.dtype], plan.timeout, plan.needed_replies, plan.repeats, plan.limit,
        aggregation=plan.aggregation, without=plan.left_out, participants=participants,
        secure=SecureSums(plan.secure_bits, plan.largest_weight) if plan.secure_aggregation else None,
        reported=remote.reported, statistics_size=remote.norms.size, frozen=remote.frozen_hash,
    )  # fmt: skip
    if state is not None:
        draws.key = checkpoint.secret
        kept = [k for k, name in enumerate(facts["names"]) if name not in plan.left_out]
        state = {k: v[..., kept, :] if k.startswith("memory.") else v for k, v in state.items()}
        federation.run, federation.stamp = facts["run"], facts["stamp"]
        federation.names = [facts["names"][k] for k in kept]
        federation.samples = [facts.get("samples", {}).get(str(name), 0) for name in federation.names]
        federation.base, federation.saved = base[kept], base[kept]
        federation.rejections = Rejections.of(before if "sites" in before else facts)
        federation.gradients, federation.full_gradients = (int(state[f"counts.{k}"]) for k in GRADIENTS)
        if STATISTICS in state:
            remote.estimated = state["server.x"].flatten(), state[STATISTICS]
    report = {"started": now()} | before
    report |= {"status": "running", "round": 0 if state is None else int(state["round"]), "rounds": plan.rounds}
    report |= {"algorithm": plan.algorithm, "out": str(Path(plan.out).resolve())}
    report["left_out"] = sorted(plan.left_out)
    report.pop("why", None)
    earlier = before.get("seconds", {})  # of the servers before this one

    def write_report() -> None:
        seconds = {k: v + earlier.get(k, 0.0) for k, v in federation.watch.total().items()}
        report["seconds"] = rounded(earlier | seconds)
        checkpoint.write_report(report | federation.about_sites() | {"updated": now()})

    federation.refresh = write_report
    give_up_after(grid, LINK_TIMEOUT)
    watch = federation.watch
    try:
        with link_errors(LINK_TIMEOUT):
            write_report()
            remote.joined(federation)
            if state is None:
                _say_unseen(federation, plan, say)
            _say_sizes(federation, plan, facts.get("samples", {}), report, say)
            known = algorithm(plan.table).with_steps_of(remote)
            federation.algorithm = with_numbers_of_the_run(plan.table, known, plan.rounds)
            charged = (0, 0)
            if plan.noisy:
                done = (0, 0) if state is None else (1, int(state["round"]))
                ledger = checkpoint.ledger(*done)
                charged = ledger.starts - done[0], ledger.rounds - done[1]
                draws.attempts = partial(checkpoint.charge, ledger)
            with watch.part("averaging"):
                run = Run(
                    algorithm(federation.algorithm), remote, plan.asked, plan.seed,
                    engine=federation, weights="uniform" if plan.secure_aggregation else plan.weights, state=state,
                    aggregation=wrappers(plan.aggregation), budget=plan.privacy_budget, draws=draws, charged=charged,
                )  # fmt: skip
            if state is None or facts.get("names") != federation.names:
                _save(checkpoint, run, federation, plan)
            if checkpoint.last_row() < run.round:  # a server may have died before it wrote the row
                report |= _evaluate(checkpoint, run, federation, plan, 0.0)
            last = run.last_round(plan.rounds)
            while run.round < last:
                began = watch.total()
                with watch.part("averaging"):
                    run.advance()
                _save(checkpoint, run, federation, plan)  # before the evaluation sends the new model to the sites
                report["round"] = run.round
                if run.privacy is not None:
                    report["privacy"] = run.privacy.row(run.round)
                write_report()
                seconds = sum(difference(watch.total(), began).values())
                report |= _evaluate(checkpoint, run, federation, plan, seconds)
                report["last_round"] = rounded(difference(watch.total(), began))
                write_report()
                say(f"round {run.round} of {plan.rounds}: {_line(run, federation)}")
                if after_round:
                    after_round(run)
            if remote.norms.layers:  # the last model has its statistics, also without an evaluation
                with watch.part("evaluation", whole=True):
                    current_statistics(run)
                _save(checkpoint, run, federation, plan)
        report["status"] = "finished"
        if why := run.stop_reason(run.round, plan.rounds):
            report |= {"status": "stopped", "why": why}
            say(why)
        return run
    except BaseException as error:
        report |= {"status": "failed", "why": f"{type(error).__name__}: {checks.one_line(error)}"}
        raise
    finally:
        federation.waiting = set()
        try:
            write_report()
        finally:
            checkpoint.release()


def _resumed(plan: Plan, facts: dict[str, Any], say: Callable[[str], None]) -> Plan:
    """The plan of a resumed run. It leaves out the sites that an earlier server of the run has left out, too."""
    begun = {f.name: f.default for f in fields(Plan)}  # of a run that is older than a setting
    begun |= facts["plan"]
    differing = [(key, begun.get(key), value) for key, value in _fixed(plan).items() if begun.get(key) != value]
    if differing:
        changed = ", ".join(f"{key.replace('_', '-')} was {old!r} and is {new!r}" for key, old, new in differing)
        raise ValueError(f"{plan.out}: a resumed run cannot change these settings: {changed}")
    earlier = set(facts.get("left_out", []))
    if unknown := sorted(plan.left_out - {*facts["names"], *earlier}):
        raise ValueError(f"{plan.out}: without names site {unknown[0]}, but the run has the sites {facts['names']}")
    if gone := sorted(plan.left_out - earlier):
        say(f"from now on the run leaves out: {', '.join(f'site {name}' for name in gone)}")
    return replace(plan, without=",".join(str(name) for name in sorted(plan.left_out | earlier)))


def _say_unseen(federation: Federation, plan: Plan, say: Callable[[str], None]) -> None:
    """Say which of the sites that a new run leaves out are not there: their number may be a mistake."""
    unseen = plan.left_out - set(federation.keys) if not federation.relays else ()  # relays do not send these
    for name in sorted(unseen):
        say(f"WARNING: without names site {name}, which was not seen; the run has the sites {federation.names}")


def _say_sizes(
    federation: Federation, plan: Plan, before: dict[str, int], report: dict[str, Any], say: Callable[[str], None]
) -> None:
    """Say the sizes that the sites claim, and a line for each that differs from its claim before the resume."""
    if plan.secure_aggregation:
        error = terms_for(plan.sites, plan.secure_bits, plan.limit, plan.largest_weight).error
        say(f"secure aggregation: sizes and replies are hidden; a mean of values is off by at most {error:.2g}")
        report["secure_aggregation"] = {"bits": plan.secure_bits, "limit": plan.limit, "largest_error": error}
        return
    claims = federation.claims()
    known = ", ".join(f"{site}: {size}" for site, size in list(claims.items())[:SHOWN])
    more = f", and {len(claims) - SHOWN} more" if len(claims) > SHOWN else ""
    cap = f", at most {plan.max_samples} each" if plan.max_samples else ""
    say(f"samples that the sites claim: {known}{more}; weights: {plan.weights}{cap}")
    changed = {site: [before[site], size] for site, size in claims.items() if before.get(site, size) != size}
    for site, (old, new) in changed.items():
        say(f"WARNING: site {site} claims {new} samples; before the resume it claimed {old}")
    if changed:
        report["changed_samples"] = report.get("changed_samples", {}) | changed


def _save(checkpoint: Checkpoint, run: Run, federation: Federation, plan: Plan) -> None:
    with federation.watch.part("checkpoint", whole=True):
        run.set_gradients(federation.gradients, federation.full_gradients)
        if federation.secure is not None:
            run.add_bytes(*federation.secure.take_bytes())
        facts = {"plan": _fixed(plan), "run": federation.run, "stamp": federation.stamp, "names": federation.names}
        facts |= {"rejected": dict(federation.rejections.counts), "layout": run.problem.layout}
        facts["left_out"] = sorted(plan.left_out)
        facts["samples"] = federation.claims()
        remote: Any = run.problem
        facts |= {"statistics": remote.norms.layout, "frozen": remote.frozen_hash}
        statistics = remote.known_statistics(run.server.x.flatten())
        if run.privacy is not None:
            facts["privacy"] = run.privacy.row(run.round)
        checkpoint.save(run.state() | ({} if statistics is None else {STATISTICS: statistics}), federation.base, facts)
        federation.saved = federation.base.clone()


def _evaluate(
    checkpoint: Checkpoint, run: Run, federation: Federation, plan: Plan, seconds: float
) -> dict[str, dict[str, float]]:
    """Write a row for this round, if one is due. Returns its metrics, for the report."""
    if not plan.every or (run.round % plan.every and run.round != plan.rounds):
        return {}
    with federation.watch.part("evaluation", whole=True):
        (row,) = run.evaluate()
    if federation.statistics_size:
        _save(checkpoint, run, federation, plan)  # with the statistics of BatchNorm
    checkpoint.append([row | {"seconds": round(seconds, 3)}])
    return {"metrics": {k: v for k, v in row.items() if k.startswith(("train_", "test_")) and math.isfinite(v)}}


def current_statistics(run: Run) -> dict[str, Tensor]:
    """The statistics of BatchNorm of the model as it is, by name."""
    remote: Any = run.problem
    statistics = remote.statistics(run.server.x.flatten(), run.simulation.objective)
    return {} if statistics is None else remote.norms.named(statistics)


def _fixed(plan: Plan) -> dict[str, Any]:
    """The settings that a resumed run must share with the run that was begun."""
    free = {"rounds", "resume", "out", "timeout", "min_replies", "repeats", "budget", "every", "limit"}
    free |= {"participants", "without", "relay"}
    if rates_of_unknown_length(json.loads(plan.table)):
        free.remove("rounds")
    return {key: value for key, value in asdict(plan).items() if key not in free}


def _line(run: Run, federation: Federation) -> str:
    faults = ", ".join(f"{n} {kind}" for kind, n in federation.rejections.counts.items())
    counted = f"; faults, also in evaluations and repeated rounds: {faults}" if faults else ""
    lost = int(run.dropped)
    spent = {} if run.privacy is None else run.privacy.row(run.round)
    known = {name: spent[f"epsilon_{key}"] for key, name in ADVERSARIES.items() if f"epsilon_{key}" in spent}
    epsilon = [f"{value:.3g} against {name}" for name, value in known.items()]
    privacy = f"; epsilon {', '.join(epsilon)} ({spent['privacy']})" if epsilon else ""
    return f"{lost} {'reply' if lost == 1 else 'replies'} lost so far{counted}{privacy}"


def relay(
    grid: Grid, plan: Plan, model: Model, metrics: Wanted = None, trainable: str | Sequence[str] | None = None
) -> None:
    """Be a relay for the sites of this federation, until the run is stopped or the SuperLink is gone."""
    give_up_after(grid, LINK_TIMEOUT)
    with link_errors(LINK_TIMEOUT):
        Relay(
            grid, model(), plan.clients, plan.timeout, plan.min_replies or 2, plan.repeats, plan.limit, metrics,
            trainable,
        ).listen(Path(plan.relay))  # fmt: skip


def server_app(
    model: Model, loss: Loss, test: Callable[[], tuple[Any, Any]] | None = None, metrics: Wanted = None,
    trainable: str | Sequence[str] | None = None,
) -> ServerApp:  # fmt: skip
    """The ServerApp for a model.

    Args:
        model: the network, or a function that makes it.
        loss: a function of its output and the targets.
        test: a function that loads the server's own test set (x, y), if it has one.
        metrics: more metrics than the loss and the accuracy, as in `fedda.problem`: the sites must have the same names.
        trainable: the parameters to train, by a pattern such as "head.*"; the same as at the sites.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        plan = Plan.of(dict(context.run_config))
        if plan.relay:
            relay(grid, plan, model, metrics, trainable)
        else:
            serve(grid, plan, model, loss, test() if test else None, metrics=metrics, trainable=trainable)

    return app
