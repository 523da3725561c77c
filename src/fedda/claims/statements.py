"""The claims as data, read from `claims.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Claim:
    """One claim: where the paper makes it, and what has to be compared how."""

    id: str
    text: str
    where: str
    kind: str  # the rule that judges it
    figures: tuple[tuple[str, ...], ...] = ()  # one entry a case: its own figure, then those that lend to it
    methods: tuple[str, ...] = ()  # who is said to win
    against: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()  # the numbers of local steps, where the claim is about them
    points: float = 0.0  # what "as good as" allows
    without: tuple[str, ...] = ()  # judged once more without these
    either: bool = False  # any figure of a case will do
    remark: str = ""  # said with every verdict

    @property
    def named(self) -> set[str]:
        """Every figure that the claim reads."""
        return {figure for case in self.figures for figure in case}


@cache
def claims() -> tuple[Claim, ...]:
    """All claims, in the order of the paper.

    >>> len(claims()), claims()[5].text
    (31, 'FedDA-MVR beats all seven baselines in all four metrics on CIFAR-10.')
    """
    file = resources.files(__package__) / "claims.toml"
    found = []
    for table in tomllib.loads(file.read_text(encoding="utf-8"))["claims"]:
        words: dict[str, Any] = {
            word: tuple(value) if isinstance(value, list) else value for word, value in table.items()
        }
        words["figures"] = tuple(tuple(case) for case in table.get("figures", ()))
        found.append(Claim(**words))
    return tuple(found)
