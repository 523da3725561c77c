"""Verdicts from run folders, once for each setting, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..runs.folder import Folder
from .compare import NOT_TESTED, WORDS
from .judge import Theory, Verdict, judge
from .pool import not_a_piece
from .runs import Source, source, sources
from .statements import claims

ORDER = ("paper", "tuned")  # the settings that come first
COLUMNS = ("comparison", "metric", "a", "b", "difference", "se", "area", "seeds", "verdict")


@dataclass(frozen=True)
class Group:
    """The verdicts of one setting, on all claims in order."""

    setting: str
    runs: list[str]
    verdicts: list[Verdict]
    notes: list[str] = field(default_factory=list)  # runs that were not used, and why


def verdicts(folders: Iterable[str | Path]) -> list[Group]:
    """The verdicts on all 31 claims, once for each setting of the runs in and below `folders`.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "theory.json").write_text('{"C29": {"verdict": "SUPPORTED", "reason": "slope -0.67"}}')
    >>> [group] = verdicts([folder])
    >>> [(v.claim.id, v.reason) for v in group.verdicts if v.verdict == "SUPPORTED"]
    [('C29', 'slope -0.67')]
    """
    found, theory = sources(folders)
    _check(theory)
    settings: dict[str, list[Source]] = {}
    for s in found:
        if s.figure:
            settings.setdefault(s.setting, []).append(s)
    ordered = sorted(settings, key=lambda s: (ORDER.index(s) if s in ORDER else len(ORDER), s))
    groups = [_group(setting, settings[setting], theory) for setting in ordered] or [_group("", [], theory)]
    groups[-1].notes.extend(f"{s.run.folder}: speaks to no figure of the paper" for s in found if not s.figure)
    return groups


def _group(setting: str, runs: list[Source], theory: Theory) -> Group:
    judged = [judge(claim, runs, theory) for claim in claims()]
    used = [s for verdict in judged for s in verdict.sources]
    notes = [f"{s.run.folder}: {why}" for verdict in judged for s, why in verdict.apart]
    notes += [f"{s.run.folder}: not used: {_unused(s, used)}" for s in runs if s not in used]
    notes = list(dict.fromkeys(notes))
    return Group(setting, list(dict.fromkeys(s.name for s in runs)), judged, notes)


def _unused(s: Source, used: Sequence[Source]) -> str:
    """Why a run speaks to nothing."""
    head = next((other for other in used if other.figure == s.figure), None)
    if head is None:
        known = any(s.figure in claim.named for claim in claims())
        return f"nothing to compare {s.figure} with" if known else f"no claim is about {s.figure!r}"
    why = not_a_piece(s, head)
    if not why and s.name == head.name and s.unfinished:
        why = "unfinished"
    if not why and s.name == head.name:
        both = sorted(s.ran & {label for other in used if other.figure == s.figure for label in other.ran})
        why = f"both have {', '.join(both[:3])}" + (f" and {len(both) - 3} more" if len(both) > 3 else "")
    return f"{head.run.folder} speaks to {s.figure}" + (f" ({why.removeprefix('with ')})" if why else "")


def _check(theory: Theory) -> None:
    ours = [claim.id for claim in claims() if claim.kind == "theory"]
    for name, says in theory.items():
        if name not in ours:
            raise ValueError(f"theory.json: {name!r} is not judged there; only {', '.join(ours)} are")
        if says["verdict"] not in WORDS:
            raise ValueError(f"theory.json: {name}: verdict must be one of {', '.join(WORDS)}, got {says['verdict']!r}")
        details = says.get("details", [])
        if not isinstance(details, list) or not all(_is_detail(d) for d in details):
            raise ValueError(f"theory.json: {name}: details must be tables of {', '.join(COLUMNS)}")


def _is_detail(d: Any) -> bool:
    """Whether a table can stand as one comparison under a verdict."""
    whole = (
        isinstance(d, dict) and {"comparison", "metric", "verdict"} <= set(d) <= set(COLUMNS) and d["verdict"] in WORDS
    )
    numbers = (d.get(key) for key in COLUMNS[2:-1]) if whole else ()
    return whole and all(v is None or (isinstance(v, int | float) and not isinstance(v, bool)) for v in numbers)


def alone(folder: str | Path) -> Group | None:
    """The verdicts on what one run speaks to, each on the run's own figure; None where it belongs to none."""
    one = source(folder)
    if not one.figure:
        return None
    found = []
    for claim in claims():
        if one.figure in claim.named:
            verdict = judge(claim, [one], {}, alone=True)
            # A figure that only lends to a claim says nothing alone.
            own = any(one.figure in (case if claim.either else case[:1]) for case in claim.figures)
            found += [verdict] if own or verdict.verdict != NOT_TESTED else []
    return Group(one.setting, [one.name], found)


def write(folder: str | Path) -> Path | None:
    """Write `claims.json` into a run folder, whole or not at all: the claims that this run alone speaks to.

    Nothing is written, and None is given back, where the run belongs to no figure of the paper.
    """
    group = alone(folder)
    if group is None:
        return None
    path = Path(folder) / "claims.json"
    Folder(path.parent).write(path.name, dumps([group]))
    return path


def dumps(groups: Sequence[Group]) -> str:
    """The verdicts as JSON."""
    settings = [
        {"setting": group.setting, "runs": group.runs, "claims": [_plain(v) for v in group.verdicts]}
        for group in groups
    ]
    return json.dumps({"settings": settings}, indent=1, allow_nan=False) + "\n"


def _plain(v: Verdict) -> dict[str, Any]:
    head = {"id": v.claim.id, "text": v.claim.text, "where": v.claim.where, "verdict": v.verdict, "reason": v.reason}
    details = [{column: getattr(d, column) for column in COLUMNS} for d in v.details]
    return head | {"stand_in": v.stand_in, "details": details}
