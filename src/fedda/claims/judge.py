"""The verdict on one claim: its rule judges its cases, and one line gives the reason."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .compare import NOT_TESTED, SEEDS, SUPPORTED, Detail, Judged, Table, combine
from .kinds import KINDS
from .pool import NO_RUN, RunChoice, choose, tabulate
from .runs import Source, Theory
from .sentences import collapsed, counts, named, sentence, variants
from .statements import Claim, key

NO_THEORY = "judged from a theory.json, as `fedda theory` writes it, and there is none"
UNCHECKABLE = "no experiment can check it"


@dataclass(frozen=True)
class Verdict:
    """The verdict on one claim."""

    claim: Claim
    verdict: str
    reason: str
    stand_in: str | None = None
    details: Sequence[Detail] = ()
    sources: Sequence[Source] = ()  # the runs it was judged from
    remarks: Sequence[str] = ()  # qualifications, a part of the reason
    missing: Sequence[str] = ()  # why figures of the claim could not be judged
    apart: Sequence[tuple[Source, str]] = ()  # runs that could not be compared, and why

    @property
    def in_part(self) -> bool:
        """Whether a figure, a method or a number of local steps of the claim is missing."""
        tested = self.verdict != NOT_TESTED
        return tested and (bool(self.missing) or any(d.verdict == NOT_TESTED for d in self.details))


@dataclass(frozen=True)
class CasePart:
    """The verdict on one case of a claim."""

    choice: RunChoice
    verdict: str = NOT_TESTED
    details: Sequence[Detail] = ()
    reason: str = ""
    remarks: Sequence[str] = ()


def judge(claim: Claim, runs: Sequence[Source], theory: Theory, alone: bool = False) -> Verdict:
    """The verdict on a claim from the runs of one setting; with `alone`, only on the figures that were run."""
    if claim.kind == "theory":
        table = theory.get(claim.id, {"verdict": NOT_TESTED, "reason": NO_THEORY})
        reason = line(" ".join(str(table.get("reason", "")).split()), claim.remark)
        return Verdict(claim, table["verdict"], reason, details=[Detail(**d) for d in table.get("details", ())])
    parts = [judge_case(claim, case, runs) for case in claim.figures]
    kept = [part for part, left in zip(parts, left_out(claim, runs), strict=True) if not (alone and left)]
    verdict = combine(part.verdict for part in kept)
    tested = verdict != NOT_TESTED
    details = [d for part in parts for d in part.details]
    chosen = list(dict.fromkeys(s for part in parts if not part.choice.why for s in part.choice.pool))
    stand_in = "; ".join(dict.fromkeys(s.stand_in for s in chosen if s.stand_in)) or None
    whys, scope, place = [part.choice.why for part in parts if part.choice.why], "", ""
    if alone and tested and len(kept) < len(parts):
        scope = ", ".join(part.choice.why.removeprefix(NO_RUN) for part in parts if part not in kept) + " not run"
        place = f"on {chosen[0].place}"
        whys = [part.choice.why for part in kept if part.choice.why]
    numbers = [counts(details)] if tested and verdict != SUPPORTED else []
    beside = [*absent(whys), *[s.short for s in chosen if s.short][:1]]
    reason = line(
        UNCHECKABLE if claim.kind == "density" else "",
        place and f"{place}: {verdict}", scope, *numbers, *(part.reason for part in parts), *beside,
        claim.remark if tested else "",
    )  # fmt: skip
    short = [", ".join(filter(None, ("" if stand_in else place, scope)))]
    remarks = [text for text in (*short, *(text for part in parts for text in part.remarks), *beside) if text]
    looked = list(dict.fromkeys(s for part in parts for s in part.choice.pool))
    apart = [pair for part in parts for pair in part.choice.apart]
    return Verdict(claim, verdict, reason, stand_in, details, looked, remarks, whys, apart)


def judge_case(claim: Claim, case: Sequence[str], runs: Sequence[Source]) -> CasePart:
    choice = choose(claim, case, runs)
    if choice.why:
        return CasePart(choice)
    table = tabulate(claim, case, choice.pool)
    judged = KINDS[claim.kind](claim, table)
    home = next((method.figure for method in table.values()), case[0]) if claim.either else case[0]
    home = next((s.name for s in choice.pool if s.stand_in and s.figure == home), home)
    prefix = f"{home}: " if len(claim.figures) > 1 else ""
    waiting = [s.unfinished for s in runs if s.figure in case and s.unfinished]
    remarks = list(about(claim, table, judged, [*waiting, *(f"{s.name} {why}" for s, why in choice.apart)]))
    tested = judged.verdict != NOT_TESTED
    body = judged.summary or (sentence(judged.details) if tested else "")
    reason = line(body, *judged.remarks, *remarks, variants(table) if tested else "")
    details = [replace(d, comparison=prefix + d.comparison) for d in judged.details]
    return CasePart(choice, judged.verdict, details, reason and prefix + reason, remarks)


def left_out(claim: Claim, runs: Sequence[Source]) -> list[bool]:
    """For each case, whether it has no run of its own figure."""
    there = {s.figure for s in runs}
    return [there.isdisjoint(case) for case in claim.own_figures]


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


def about(claim: Claim, table: Table, part: Judged, waiting: Sequence[str]) -> Iterable[str]:
    """Remarks that a reader needs beside the numbers."""
    if not part.details:
        return
    names = {key.removeprefix("heterogeneous ").split(" (")[0] for key in table}
    wanted = (*claim.methods, *claim.against)
    missing = [name for name in wanted if name not in names]
    if missing:
        yield line(f"not in the runs: {', '.join(missing)}", *waiting)
    elif part.verdict == NOT_TESTED:
        yield f"no numbers for {', '.join(map(named, claim.metrics))}"
    for name in (name for name in wanted if name in names):
        absent_steps = [str(s) for s in claim.steps if key(name, s) not in table]
        if absent_steps:
            yield f"{name} not run for I = {', '.join(absent_steps)}"
    yield from (f"{name} {method.lost}" for name, method in table.items() if method.lost)
    seeds = min((d.seeds for d in part.details if d.seeds is not None), default=SEEDS)
    if seeds < SEEDS and claim.kind != "traffic":  # bytes are counted, not estimated
        yield f"{seeds} seed{'s' * (seeds != 1)}, a verdict needs {SEEDS}"
    if claim.kind != "traffic":
        yield from collapsed(table)
