"""The runs that a case of a claim is judged from, and the claim's methods in them."""

from __future__ import annotations

from collections.abc import Sequence

from .kinds import key
from .runs import Source
from .statements import Claim
from .values import Method

NO_RUN = "no run of "


def choose(claim: Claim, case: Sequence[str], runs: Sequence[Source]) -> tuple[list[Source], str]:
    """The runs for a case, all on the same data and for as many rounds, and why there are none, where there are none.

    Finished runs come before others, the paper's own data before what stands in for it, then more seeds and rounds.
    """
    best = sorted(runs, key=lambda s: (bool(s.unfinished), bool(s.stand_in), -s.seeds, -s.rounds, s.name))
    of = {figure: [s for s in best if s.figure == figure] for figure in case}
    first = next((figure for figure in case if of[figure]), case[0]) if claim.either else case[0]
    if not of[first]:
        return [], f"{NO_RUN}{first}"
    whys: list[str] = []
    for head in of[first]:
        if head.unfinished:
            return [head], (whys or [head.unfinished])[0]
        alike = [s for s in best if (s.data, s.rounds) == (head.data, head.rounds) and not s.unfinished]
        others = {figure: [s for s in alike if s.figure == figure] for figure in case if figure != first}
        # Pieces of one experiment, each with some of its methods, make one figure.
        pool = [s for s in alike if s.figure == first and s.name == head.name]
        pool += [s for own in others.values() for s in own if s.name == own[0].name]
        empty = [figure for figure, own in others.items() if not own]
        if claim.kind != "drop" or not empty:
            return pool, ""
        waiting = [s.unfinished for s in of[empty[0]] if s.unfinished]
        whys.append((waiting or [f"{NO_RUN}{empty[0]} with the data and the rounds of {head.name}"])[0])
    return [], whys[0]


def tabulate(claim: Claim, case: Sequence[str], pool: Sequence[Source]) -> dict[str, Method]:
    """The methods of the claim by name, each from the first run that has it.

    A drop is from one figure to another: the methods of the second are "heterogeneous NAME".
    """
    parts = {"": list(pool)}
    if claim.kind == "drop":
        parts = {
            "": [s for s in pool if s.figure == case[0]],
            "heterogeneous ": [s for s in pool if s.figure == case[1]],
        }
    table: dict[str, Method] = {}
    for prefix, own in parts.items():
        for name in (*claim.methods, *claim.against):
            for steps in claim.steps or (None,):
                found = next((m for s in own if (m := s.method(name, steps))), None)
                if found:
                    table[prefix + key(name, steps)] = found
    return table
