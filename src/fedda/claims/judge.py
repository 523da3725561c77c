"""The verdict on one claim: its rule compares methods in every way, one way decides, and one line gives the reason."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .compare import NOT_TESTED, SEEDS, SPARSE, Detail, Table, combine, every, holm, raw
from .kinds import KINDS
from .pool import NO_RUN, RunChoice, choose, tabulate
from .runs import Source, Theory
from .sentences import FEW, counts, named, sentence, variants
from .statements import Claim, key
from .values import BYTES, ROUNDS

NO_THEORY = "judged from a theory.json, as `fedda theory` writes it, and there is none"
UNCHECKABLE = "no experiment can check it"
# Where on the curves methods are compared; BESIDE are other metrics than the claim's, which decide nothing.
CHECKPOINT, END, TO_ROUNDS, TO_BYTES, BESIDE = "checkpoint", "end", "rounds", "bytes", "beside"


@dataclass(frozen=True)
class Verdict:
    """The verdict on one claim."""

    claim: Claim
    verdict: str
    reason: str
    stand_in: str | None = None
    details: Sequence[Detail] = ()  # in every way
    way: str = ""  # the one that decides
    sources: Sequence[Source] = ()  # the runs it was judged from
    remarks: Sequence[str] = ()  # qualifications, a part of the reason
    notes: Sequence[str] = ()  # what the rule adds to the counts, such as a rank
    missing: Sequence[str] = ()  # why figures of the claim could not be judged
    apart: Sequence[tuple[Source, str]] = ()  # runs that could not be compared, and why

    @property
    def deciding(self) -> list[Detail]:
        """The comparisons that decide."""
        return [d for d in self.details if d.way == self.way]

    @property
    def in_part(self) -> bool:
        """Whether a figure, a method, a number of local steps or later rounds of the claim are missing."""
        lacks = bool(self.missing) or any(s.short for s in self.sources)
        return self.verdict != NOT_TESTED and (lacks or any(d.verdict == NOT_TESTED for d in self.deciding))


@dataclass(frozen=True)
class Case:
    """One case of a claim: the runs of its figures, and its methods in them."""

    choice: RunChoice
    table: Table
    prefix: str  # of its comparisons: the figure or run that they are from, if the claim has several cases
    skipped: bool  # not asked about


def judge(claim: Claim, runs: Sequence[Source], theory: Theory, alone: bool = False) -> Verdict:
    """The verdict on a claim from the runs of one setting; with `alone`, only on the figures that were run."""
    if claim.kind == "theory":
        table = theory.get(claim.id, {"verdict": NOT_TESTED, "reason": NO_THEORY})
        reason = line(" ".join(str(table.get("reason", "")).split()), claim.remark)
        return Verdict(claim, table["verdict"], reason, details=[Detail(**d) for d in table.get("details", ())])
    there = {s.figure for s in runs}
    lacking = [alone and there.isdisjoint(own) for own in claim.own_figures]
    cases = [make_case(claim, *pair, runs) for pair in zip(claim.figures, lacking, strict=True)]
    way, details = compare_in_all_ways(claim, cases)
    verdict, remarks_of_rule = combine_cases(claim, cases, way, details[way])
    tested = verdict != NOT_TESTED

    chosen = list(dict.fromkeys(s for case in cases if not case.choice.why for s in case.choice.pool))
    stand_in = "; ".join(dict.fromkeys(s.stand_in for s in chosen if s.stand_in)) or None
    without = [case.choice.why.removeprefix(NO_RUN) for case in cases if case.skipped] if tested else []
    scope = ", ".join(without) + " not run" if without else ""
    place = f"on {chosen[0].place}" if without else ""
    whys = [case.choice.why for case in cases if case.choice.why and not (without and case.skipped)]
    bodies: list[str] = []
    remarks = [", ".join(filter(None, ("" if stand_in else place, scope)))]
    for case, own, remark in zip(cases, details[way], remarks_of_rule, strict=True):
        about_case = list(about(claim, case, way, own, runs))
        numbers = sentence(own, case.prefix) if tested and claim.kind != "traffic" else ""
        readings = variants(case.table) if tested else ""
        body = line(densities(claim, case.table), numbers, remark if tested else "", *about_case, readings)
        bodies.append(body and case.prefix + body)
        remarks += about_case
    shorter = [s for s in chosen if s.short]
    names = {s: "" if len(shorter) == len(chosen) else f"{s.name} " for s in shorter}
    beside = [*absent(whys), *dict.fromkeys(names[s] + s.short for s in shorter)]
    reason = line(
        UNCHECKABLE if claim.kind == "density" else "",
        place and f"{place}: {verdict}",
        scope,
        in_way(claim, way, cases, details[way], decides=True) if tested else "",
        *bodies,
        *(in_way(claim, other, cases, own, decides=False) for other, own in details.items() if other != way and tested),
        *beside,
        claim.remark if tested else "",
    )
    looked = list(dict.fromkeys(s for case in cases for s in case.choice.pool))
    apart = [pair for case in cases for pair in case.choice.apart]
    whole = [d for by_case in details.values() for own in by_case for d in own]
    said = [text for text in (*remarks, *beside) if text]
    prefixed = [case.prefix + note for case, note in zip(cases, remarks_of_rule, strict=True) if note and tested]
    return Verdict(claim, verdict, reason, stand_in, whole, way, looked, said, prefixed, whys, apart)


def make_case(claim: Claim, figures: Sequence[str], skipped: bool, runs: Sequence[Source]) -> Case:
    choice = choose(claim, figures, runs)
    table = {} if choice.why else tabulate(claim, figures, choice.pool)
    home = next((method.figure for method in table.values()), figures[0]) if claim.either else figures[0]
    home = next((s.name for s in choice.pool if s.replaced and s.figure == home), home)
    return Case(choice, table, f"{home}: " if len(claim.figures) > 1 else "", skipped)


def compare_in_all_ways(claim: Claim, cases: Sequence[Case]) -> tuple[str, dict[str, list[list[Detail]]]]:
    """The way that decides, and the comparisons by way and case, with Holm's correction within each way."""
    rule, methods = KINDS[claim.kind], [m for case in cases for m in case.table.values() if not m.lost]
    validated = rule.checkpoint and bool(methods) and all(m.best for m in methods)
    costs = rule.costs and not set(claim.metrics) <= SPARSE and any(ROUNDS in m.values for m in methods)
    quality = CHECKPOINT if validated else END
    ways = {CHECKPOINT: claim.metrics} if validated else {}
    ways |= {END: claim.metrics}
    ways |= {TO_ROUNDS: (ROUNDS,), TO_BYTES: (BYTES,)} if costs or claim.by_rounds else {}
    ways |= {BESIDE: claim.beside} if claim.beside else {}
    details = {}
    for way, metrics in ways.items():
        asked, where = replace(claim, metrics=metrics), quality if way == BESIDE else way
        by_case = [[] if c.choice.why else rule.compare(asked, seen(claim, c.table, where)) for c in cases]
        corrected = iter(holm([d for own in by_case for d in own]))
        details[way] = [
            [replace(next(corrected), comparison=case.prefix + d.comparison, way=way) for d in own]
            for case, own in zip(cases, by_case, strict=True)
        ]
    return TO_ROUNDS if claim.by_rounds else quality, details


