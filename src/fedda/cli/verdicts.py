"""Verdicts on the paper's claims in a terminal."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import claims as judged
from ..claims.compare import NOT_TESTED, WORDS
from ..claims.sentences import counts
from ..runs.formats import plain

COLOURS = dict(zip(WORDS, ("green", "yellow", "red", "cyan", "dim"), strict=True))


def console() -> Console:
    """As wide as the terminal, or 200 columns in a file; "[b]" in a label is not markup."""
    return Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False, highlight=False)


def print_verdicts(group: judged.Group, folder: Path) -> None:
    """The verdicts of one run in short, each on the run's own figure."""
    screen = console()
    for v in group.verdicts:
        if v.verdict != NOT_TESTED:
            screen.print(Text(f"{v.claim.id:4}").append(f"{v.verdict:14}", COLOURS[v.verdict]).append(in_short(v)))
    print(f"numbers: {shlex.join(['fedda', 'claims', str(folder)])}")


def in_short(v: judged.Verdict) -> str:
    remarks = "; ".join(filter(None, (f"on {v.stand_in}" if v.stand_in else "", *v.remarks)))
    what = f"{counts(v.deciding)}: {v.claim.text}"
    return what + (f" ({remarks})" if remarks else "")


def show(group: judged.Group, details: bool, console: Console) -> None:
    """One setting: a table of the claims that were tested, the others in short, and the number of each verdict."""
    runs = f"runs: {', '.join(group.runs) or 'none'}"
    console.print(f"setting: {group.setting or 'not named'}; {runs}", style="bold")
    tested = [v for v in group.verdicts if v.verdict != NOT_TESTED]
    if tested:
        console.print(overview(tested))
    if details:
        for v in tested:
            console.print(comparisons(v))
    for reason, ids in untested(group.verdicts).items():
        console.print(f"{NOT_TESTED}: {', '.join(ids)}: {reason}", style=COLOURS[NOT_TESTED])
    for note in group.notes:
        console.print(f"note: {note}")
    counts = {word: sum(v.verdict == word for v in group.verdicts) for word in WORDS}
    console.print(", ".join(f"{word} {count}" for word, count in counts.items()), style="bold")


def overview(verdicts: Sequence[judged.Verdict]) -> Table:
    table = Table()
    table.add_column("id", no_wrap=True)
    table.add_column("claim", ratio=2)
    table.add_column("verdict", no_wrap=True)
    table.add_column("numbers", ratio=3)
    table.add_column("seeds", no_wrap=True)
    for v in verdicts:
        on = f"on {v.stand_in}: " if v.stand_in else ""
        seeds = sorted({d.seeds for d in v.details if d.seeds is not None})
        shown = f"{seeds[0]}" + (f" to {seeds[-1]}" if len(seeds) > 1 else "") if seeds else "–"
        table.add_row(v.claim.id, v.claim.text, Text(v.verdict, style=COLOURS[v.verdict]), on + v.reason, shown)
    return table


def comparisons(v: judged.Verdict) -> Table:
    table = Table(title=f"{v.claim.id}: {v.verdict} ({v.claim.where})", title_justify="left")
    for head in ("where", "comparison", "metric", "A", "B", "difference", "±", "p", "seeds", "verdict"):
        table.add_column(head, no_wrap=head == "comparison")
    for d in v.details:
        numbers = (plain(number) for number in (d.a, d.b, d.difference, d.interval, d.p, d.seeds))
        table.add_row(d.way, d.comparison, d.metric, *numbers, Text(d.verdict, style=COLOURS[d.verdict]))
    return table


def untested(verdicts: Sequence[judged.Verdict]) -> dict[str, list[str]]:
    """The claims that were not tested, by reason."""
    reasons: dict[str, list[str]] = {}
    for v in verdicts:
        if v.verdict == NOT_TESTED:
            reasons.setdefault(v.reason, []).append(v.claim.id)
    return reasons
