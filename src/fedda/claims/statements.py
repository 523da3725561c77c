"""The claims as data, and the figures they are about, from `claims.toml`."""

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
    figures: tuple[tuple[str, ...], ...] = ()  # one entry per case: its own figure, then those that lend to it
    methods: tuple[str, ...] = ()  # the winners according to the paper
    against: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()  # the numbers of local steps, if the claim is about them
    points: float = 0.0  # the tolerance of "as good as"
    beside: tuple[str, ...] = ()  # metrics that are printed and decide nothing
    without: tuple[str, ...] = ()  # judged a second time without these
    by_rounds: bool = False  # about speed: the rounds to the target decide
    parts: bool = False  # each metric is a part of its own, of which some may hold
    equal_gamma: bool = False  # methods with another penalty are not compared
    needs_target: bool = False  # methods whose test accuracy is below the target are not compared
    either: bool = False  # any figure of a case is enough
    remark: str = ""  # part of every verdict's reason

    @property
    def own_figures(self) -> list[tuple[str, ...]]:
        """For each case, the figures that decide it; the others only lend a method to the comparison."""
        return [case if self.either else case[:1] for case in self.figures]

    @property
    def named(self) -> set[str]:
        """Every figure that the claim reads."""
        return {figure for case in self.figures for figure in case}


def key(method: str, steps: int | None = None) -> str:
    """A method's name in a table of values.

    >>> key("fedcm"), key("fedcm", 5)
    ('fedcm', 'fedcm (5)')
    """
    return method if steps is None else f"{method} ({steps})"


@cache
def _content() -> dict[str, Any]:
    return tomllib.loads((resources.files(__package__) / "claims.toml").read_text(encoding="utf-8"))


def figures() -> dict[str, dict[str, Any]]:
    """Data and rounds of the built-in experiments, by name."""
    return dict(_content()["figures"])


def targets() -> dict[str, float]:
    """The test accuracy to reach, by data."""
    return dict(_content()["targets"])


def partial_data() -> dict[str, str]:
    """Data of which we have only a part, with that part in words."""
    return dict(_content()["partial_data"])


@cache
def claims() -> tuple[Claim, ...]:
    """All claims, in the order of the paper."""
    listed = []
    for table in _content()["claims"]:
        fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}
        fields["figures"] = tuple(tuple(case) for case in table.get("figures", ()))
        listed.append(Claim(**fields))
    return tuple(listed)
