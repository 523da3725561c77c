"""A results folder in memory, read once for all pages: runs by setting and figure, verdicts, pilots, sweeps, times."""

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from fedda.claims import Verdict, verdicts
from fedda.claims.runs import Source, sources
from fedda.experiments.config import Experiment, find

from .parts import PartList, read_plan


@dataclass(frozen=True, eq=False)
class Results:
    """A folder of results, which need not exist yet."""

    folder: Path

    @cached_property
    def plan(self) -> PartList:
        """The plan that is kept with the results."""
        file = self.folder / "parts.toml"
        return read_plan(file if file.is_file() else None)

    @cached_property
    def sources(self) -> tuple[list[Source], dict[str, Any]]:
        """All runs, and the answers of `fedda theory`."""
        files = ("metrics.jsonl", "metrics.jsonl.gz", "theory.json")
        exist = any(next(self.folder.rglob(name), None) for name in files)
        return sources([self.folder]) if exist else ([], {})

    @cached_property
    def runs(self) -> dict[Path, Source]:
        """The runs by their path in the folder."""
        return {run.run.folder.relative_to(self.folder): run for run in self.sources[0]}

    @cached_property
    def verdicts(self) -> dict[tuple[str, str], Verdict]:
        """The verdicts by setting and claim."""
        groups = verdicts(*self.sources) if any(self.sources) else []
        return {(group.setting, verdict.claim.id): verdict for group in groups for verdict in group.verdicts}

    def verdict(self, setting: str, claim: str) -> Verdict | None:
        """The verdict on a claim; without any figure, verdicts on theory have no setting and count as the paper's."""
        verdict = self.verdicts.get((setting, claim))
        return self.verdicts.get(("", claim)) if verdict is None and setting == "paper" else verdict

    @cached_property
    def figures(self) -> dict[tuple[str, str], Source]:
        """The runs by setting and figure, in the order of the plan."""
        names = [(part.setting, name) for part, name in self.plan.figures()]
        return {(setting, name): self.runs[f] for setting, name in names if (f := Path(setting) / name) in self.runs}

    @cached_property
    def ran(self) -> set[tuple[str, str]]:
        """The settings and figures of all runs, planned or not."""
        return {(path.parts[0], path.parts[1]) for path in self.runs if len(path.parts) == 2}

    @cached_property
    def pilots(self) -> dict[str, Source]:
        return {name: self.runs[f] for name in self.plan.pilots if (f := Path("pilots") / name) in self.runs}

    @cached_property
    def sweeps(self) -> dict[str, dict[str, Any]]:
        files = {name: self.folder / "sweeps" / name / "sweep.json" for name in self.plan.sweeps}
        return {name: json.loads(file.read_bytes()) for name, file in files.items() if file.is_file()}

    @cached_property
    def times(self) -> list[dict[str, Any]]:
        file = self.folder / "times.json"
        return list(json.loads(file.read_bytes())) if file.is_file() else []


@cache
def builtin(name: str) -> Experiment:
    return find(name)


def missing(name: str, run: Source) -> list[str]:
    """The methods of a figure that its run does not have."""
    return [label for label in builtin(name).algorithms if label not in run.run.labels]
