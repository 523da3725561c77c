"""Choose the runs for a case of a claim, and find the claim's methods in them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .runs import Source
from .statements import Claim, key
from .values import MethodValues

NO_RUN = "no run of "


@dataclass(frozen=True)
class RunChoice:
    """The runs of a case, or the reason why there are none."""

    pool: list[Source]
    why: str = ""
    apart: list[tuple[Source, str]] = field(default_factory=list)  # runs that cannot be compared, and why


def choose(claim: Claim, case: Sequence[str], runs: Sequence[Source]) -> RunChoice:
    """The runs for a case, all of the same problem and with the same rounds."""
    best = sorted(runs, key=preference)
    of = {figure: [s for s in best if s.figure == figure] for figure in case}
    first = next((figure for figure in case if of[figure]), case[0]) if claim.either else case[0]
    if not of[first]:
        return RunChoice([], f"{NO_RUN}{first}")
    drop = claim.kind == "drop"
    apart: list[tuple[Source, str]] = []
    whys: list[str] = []
    for head in of[first]:
        if head.unfinished:
            return RunChoice([head], (whys or [head.unfinished])[0], apart)
        pool = pieces([s for s in of[first] if s is head or s.name == head.name], head)
        empty = []
        for figure in (figure for figure in case if figure != first):
            done = [s for s in of[figure] if not s.unfinished]
            differ = {s: s.differs(head, partition=not drop) for s in done}
            alike = [s for s in done if not differ[s]]
            if alike:
                pool += pieces([s for s in alike if s.name == alike[0].name], alike[0])
            else:
                empty.append(figure)
                # If either figure is enough, nothing is compared.
                why = f"not compared with {head.name}: other "
                apart += [(s, why + ", ".join(differ[s])) for s in done if not claim.either]
        if not drop or not empty:
            return RunChoice(pool, "", apart)
        waiting = [s.unfinished for s in of[empty[0]] if s.unfinished]
        unlike = [f"{s.name} {why}" for s, why in apart if s.figure == empty[0]]
        whys.append([*unlike, *waiting, f"{NO_RUN}{empty[0]}"][0])
    return RunChoice([], whys[0], apart)


def preference(s: Source) -> tuple[object, ...]:
    """The sort key of runs: finished, on the figure's own data, more seeds, rounds and methods first; then by name."""
    return bool(s.unfinished), bool(s.replaced), -s.seeds, -s.rounds, -len(s.ran), s.name, str(s.run.folder)


def pieces(runs: Sequence[Source], head: Source) -> list[Source]:
    """The parts of one experiment: the same conditions, and no method twice."""
    parts, labels = [head], set(head.ran)
    for s in runs:
        if s is not head and not s.unfinished and not not_a_piece(s, head) and not s.ran & labels:
            parts.append(s)
            labels |= s.ran
    return parts


def not_a_piece(s: Source, head: Source) -> str:
    """Why two runs are not parts of one experiment, if they are not."""
    seeds = ["seeds"] if s.run.config.get("seeds") != head.run.config.get("seeds") else []
    keys = [*s.differs(head), *seeds]
    return f"with other {', '.join(keys)}" if keys else ""


def tabulate(claim: Claim, case: Sequence[str], pool: Sequence[Source]) -> dict[str, MethodValues]:
    """The methods of the claim by name, each from the first run that has it.

    A drop compares two figures: the methods of the second are "heterogeneous NAME".
    """
    parts = {"": list(pool)}
    if claim.kind == "drop":
        figures = {"": case[0], "heterogeneous ": case[1]}
        parts = {prefix: [s for s in pool if s.figure == figure] for prefix, figure in figures.items()}
    table: dict[str, MethodValues] = {}
    for prefix, sources in parts.items():
        for name in (*claim.methods, *claim.against):
            for steps in claim.steps or (None,):
                method = next((m for s in sources if (m := s.method(name, steps))), None)
                if method:
                    table[prefix + key(name, steps)] = method
    return table
