"""The verdict on one claim: its cases judged by its rule, and one line that says why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import kinds, ranks, rise, steps
from .compare import NOT_TESTED, SEEDS, Detail, Judged, Table, combine
from .pool import NO_RUN, choose, tabulate
from .runs import Source
from .statements import Claim
from .words import collapsed, named, sentence, variants

KINDS = {
    "beats": kinds.beats, "at_least": kinds.at_least, "most": kinds.most, "largest": kinds.largest, "drop": kinds.drop,
    "density": kinds.density, "rank": ranks.rank, "mean_rank": ranks.mean_rank, "rise": rise.rise,
    "between": steps.between, "margin": steps.margin, "improves": steps.improves, "gain": steps.gain,
    "traffic": steps.traffic,
}  # fmt: skip
NO_THEORY = "judged from a theory.json, and there is none"
UNCHECKABLE = "no experiment can check it"

Theory = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """One claim and what the runs say of it."""

    claim: Claim
    verdict: str
    reason: str
    stand_in: str | None = None
    details: Sequence[Detail] = ()
    sources: Sequence[Source] = ()  # the runs that were looked at


def judge(claim: Claim, runs: Sequence[Source], theory: Theory) -> Verdict:
    """The verdict on a claim from the runs of one setting."""
    if claim.kind == "theory":
        says = theory.get(claim.id, {"verdict": NOT_TESTED, "reason": NO_THEORY})
        return Verdict(claim, says["verdict"], line(" ".join(str(says.get("reason", "")).split()), claim.remark))
    parts: list[Judged] = []
    details: list[Detail] = []
    said = [UNCHECKABLE] if claim.kind == "density" else []
    whys: list[str] = []
    looked: list[Source] = []
    chosen: list[Source] = []
    for case in claim.figures:
        pool, why = choose(claim, case, runs)
        looked += [s for s in pool if s not in looked]
        if why:
            parts.append(Judged(NOT_TESTED))
            whys.append(why)
            continue
        chosen += [s for s in pool if s not in chosen]
        table = tabulate(claim, case, pool)
        part = KINDS[claim.kind](claim, table)
        parts.append(part)
        prefix = f"{case[0]}: " if len(claim.figures) > 1 else ""
        details += [replace(d, comparison=prefix + d.comparison) for d in part.details]
        waiting = [s.unfinished for s in runs if s.figure in case and s.unfinished]
        body = part.summary or (sentence(part.details) if part.verdict != NOT_TESTED else "")
        words = line(body, *part.remarks, *about(claim, table, part, waiting))
        said.append(prefix + words if words else "")
    short = [s.short for s in chosen if s.short][:1]
    stand_in = "; ".join(dict.fromkeys(s.stand_in for s in chosen if s.stand_in)) or None
    verdict = combine(part.verdict for part in parts)
    remark = claim.remark if verdict != NOT_TESTED else ""
    reason = line(*said, *absent(whys), *short, remark)
    return Verdict(claim, verdict, reason, stand_in, details, looked)


def absent(whys: Sequence[str]) -> list[str]:
    """Reasons, with the figures that were not run as one.

    >>> absent(["no run of cifar10", "femnist is unfinished", "no run of pathmnist"])
    ['no run of cifar10, pathmnist', 'femnist is unfinished']
    """
    figures = [why.removeprefix(NO_RUN) for why in whys if why.startswith(NO_RUN)]
    others = [why for why in whys if not why.startswith(NO_RUN)]
    return ([NO_RUN + ", ".join(figures)] if figures else []) + others


def line(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def about(claim: Claim, table: Table, part: Judged, waiting: Sequence[str]) -> Iterable[str]:
    """What a reader must know beside the numbers."""
    if not part.details:
        return
    names = {key.removeprefix("heterogeneous ").split(" (")[0] for key in table}
    missing = [name for name in (*claim.methods, *claim.against) if name not in names]
    if missing:
        yield line(f"not in the runs: {', '.join(missing)}", *waiting)
    elif part.verdict == NOT_TESTED:
        yield f"no numbers for {', '.join(map(named, claim.metrics))}"
    yield from (f"{name} {method.lost}" for name, method in table.items() if method.lost)
    seeds = min((d.seeds for d in part.details if d.seeds is not None), default=SEEDS)
    if seeds < SEEDS and claim.kind != "traffic":  # bytes are counted, not estimated
        yield f"{seeds} seed{'s' * (seeds != 1)}, a verdict needs {SEEDS}"
    if "density" in claim.metrics:
        yield from collapsed(table)
    if part.verdict != NOT_TESTED:
        yield variants(table)
