"""Verdicts as sentences for readers, and as tables for those who want every number."""

import math
from collections.abc import Iterator, Sequence

from fedda.claims import Verdict
from fedda.claims.compare import INCONCLUSIVE, NOT_SUPPORTED, NOT_TESTED, Detail
from fedda.claims.sentences import COUNTED, grouped, named
from fedda.claims.statements import figures
from fedda.claims.values import BYTES, COSTS, ROUNDS
from fedda.report.claims import SIGNS
from fedda.report.style import METHODS
from fedda.runs.formats import plain, size
from fedda.runs.metrics import metric as metric_of

from .tables import markdown

FEW = 3  # comparisons that are told with their numbers
RATIO = 10  # fewer rounds or bytes are a ratio of two costs
NAMED = 4  # comparisons that a sentence names
WAYS = {
    "checkpoint": "at the checkpoint that is best on validation data",
    "end": "at the end",
    "rounds": "by rounds to the target",
    "bytes": "by bytes to the target",
    "beside": "in the other metrics",
}


def signed(verdict: str) -> str:
    return f"{SIGNS[verdict]} {verdict}"


def with_marks(v: Verdict) -> str:
    """The verdict; a star if a part was not run, a dagger if other data stand in for the paper's."""
    return signed(v.verdict) + (" \\*" if v.in_part else "") + (" †" if v.stand_in else "")


def told(v: Verdict) -> str:
    """A verdict in sentences: what decides, what was lost, the other ways, and what a reader must know."""
    if v.verdict == NOT_TESTED:
        return " ".join(_why_untested(v))
    own = v.deciding
    where = "" if v.claim.kind in ("traffic", "rise", "largest") else f" {WAYS[v.way]}"
    parts = [f"{_tally(own)}{where}."]
    if len(own) <= FEW:
        parts += [f"{upper('; '.join(_told_with_numbers(own)))}."]
    else:
        parts += [f"{word}: {_listed(some)}." for word, some in _against(own) if some]
    parts += [f"{upper(note)}." for note in v.notes]
    for way in dict.fromkeys(d.way for d in v.details if d.way != v.way):
        parts.append(_other_way(way, [d for d in v.details if d.way == way]))
    parts += [f"{upper(remark)}." for remark in dict.fromkeys(v.remarks)]
    return " ".join(parts)


def _why_untested(v: Verdict) -> Iterator[str]:
    if v.claim.kind == "density":
        yield "No experiment can check it."
    yield from (f"{upper(remark)}." for remark in dict.fromkeys(v.remarks))


def _tally(details: Sequence[Detail]) -> str:
    """How many comparisons were won, are undecided and were lost."""
    outcomes = [d.verdict for d in details]
    number = {word: outcomes.count(verdict) for verdict, word in COUNTED.items()}
    if len(details) == 1:
        return {"won": "The one comparison was won", "lost": "The one comparison was lost"}.get(
            COUNTED[outcomes[0]], "The one comparison is undecided"
        )
    if number["won"] == len(details):
        return f"{'Both' if len(details) == 2 else f'All {len(details)}'} comparisons were won"
    rest = [f"{number['lost']} lost", f"{number['undecided']} undecided"]
    rest += [f"{number['not run']} not run"] if number["not run"] else []
    return f"{number['won']} of {len(details)} comparisons won, {', '.join(rest)}"


def _against(details: Sequence[Detail]) -> Iterator[tuple[str, list[Detail]]]:
    """The comparisons that a reader asks about: the lost ones, else the undecided ones."""
    lost = [d for d in details if d.verdict == NOT_SUPPORTED]
    yield "Lost", lost
    yield "Undecided", [] if lost else [d for d in details if d.verdict == INCONCLUSIVE]


def _told_with_numbers(details: Sequence[Detail]) -> Iterator[str]:
    for comparison, own in grouped(details):
        values = (f"{named(d.metric)} {value(d.a, d.metric)} against {value(d.b, d.metric)}{_outcome(d)}" for d in own)
        yield f"{comparison}: {', '.join(values)}"


def _outcome(d: Detail) -> str:
    return f" ({COUNTED[d.verdict]})"


def _listed(details: Sequence[Detail]) -> str:
    groups = grouped(details)
    shown = [f"{comparison} ({', '.join(named(d.metric) for d in own)})" for comparison, own in groups[:NAMED]]
    return ", ".join(shown) + (f", and {len(groups) - NAMED} more below" if len(groups) > NAMED else "")


def _other_way(way: str, details: Sequence[Detail]) -> str:
    if way == "beside":
        metrics = dict.fromkeys(d.metric for d in details)
        return " ".join(_other_way(f"{named(m)}", [d for d in details if d.metric == m]) for m in metrics)
    outcomes = [d.verdict for d in details]
    parts = [f"{outcomes.count(v)} {word}" for v, word in COUNTED.items() if outcomes.count(v)]
    return f"{upper(WAYS.get(way, way))}: {', '.join(parts)}."


def upper(text: str) -> str:
    """The first letter in upper case, unless the first word is the name of a method or a figure."""
    first = text.split(" ")[0].rstrip(":")
    return text if first in figures() or first in METHODS else text[:1].upper() + text[1:]


def value(number: float | None, metric: str) -> str:
    """A number of a comparison with its unit."""
    if number is None:
        return "–"
    if metric in COSTS and number < RATIO:
        return f"{plain(number, 3)} times"
    if metric == ROUNDS:
        return f"{number:,.0f}"
    if metric in (BYTES, "bytes_up", "bytes_down"):
        return size(number)
    return f"{100 * number:.1f} %" if metric_of(metric).percent else plain(number, 3)


def comparisons(v: Verdict) -> str:
    """Every comparison of a verdict, in all ways, as a table."""
    rows = []
    for d in sorted(v.details, key=lambda d: d.way != v.way):
        difference = "–"
        if d.difference is not None and d.metric in COSTS:
            difference = f"{plain(math.exp(d.difference), 3)} times"
        elif d.difference is not None:
            unit, scale = (" points", 100) if metric_of(d.metric).percent else ("", 1)
            half = f" ± {plain(scale * d.interval, 2)}" if d.interval is not None else ""
            difference = f"{scale * d.difference:+.3g}{half}{unit}"
        way = WAYS.get(d.way, d.way) if d.way not in ("rounds", "bytes") else "to the target"
        rows.append([
            d.comparison, named(d.metric), way, value(d.a, d.metric), value(d.b, d.metric), difference,
            plain(d.p, 2), COUNTED[d.verdict],
        ])  # fmt: skip
    return markdown(["comparison", "metric", "where", "A", "B", "difference", "p", "outcome"], rows)
