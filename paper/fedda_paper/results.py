"""What `results/` holds, read once: runs by setting and figure, verdicts, pilots, sweeps, times."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedda.claims import Group, Verdict, verdicts
from fedda.claims.runs import Source, source
from fedda.claims.statements import Claim
from fedda.experiments.config import find
from fedda.runs.reading import kept

from .parts import PartList, plan


@dataclass(frozen=True, eq=False)
class Results:
    """A folder of results, which may not be there yet."""

    folder: Path

    @cached_property
    def plan(self) -> PartList:
        """What was to be run, as it was kept with the results."""
        file = self.folder / "parts.toml"
        return plan(file if file.is_file() else None)

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The verdicts by setting."""
        there = self.folder.is_dir() and any(
            path.name in ("metrics.jsonl", "metrics.jsonl.gz", "theory.json") for path in self.folder.rglob("*.json*")
        )
        return {group.setting: group for group in verdicts([self.folder])} if there else {}

    def verdict(self, setting: str, name: str) -> Verdict | None:
        """The verdict on a claim in a setting; those on theory, which have none, go with the paper's values."""
        group = self.groups.get(setting)
        if group is None and setting == "paper":
            group = self.groups.get("")
        return next((v for v in group.verdicts if v.claim.id == name), None) if group else None

    @cached_property
    def figures(self) -> dict[tuple[str, str], Source]:
        """The runs by setting and name of the experiment."""
        return {
            (part.setting, name): source(place)
            for part, name in self.plan.figures()
            if kept(place := self.folder / part.setting / name, "metrics.jsonl").is_file()
        }

    @cached_property
    def pilots(self) -> dict[str, Source]:
        places = {name: self.folder / "pilots" / name for name in self.plan.pilots}
        return {name: source(p) for name, p in places.items() if kept(p, "metrics.jsonl").is_file()}

    @cached_property
    def sweeps(self) -> dict[str, dict[str, Any]]:
        files = {name: self.folder / "sweeps" / name / "sweep.json" for name in self.plan.sweeps}
        return {name: json.loads(file.read_bytes()) for name, file in files.items() if file.is_file()}

    @cached_property
    def times(self) -> list[dict[str, Any]]:
        file = self.folder / "times.json"
        return list(json.loads(file.read_bytes())) if file.is_file() else []


def missing(name: str, run: Source) -> list[str]:
    """The methods of a figure that a run of it has not."""
    return [label for label in find(name).algorithms if label not in run.run.labels]


def owns(claim: Claim, figure: str) -> bool:
    """Whether a claim is about a figure; one that only lends to it is not."""
    return any(figure in (case if claim.either else case[:1]) for case in claim.figures)
