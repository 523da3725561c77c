"""Verdicts from run folders, once per setting, and as JSON."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import write_whole
from ..runs.names import CLAIMS
from ..runs.reading import RecordedRun
from .compare import NOT_TESTED, WORDS
from .judge import Verdict, judge
from .pool import not_a_piece
from .runs import Source, Theory, source, sources
from .statements import claims

ORDER = ("paper", "paper-batchnorm", "tuned")  # the settings that come first
COLUMNS = ("way", "comparison", "metric", "a", "b", "difference", "interval", "p", "seeds", "verdict")


@dataclass(frozen=True)
class Group:
    """The verdicts of one setting, on all claims in order."""

    setting: str
    runs: list[str]
    verdicts: list[Verdict]
    notes: list[str] = field(default_factory=list)  # runs that were not used, and why


def verdicts(places: Iterable[str | Path | RecordedRun | Source], theory: Theory | None = None) -> list[Group]:
    """The verdicts on all 31 claims, once per setting.

    `places` are folders that hold runs at any depth, or runs that were read already; `theory` adds to the content of
    the `theory.json` files in those folders.
    """
    runs, read = sources(places)
    theory = {**(theory or {}), **read}
    _check(theory)
    settings: dict[str, list[Source]] = {}
    for s in runs:
        if s.figure:
            settings.setdefault(s.setting, []).append(s)
    ordered = sorted(settings, key=lambda s: (ORDER.index(s) if s in ORDER else len(ORDER), s))
    groups = [_group(setting, settings[setting], theory) for setting in ordered] or [_group("", [], theory)]
    groups[-1].notes.extend(f"{s.run.folder}: belongs to no figure of the paper" for s in runs if not s.figure)
    return groups


def _group(setting: str, runs: list[Source], theory: Theory) -> Group:
    judged = [judge(claim, runs, theory) for claim in claims()]
    used = [s for verdict in judged for s in verdict.sources]
    notes = [f"{s.run.folder}: {why}" for verdict in judged for s, why in verdict.apart]
    notes += [f"{s.run.folder}: not used: {_unused(s, used)}" for s in runs if s not in used]
    notes = list(dict.fromkeys(notes))
    return Group(setting, list(dict.fromkeys(s.name for s in runs)), judged, notes)


def _unused(s: Source, used: Sequence[Source]) -> str:
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
    return f"{head.run.folder} stands for {s.figure}" + (f" ({why.removeprefix('with ')})" if why else "")


def _check(theory: Theory) -> None:
    ids = [claim.id for claim in claims() if claim.kind == "theory"]
    for key, table in theory.items():
        if key not in ids:
            raise ValueError(f"theory.json: {key!r} must be one of {', '.join(ids)}")
        if table["verdict"] not in WORDS:
            raise ValueError(f"theory.json: {key}: verdict must be one of {', '.join(WORDS)}, got {table['verdict']!r}")
        details = table.get("details", [])
        if not isinstance(details, list) or not all(_is_detail(d) for d in details):
            raise ValueError(f"theory.json: {key}: details must be tables of {', '.join(COLUMNS)}")


def _is_detail(d: Any) -> bool:
    """Whether a table is one comparison of a verdict."""
    if not isinstance(d, dict) or not {"comparison", "metric", "verdict"} <= set(d) <= set(COLUMNS):
        return False
    numbers = [v for key in COLUMNS[3:-1] if (v := d.get(key)) is not None]
    return d["verdict"] in WORDS and all(isinstance(v, int | float) and not isinstance(v, bool) for v in numbers)


def judge_one_run(place: str | Path | RecordedRun) -> Group | None:
    """The verdicts that one run allows, on its own figure; None if it belongs to no figure of the paper."""
    one = source(place)
    if not one.figure:
        return None
    judged = []
    for claim in claims():
        if one.figure in claim.named:
            verdict = judge(claim, [one], {}, alone=True)
            # A figure that only lends to a claim decides nothing alone.
            own = any(one.figure in case for case in claim.own_figures)
            judged += [verdict] if own or verdict.verdict != NOT_TESTED else []
    return Group(one.setting, [one.name], judged)


def write(place: str | Path | RecordedRun) -> Group | None:
    """Write `claims.json` into a run folder, and return the verdicts in it.

    Without a figure of the paper nothing is written, and the result is None.
    """
    group = judge_one_run(place)
    if group is not None:
        folder = place.folder if isinstance(place, RecordedRun) else Path(place)
        write_whole(folder / CLAIMS, dumps([group]))
    return group


def dumps(groups: Sequence[Group]) -> str:
    """The verdicts as JSON."""
    settings = [{"setting": g.setting, "runs": g.runs, "claims": [_plain(v) for v in g.verdicts]} for g in groups]
    return json.dumps({"settings": settings}, indent=1, allow_nan=False) + "\n"


def _plain(v: Verdict) -> dict[str, Any]:
    head = {"id": v.claim.id, "text": v.claim.text, "where": v.claim.where, "verdict": v.verdict, "reason": v.reason}
    details = [{column: getattr(d, column) for column in COLUMNS} for d in v.details]
    return head | {"stand_in": v.stand_in, "details": details}
