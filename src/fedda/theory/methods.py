"""Table 1 of the paper as data: as printed, and as we read it (docs/errata.md, 1 and 10)."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Method:
    """One row: to find |grad f(x)|^2 <= eps takes eps^-gradients gradients and eps^-rounds rounds, up to logarithms."""

    name: str
    gradients: float
    rounds: float
    state: str  # what clients keep during a round
    local_adaptive: bool = False
    constrained: bool = False
    why: str = ""  # the reason for a change

    def cells(self) -> tuple[str, ...]:
        marks = ("yes" if mark else "" for mark in (self.local_adaptive, self.constrained))
        return (self.name, f"eps^-{self.gradients:g}", f"eps^-{self.rounds:g}", self.state, *marks, self.why)


HEADS = ("method", "gradients", "rounds", "state", "locally adaptive", "constrained", "changed")
PRINTED = (
    Method("FedAvg", 2, 1.5, "primal/dual"),
    Method("FedCM", 1.5, 1, "primal/dual"),
    Method("STEM", 1.5, 1, "primal/dual"),
    Method("FedAdam", 2, 1, "primal"),
    Method("Local-AMSGrad", 2, 1.5, "primal", local_adaptive=True),
    Method("MIME-MVR", 1.5, 1.5, "primal", local_adaptive=True),
    Method("FedDA-MVR", 1.5, 1, "dual", local_adaptive=True, constrained=True),
)
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "FedCM": ({"gradients": 2.0}, "plain momentum, no variance reduction: an eps^-2 rate (from memory of its paper)"),
    "MIME-MVR": ({"local_adaptive": False}, "no preconditioner in this instance of MIME"),
    "FedDA-MVR": (
        {"rounds": 1.25},
        "eps^-1 needs K >= sqrt(T), where I <= 1; else K^(-1/2) eps^-1.25, if Theorem 1's K-dependence holds",
    ),
}
CORRECTED = tuple(
    replace(row, **CHANGES[row.name][0], why=CHANGES[row.name][1]) if row.name in CHANGES else row for row in PRINTED
)