def seen(claim: Claim, table: Table, way: str) -> Table:
    """The methods with their values in one way; if the claim needs trained models, those below the target are lost."""
    view = {name: replace(m, values=m.best) if way == CHECKPOINT else m for name, m in table.items()}
    for name, method in view.items():
        accuracy = raw(view, name, "test_accuracy")
        if claim.needs_target and method.target is not None and accuracy is not None and accuracy < method.target:
            why = f"test accuracy {100 * accuracy:.1f} %, the target is {100 * method.target:g} %"
            view[name] = replace(method, lost=why)
    return view


def combine_cases(
    claim: Claim, cases: Sequence[Case], way: str, details: Sequence[Sequence[Detail]]
) -> tuple[str, list[str]]:
    """The verdict on all cases, and the remark of the rule on each.

    A case without a run is not tested. A case in which no two methods trained counts in no tally.
    """
    judged = [KINDS[claim.kind].verdict(claim, seen(claim, case.table, way), own)
              for case, own in zip(cases, details, strict=True)]  # fmt: skip
    remarks = [remark for _, remark in judged]
    absent_cases = [NOT_TESTED for case in cases if case.choice.why and not case.skipped]
    if claim.parts:
        metrics = dict.fromkeys(d.metric for own in details for d in own)
        parts = [[d.verdict for own in details for d in own if d.metric == metric] for metric in metrics]
        return combine(every([*part, *absent_cases]) for part in parts), remarks
    tallied = [verdict for (verdict, _), own in zip(judged, details, strict=True) if own]
    return every([*tallied, *absent_cases]), remarks


# -- the line that gives the reason ----------------------------------------
def in_way(claim: Claim, way: str, cases: Sequence[Case], details: Sequence[Sequence[Detail]], decides: bool) -> str:
    """The outcome of all comparisons of one way; if it does not decide and they are few, with their numbers."""
    own = [d for by_case in details for d in by_case]
    if way == BESIDE:
        metrics = dict.fromkeys(d.metric for d in own)
        return "; ".join(f"{named(m)}: {counts([d for d in own if d.metric == m])}" for m in metrics)
    if not own or not KINDS[claim.kind].checkpoint:  # without comparisons, or about the whole run
        return counts(own) if own else ""
    methods = [m for case in cases for m in case.table.values()]
    goals = "/".join(dict.fromkeys(f"{100 * m.target:g}" for m in methods if m.target is not None))
    texts = {CHECKPOINT: "at the best checkpoint", END: "at the end"}
    text = texts.get(way) or f"by {way} to {goals} %"
    text += " (no validation data)" if decides and way == END else ""
    text += f" (evaluated every {max(m.every for m in methods)} rounds)" if decides and way == TO_ROUNDS else ""
    numbers = f" ({sentence(own)})" if not decides and len(own) <= FEW else ""
    return f"{text}: {counts(own)}{numbers}"


def absent(whys: Sequence[str]) -> list[str]:
    """Reasons; all figures that were not run are joined to one.

    >>> absent(["no run of cifar10", "femnist is unfinished", "no run of pathmnist"])
    ['no run of cifar10, pathmnist', 'femnist is unfinished']
    """
    figures = [why.removeprefix(NO_RUN) for why in whys if why.startswith(NO_RUN)]
    others = [why for why in whys if not why.startswith(NO_RUN)]
    return ([NO_RUN + ", ".join(figures)] if figures else []) + others


def line(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def densities(claim: Claim, table: Table) -> str:
    """The densities, for the claim that only they are about."""
    known = {name: raw(table, name, "density") for name in claim.methods} if claim.kind == "density" else {}
    listed = [f"{name} {value:.3g}" for name, value in known.items() if value is not None]
    return f"densities: {', '.join(listed)}" if listed else ""


def about(claim: Claim, case: Case, way: str, details: Sequence[Detail], runs: Sequence[Source]) -> Iterator[str]:
    """Remarks that a reader needs beside the numbers."""
    table = seen(claim, case.table, way)
    if case.choice.why or claim.kind == "density":
        return
    names = {key.removeprefix("heterogeneous ").split(" (")[0] for key in table}
    wanted = (*claim.methods, *claim.against)
    missing = [name for name in wanted if name not in names]
    figures = {s.figure for s in case.choice.pool} | {s.figure for s, _ in case.choice.apart}
    if missing and details:
        waiting = [s.unfinished for s in runs if s.figure in claim.named - figures and s.unfinished]
        yield line(f"not in the runs: {', '.join(missing)}", *waiting, *(f"{s.name} {w}" for s, w in case.choice.apart))
    elif details and all(d.verdict == NOT_TESTED for d in details):
        yield f"no numbers for {', '.join(dict.fromkeys(named(d.metric) for d in details))}"
    for name in (name for name in wanted if name in names):
        absent_steps = [str(s) for s in claim.steps if key(name, s) not in table]
        if absent_steps:
            yield f"{name} not run for I = {', '.join(absent_steps)}"
    if claim.kind == "traffic":  # bytes are counted, not estimated
        return
    failed = [f"{name} ({method.untrained})" for name, method in table.items() if method.untrained]
    if failed:
        yield f"did not train: {', '.join(failed)}"
    seeds = min((d.seeds for d in details if d.seeds is not None), default=SEEDS)
    if seeds < SEEDS:
        yield f"{seeds} seed{'s' * (seeds != 1)}, a verdict needs {SEEDS}"
